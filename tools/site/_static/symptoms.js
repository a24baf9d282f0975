// Finds the rows of the page for words, a message or a whole log, and shows the best row
// first. #find=WORDS in the address fills it in.
const article = document.querySelector(".bd-article");
const tables = [...article.querySelectorAll("table")];
const sections = [...article.querySelectorAll("section section")];
const prose = sections.filter((each) => !each.querySelector("table, section"));
const intro = article.querySelectorAll("h1 ~ p");

const english = {
  label: "Words of your message, or the whole log",
  all: (left) => `${left} of ${rows.length} rows, the best first`,
  some: (left, most, words) =>
    `No row has all of these words. The best of ${left} has ${most} of ${words}.`,
  log: (left) => `${left} rows for this log, the best first`,
  none: "No row has any of these words.",
};
const chinese = {
  label: "报错中的词，或者整段日志",
  all: (left) => `共 ${rows.length} 行，显示 ${left} 行，最相关的在前`,
  some: (left, most, words) =>
    `没有包含全部这些词的行。显示 ${left} 行，第一行包含 ${words} 个词中的 ${most} 个。`,
  log: (left) => `与这段日志有关的有 ${left} 行，最相关的在前`,
  none: "没有包含这些词的行。",
};
const says = document.documentElement.lang === "zh-CN" ? chinese : english;

// ---- words -------------------------------------------------------------------------
// What each failed run prints, or each run: in a log it says less than all else.
const USUAL = new RegExp(
  "ChildFailedError|exitcode|closing signal|SIGTERM|SIGABRT|-1?5|-6|error_file|" +
    "Connection (closed|reset)|ncclRemoteError|destroy_process_group\\(\\) was|" +
    "OMP_NUM_THREADS|device under current|Guessing device|srun: error|" +
    "terminate called|death signal|currently unknown|Watchdog",
);
const COMMON = new Set(
  ("a an and are as at be but by can do does for from has have i if in is it its my no " +
    "not of on or so that the then they this to was when which with error").split(" "),
);

// Names are split at dots; of Chinese, which has no spaces, each two characters count.
// Numbers do not, except negative ones: those are exit codes.
function wordsOf(text) {
  const found = text.match(/\p{Script=Han}+|(?<![\w-])-\d+\b|[\p{L}\p{N}_]+/gu) || [];
  return found
    .filter((word) => !/^(0x)?\d[\d_]*$/.test(word))
    .flatMap((word) => (/\p{Script=Han}{3}/u.test(word) ? pairs(word) : [word]));
}
const pairs = (run) => [...run].slice(1).map((_, n) => run.slice(n, n + 2));

// The parts of a name in snake_case or CamelCase.
const partsOf = (word) =>
  word
    .replace(/([a-z])([A-Z])/g, "$1 $2")
    .split(/[\s_]+/)
    .filter(Boolean);
const joined = (text) => ` ${wordsOf(text.toLowerCase()).join(" ")} `;

class Row {
  constructor(element) {
    this.element = element;
    const [see] = element.querySelectorAll("td");
    const vocabulary = (text) => {
      const words = wordsOf(text);
      return [...new Set([...words, ...words.flatMap(partsOf)].map((w) => w.toLowerCase()))];
    };
    this.seen = vocabulary(see.textContent);
    this.words = vocabulary(element.textContent);
    // The messages that it quotes; "..." in them stands for anything.
    this.quotes = [...see.querySelectorAll("code")].map((each) => ({
      usual: USUAL.test(each.textContent),
      parts: each.textContent.split("...").map(joined).filter((part) => part.trim()),
    }));
  }
}
const rows = [...article.querySelectorAll("tbody tr")].map((each) => new Row(each));

// "hang" finds hangs, and "hangs" finds hang.
const alike = (word, other) =>
  other.startsWith(word) ||
  (other.length > 3 && word.startsWith(other) && word.length - other.length < 4);

// Rare words weigh more. A word that no row has weighs nothing.
const weights = new Map();
function weight(word) {
  if (!weights.has(word)) {
    const count = rows.filter((row) => row.words.some((w) => alike(word, w))).length;
    const rare = count && Math.log(1 + rows.length / count) ** 2;
    weights.set(word, COMMON.has(word) ? rare / 20 : rare);
  }
  return weights.get(word);
}

// ---- the order of the rows ---------------------------------------------------------
// The words of a line; of a name that no row has, its parts.
function wordsAskedFor(line) {
  const known = (word) => weight(word.toLowerCase()) || !partsOf(word)[1];
  const words = wordsOf(line).flatMap((word) => (known(word) ? [word] : partsOf(word)));
  return [...new Set(words.map((word) => word.toLowerCase()))];
}

function score(row, asked) {
  let sum = 0;
  for (const word of asked)
    if (row.seen.some((w) => alike(word, w))) sum += weight(word);
    else if (row.words.some((w) => alike(word, w))) sum += weight(word) / 3;
  return sum;
}

// What a row's messages weigh that occur in the text as they are.
function quoted(row, text, isLog) {
  let most = 0;
  for (const { parts, usual } of row.quotes)
    if (parts.length && parts.every((part) => text.includes(part))) {
      const words = [...new Set(parts.join("").trim().split(/\s+/))];
      const sum = words.reduce((total, word) => total + weight(word), 0);
      most = Math.max(most, isLog && usual ? sum / 10 : 2 * sum);
    }
  return most;
}

// The lines of a log that can be messages: no code, and no places in files.
function messages(text) {
  const lines = text.split("\n").map((line) => line.replace(/^.*?\[rank\d+\]: ?/, ""));
  const left = lines.filter((line) => /^\S/.test(line));
  return lines.length > 1 && left.length ? left : [text];
}

function find(text) {
  const lines = messages(text);
  const isLog = lines.length > 1;
  const all = joined(text);
  const asked = lines.map(wordsAskedFor);
  for (const row of rows) {
    // Of a log the best line counts.
    const each = asked.map((words) => score(row, words));
    row.score = quoted(row, all, isLog) + Math.max(...each) / (isLog ? 3 : 1);
  }
  const found = rows.filter((row) => row.score > 0);
  found.sort((one, other) => other.score - one.score);
  const words = asked.flat();
  const has = (row) => words.filter((w) => row.words.some((x) => alike(w, x))).length;
  const most = found.length ? Math.max(...found.map(has)) : 0;
  const left = found.filter((row) => {
    if (!isLog && most === words.length) return has(row) === most;
    return row.score > found[0].score / 3;
  });
  return { left: left.slice(0, 12), most: found.length && has(found[0]), words, isLog };
}

// ---- the page ----------------------------------------------------------------------
const form = document.createElement("form");
form.className = "filter";
form.innerHTML = `<label for="words">${says.label}</label>
  <textarea id="words" rows="1" autocomplete="off" spellcheck="false"
    placeholder="closed by peer"></textarea><output for="words"></output>`;
const [input, status] = [form.querySelector("textarea"), form.querySelector("output")];
const results = tables[0].cloneNode(true);
results.hidden = true;
form.addEventListener("submit", (event) => event.preventDefault());
article.querySelector("h1").after(form, results);

function filter() {
  const text = input.value.trim();
  const { left, most, words, isLog } = text ? find(text) : { left: [] };
  const clones = left.map((row) => row.element.cloneNode(true));
  results.tBodies[0].replaceChildren(...clones);
  results.hidden = !left.length;
  for (const each of [...tables, ...intro]) each.hidden = Boolean(text);
  // Below them stand the sections of this page to which they lead.
  const links = left.flatMap((row) => [...row.element.querySelectorAll("a[href^='#']")]);
  const targets = links.map((link) => decodeURIComponent(link.hash.slice(1)));
  for (const each of sections) {
    const ids = [each, ...each.querySelectorAll("[id]")].map(({ id }) => id);
    each.hidden = Boolean(text) && !ids.some((id) => targets.includes(id));
  }
  if (!text) status.value = "";
  else if (!left.length) status.value = says.none;
  else if (isLog) status.value = says.log(left.length);
  else if (most < words.length)
    status.value = says.some(left.length, most, words.length);
  else status.value = says.all(left.length);
}

function fromAddress() {
  const words = location.hash.match(/^#find=(.*)/);
  if (!words) return;
  input.value = decodeURIComponent(words[1]);
  filter();
}
input.addEventListener("input", () => {
  const words = encodeURIComponent(input.value.slice(0, 500));
  history.replaceState(null, "", words ? `#find=${words}` : location.pathname);
  filter();
});
addEventListener("hashchange", fromAddress);
fromAddress();
