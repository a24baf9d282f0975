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

const english = {
  label: "Words of your message",
  all: (left) => `${left} of ${rows.length} rows`,
  some: (left, most) =>
    `No row has all of these words; ${left} of ${rows.length} have ${most} of them.`,
  none: "No row has any of these words.",
};
const chinese = {
  label: "报错中的词",
  all: (left) => `共 ${rows.length} 行，显示 ${left} 行`,
  some: (left, most) =>
    `没有包含全部这些词的行；共 ${rows.length} 行，其中 ${left} 行包含 ${most} 个。`,
  none: "没有包含这些词的行。",
};
const says = document.documentElement.lang === "zh-CN" ? chinese : english;

const form = document.createElement("form");
form.className = "filter";
form.innerHTML = `<label for="words">${says.label}</label>
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
  else if (!most) status.value = says.none;
  else status.value = most < words.length ? says.some(left, most) : says.all(left);
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
