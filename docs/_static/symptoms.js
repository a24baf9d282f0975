// Filters the rows of the page by words: those that contain all of them stay, or if
// there are none, those that contain most. #find=WORDS in the address fills it in.
const article = document.querySelector(".bd-article");
const tables = [...article.querySelectorAll("table")];
const rows = [...article.querySelectorAll("tbody tr")];
const sections = [...article.querySelectorAll("section section")];
const prose = sections.filter((each) => !each.querySelector("table, section"));
const intro = article.querySelectorAll("h1 ~ p");
const texts = new Map(); // with parts of names as words of their own, too
for (const each of [...rows, ...prose])
  texts.set(each, each.textContent + each.textContent.replace(/([a-z])([A-Z])/g, "$1 $2"));

const form = document.createElement("form");
form.className = "filter";
form.innerHTML = `<label for="words">Words of your message</label>
  <input id="words" type="search" autocomplete="off" spellcheck="false"
    placeholder="closed by peer"><output for="words"></output>`;
const [input, status] = [form.querySelector("input"), form.querySelector("output")];
form.addEventListener("submit", (event) => event.preventDefault());
article.querySelector("h1").after(form);

const quoted = (word) => word.replace(/\W/g, "\\$&");

function filter() {
  const words = input.value.split(/[\s`]+/).filter(Boolean);
  const begins = words.map((word) => new RegExp(`(?<![a-z])${quoted(word)}`, "i"));
  const found = (each) => begins.filter((begin) => begin.test(texts.get(each))).length;
  const most = Math.max(...rows.map(found));
  for (const each of [...rows, ...prose]) each.hidden = found(each) < most;
  for (const each of [...sections, ...tables])
    if (!prose.includes(each))
      each.hidden = !each.querySelector("tbody tr:not([hidden]), section:not([hidden])");
  for (const each of intro) each.hidden = words.length > 0;
  const left = rows.filter((row) => !row.hidden).length;
  if (!words.length) status.value = "";
  else if (!most) status.value = "No row has any of these words.";
  else if (most < words.length)
    status.value = `No row has all of these words; ${left} of ${rows.length} have ${most} of them.`;
  else status.value = `${left} of ${rows.length} rows`;
}

function fromAddress() {
  const words = location.hash.match(/^#find=(.*)/);
  if (!words) return;
  input.value = decodeURIComponent(words[1]);
  filter();
}
input.addEventListener("input", () => {
  const words = encodeURIComponent(input.value);
  history.replaceState(null, "", words ? `#find=${words}` : location.pathname);
  filter();
});
addEventListener("hashchange", fromAddress);
fromAddress();
