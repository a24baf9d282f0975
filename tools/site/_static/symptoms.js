// Finds the rows of the page for words, a message or a whole log, and shows the best row
// first. #find=WORDS in the address fills it in.
const article = document.querySelector(".bd-article");
const tables = [...article.querySelectorAll("table")];
const sections = [...article.querySelectorAll("section section")];
const intro = article.querySelectorAll("h1 ~ p");

const english = {
  label: "Words of your message, or the whole log",
  all: (left) => `${left} of ${rows.length} rows, the best first`,
  some: (left, most, words) =>
    `No row has all of these words. The best of ${left} has ${most} of ${words}.`,
  long: (left) => `${left} rows for this text, the best first`,
  none: "No row has any of these words.",
};
const chinese = {
  label: "报错中的词，或者整段日志",
  all: (left) => `共 ${rows.length} 行，显示 ${left} 行，最相关的在前`,
  some: (left, most, words) =>
    `没有包含全部这些词的行。显示 ${left} 行，第一行包含 ${words} 个词中的 ${most} 个。`,
  long: (left) => `与这段文字有关的有 ${left} 行，最相关的在前`,
  none: "没有包含这些词的行。",
};
const says = document.documentElement.lang === "zh-CN" ? chinese : english;

// ---- words -------------------------------------------------------------------------
// What a run prints whatever its fault is: in a log it says less than all else.
const USUAL = new RegExp(
  "ChildFailedError|exitcode: -[^9]|closing signal|SIGTERM|SIGABRT|death signal|srun: error|" +
    "^-\\d+$|Connection (closed|reset)|ncclRemoteError|terminate called|Watchdog|" +
    "destroy_process_group|OMP_NUM_THREADS|device under current|Guessing device|" +
    "currently unknown|unallocated|SeqNum|OpType|NumelIn",
);
const COMMON = new Set(
  ("a an and any are as at be but by can could do does error file for from get has have " +
    "how i if in is it its line me my no not of on or so some that the then there " +
    "they this to use using vs was what when which why will with you your").split(" "),
);

// Names are split at dots; of Chinese, which has no spaces, each two characters count.
// Numbers do not count, except negative ones, which are exit codes.
const wordsOf = (text) =>
  (text.match(/\p{Script=Han}+|(?<![\w-])-\d+\b|[a-z0-9_]+/giu) || [])
    .filter((word) => !/^(0x[\da-f]+|\d[\d_]*)$/i.test(word))
    .flatMap((word) => (/\p{Script=Han}/u.test(word) ? pairs(word) : word));
const pairs = (run) => (run[2] ? [...run.slice(1)].map((c, n) => run[n] + c) : [run]);
// The parts of a name in snake_case or CamelCase.
const partsOf = (word) =>
  word.replace(/([a-z])([A-Z])/g, "$1_$2").split("_").filter(Boolean);
const lower = (words) => [...new Set(words.map((word) => word.toLowerCase()))];
const phrase = (text) => ` ${wordsOf(text.toLowerCase()).join(" ")} `;

// How much one word is another: all that begin with it are, and "evaluate" is nearly
// evaluation.
function likeness(word, other) {
  if (other.startsWith(word)) return 1;
  let same = 0;
  while (word[same] === other[same]) same++;
  const isNear = same > 3 && same >= 0.6 * Math.max(word.length, other.length);
  return isNear && !word.includes("_") ? 0.5 : 0;
}

// ---- rows --------------------------------------------------------------------------
function read(element) {
  const [see] = element.querySelectorAll("td");
  const vocabulary = ({ textContent }) => {
    const words = wordsOf(textContent);
    return new Set(lower([...words, ...words.flatMap(partsOf)]));
  };
  // The messages that it quotes; "..." in them stands for anything. A word is none.
  const literals = [...see.querySelectorAll(".literal")].map((each) => each.textContent);
  const quotes = literals.filter((quote) => !/^\W*[A-Z]?[a-z]+\W*$/.test(quote));
  return { element, seen: vocabulary(see), words: vocabulary(element), quotes };
}
const rows = [...article.querySelectorAll("tbody tr")].map(read);
const everyWord = [...new Set(rows.flatMap((row) => [...row.words]))];

// What a word counts in each row: more if it is rare, and in the first column.
const counted = new Map();
function counts(word) {
  if (!counted.has(word)) {
    const forms = everyWord.map((other) => [other, likeness(word, other)]);
    const like = forms.filter(([, much]) => much);
    const parts = partsOf(word);
    const within = (words) => {
      const much = largest(like.map(([form, much]) => (words.has(form) ? much : 0)));
      return much || (parts[1] && parts.every((part) => words.has(part)) ? 0.5 : 0);
    };
    const each = rows.map((row) => Math.max(within(row.seen), within(row.words) / 3));
    const rare = Math.log(1 + rows.length / (each.filter(Boolean).length || 1)) ** 2;
    const known = like.length > 0;
    counted.set(word, { known, rare, each: each.map((much) => much * rare) });
  }
  return counted.get(word);
}
const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
const largest = (numbers) => Math.max(0, ...numbers);

// ---- the order of the rows ---------------------------------------------------------
// The words of a line that are not in every line; of an unknown name, its parts.
function wordsAskedFor(line) {
  const known = (word) => counts(word.toLowerCase()).known;
  const all = lower(wordsOf(line).flatMap((word) => (known(word) ? word : partsOf(word))));
  const left = all.filter((word) => !COMMON.has(word));
  return left.length ? left : all;
}

// The lines of a log that can be messages: no code, and no places in files.
function linesOf(text) {
  const lines = text.split("\n").map((line) => line.replace(/^.*?\[rank\d+\]: ?/, ""));
  const left = lines.filter((line) => /^\S/.test(line));
  return lines.length > 1 && left.length ? left : [text];
}

// The words of a quoted message, if it occurs in a text as it is.
function quotedIn(quote, text) {
  const parts = quote.split("...").map(phrase).filter((part) => part.trim());
  const occurs = parts.length && parts.every((part) => text.includes(part));
  return occurs ? lower(parts.join("").trim().split(/\s+/)) : [];
}
function find(text) {
  const asked = linesOf(text).map(wordsAskedFor);
  const words = lower(asked.flat());
  const isLong = words.length > 12;
  const all = phrase(text);
  const scores = rows.map((row, n) => {
    const { quotes, seen } = row;
    // Of a log the best line counts; of rows with the same words, the shorter one.
    const each = asked.map((line) => total(line.map((word) => counts(word).each[n])));
    const words = largest(each) / Math.log(10 + seen.size) / (isLong ? 2 : 1);
    const found = quotes.filter((quote) => quotedIn(quote, all).length);
    const quoted = found.map((q) => total(quotedIn(q, all).map((w) => counts(w).rare)));
    const usual = isLong && found.length && found.every((quote) => USUAL.test(quote));
    return (words + largest(quoted)) / (usual ? 5 : 1);
  });
  const best = largest(scores);
  const has = rows.map((_, n) => words.filter((word) => counts(word).each[n]).length);
  const left = rows.map((_, n) => n).filter((n) => scores[n] && scores[n] > best / 3);
  left.sort((one, other) => scores[other] - scores[one]);
  const complete = left.filter((n) => has[n] === words.length);
  const shown = (complete.length ? complete : left).slice(0, 12);
  return { shown: shown.map((n) => rows[n]), most: has[shown[0]], words, isLong };
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
  const { shown, most, words, isLong } = text ? find(text) : { shown: [] };
  results.tBodies[0].replaceChildren(...shown.map((row) => row.element.cloneNode(true)));
  results.hidden = !shown.length;
  for (const each of [...tables, ...intro]) each.hidden = Boolean(text);
  // Below stand the sections of this page to which these rows lead.
  const links = [...results.tBodies[0].querySelectorAll("a[href^='#']")];
  const targets = new Set(links.map((link) => decodeURIComponent(link.hash.slice(1))));
  for (const each of sections) {
    const ids = [each, ...each.querySelectorAll("[id]")].map(({ id }) => id);
    each.hidden = Boolean(text) && !ids.some((id) => targets.has(id));
  }
  const left = shown.length;
  if (!text) status.value = "";
  else if (!left) status.value = says.none;
  else if (isLong) status.value = says.long(left);
  else if (most < words.length) status.value = says.some(left, most, words.length);
  else status.value = says.all(left);
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
