// Shows the difference between any two stages, as `diff -u` prints it: #03-12 in the
// address are the two.
const { scripts, hunks } = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(scripts);
const lines = names.map((name) => scripts[name].split("\n"));

const form = document.createElement("form");
form.className = "filter";
form.innerHTML = `<label for="from">from</label><select id="from"></select>
  <label for="to">to</label><select id="to"></select><output></output>`;
const [from, to] = form.querySelectorAll("select");
const status = form.querySelector("output");
for (const select of [from, to])
  for (const name of names) select.add(new Option(name));
const shown = document.createElement("div");
shown.className = "highlight-diff notranslate";
shown.id = "shown";
document.querySelector(".bd-article details").before(form, shown);

function show() {
  const [a, b] = [from.selectedIndex, to.selectedIndex];
  const [first, last] = [Math.min(a, b), Math.max(a, b)];
  const pre = document.createElement("pre");
  const counts = { "+": 0, "-": 0 };
  const add = (kind, text) => {
    const line = document.createElement("span");
    line.className = kind;
    line.textContent = `${text}\n`;
    pre.append(line);
  };
  for (const hunk of hunks[`${names[first]} ${names[last]}`] ?? []) {
    const [old, now] = [[lines[first], hunk[0] - 1], [lines[last], hunk[1] - 1]];
    add("gu", `@@ ${from.value} ${hunk[a > b ? 1 : 0]}, ${to.value} ${hunk[a > b ? 0 : 1]} @@`);
    for (const sign of hunk[2]) {
      const side = sign === "+" ? now : old;
      const text = side[0][side[1]];
      if (sign !== "+") old[1] += 1;
      if (sign !== "-") now[1] += 1;
      const turned = a > b ? { "+": "-", "-": "+", " ": " " }[sign] : sign;
      if (turned !== " ") counts[turned] += 1;
      add({ "+": "gi", "-": "gd", " ": "" }[turned], turned + text);
    }
  }
  const box = document.createElement("div");
  box.className = "highlight";
  box.append(pre);
  shown.replaceChildren(box);
  status.value = a === b ? "the same stage" : `+${counts["+"]} −${counts["-"]} lines`;
}

function fromAddress() {
  const [, a, b] = location.hash.match(/^#(\w+)-(\w+)$/) ?? [];
  const find = (text) => names.findIndex((name) => text && name.startsWith(text));
  [from.selectedIndex, to.selectedIndex] = [find(a), find(b)];
  if (to.selectedIndex < 0) [from.selectedIndex, to.selectedIndex] = [0, 2];
  show();
}
form.addEventListener("change", () => {
  const number = (name) => name.split("_")[0];
  history.replaceState(null, "", `#${number(from.value)}-${number(to.value)}`);
  show();
});
addEventListener("hashchange", fromAddress);
fromAddress();
