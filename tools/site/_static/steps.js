// Goes through a step that tools/record_steps.py has recorded: #12-5 in the address is
// stage 12, moment 5.
const { recorded, scripts, colors } = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(recorded);
const KINDS = {
  weights: ["own weights", colors.weights],
  gathered: ["gathered weights", colors.copies],
  gradients: ["gradients", colors.gradients],
  optimizer: ["optimizer", colors.optimizer],
  activations: ["activations", colors.activations],
};

const player = document.createElement("div");
player.className = "steps";
player.innerHTML = `
  <form class="filter"><label>stage <select></select></label>
    <button type="button" aria-label="back">◀</button>
    <input type="range" min="1" aria-label="moment">
    <button type="button" aria-label="forward">▶</button><output></output></form>
  <p class="says" aria-live="polite"></p>
  <div class="ranks"></div><p class="legend"></p>
  <div class="highlight"><pre></pre></div>`;
document.querySelector(".bd-article h1").after(player);
const [select, range, output] = ["select", "input", "output"].map((each) => player.querySelector(each));
const [back, forth] = player.querySelectorAll("button");
for (const name of names) select.add(new Option(name));
player.querySelector(".legend").innerHTML = Object.values(KINDS)
  .map(([label, color]) => `<span style="background:${color}"></span>${label}`)
  .join(" ");

const bytes = (count) => {
  const [unit, size] = count >= 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
  return count < 2 ** 10 ? `${count} bytes` : `${(count / size).toFixed(count / size < 10 ? 1 : 0)} ${unit}`;
};

// A moment is [what, module, line, holds] or [collective, ranks, given, whole, line, holds].
function parse(moment) {
  const [holds, line] = [moment.at(-1), moment.at(-2)];
  const [what, first, given, whole] = moment;
  return Array.isArray(first) ? { what, ranks: first, given, whole, line, holds } : { what, module: first, line, holds };
}

function words({ what, module, given, whole }) {
  if (what === "optimizer") return "The optimizer has updated each rank's own weights.";
  if (what === "forward") return `Forward: <code>${module}</code> has computed its output.`;
  if (what === "backward") return `Backward: the gradient of the output of <code>${module}</code> is there.`;
  const name = `<code>${what}</code>`;
  if (what === "all_gather") return `${name}: each rank gives ${bytes(given)}, and all get ${bytes(whole)}.`;
  if (what === "reduce_scatter") return `${name}: each rank gives ${bytes(given)}, and keeps a share of the sum.`;
  if (what === "broadcast") return `${name}: all get ${bytes(whole)} of the first rank.`;
  return `${name}: each rank gives ${bytes(given)}, and all get the sum.`;
}

function show() {
  const ranks = recorded[select.value].map((moments) => parse(moments[range.value - 1]));
  const most = Math.max(
    ...recorded[select.value].flat().map((moment) => Object.values(moment.at(-1)).reduce((a, b) => a + b, 0)),
  );
  output.value = `${range.value} of ${range.max}`;
  player.querySelector(".says").innerHTML = words(ranks[0]);
  player.querySelector(".ranks").innerHTML = ranks
    .map(({ ranks: group, holds }, rank) => {
      const bar = Object.entries(KINDS).map(
        ([kind, [label, color]]) =>
          `<span title="${label}: ${bytes(holds[kind])}" style="width:${(100 * holds[kind]) / most}%;background:${color}"></span>`,
      );
      const total = Object.values(holds).reduce((a, b) => a + b, 0);
      const others = group?.filter((each) => each !== rank).join(", ");
      return `<div class="rank ${group ? "sends" : ""}"><b>rank ${rank}</b>${group ? ` ⇄ ${others}` : ""}
        <i>${bar.join("")}</i><small>${bytes(total)}</small></div>`;
    })
    .join("");
  const lines = scripts[select.value].split("\n");
  const here = ranks[0].line - 1;
  player.querySelector("pre").replaceChildren(
    ...lines.slice(Math.max(0, here - 5), here + 6).map((text, n) => {
      const line = document.createElement("span");
      const number = Math.max(0, here - 5) + n;
      line.className = number === here ? "hll" : "";
      line.textContent = `${String(number + 1).padStart(4)}  ${text}\n`;
      return line;
    }),
  );
}

function go(moment) {
  range.value = moment;
  history.replaceState(null, "", `#${select.value.slice(0, 2)}-${range.value}`);
  show();
}

function choose(name, moment = 1) {
  select.value = name;
  range.max = recorded[name][0].length;
  go(moment);
}

function fromAddress() {
  const [, number, moment] = location.hash.match(/^#(\d\d)-(\d+)$/) ?? [];
  choose(names.find((name) => name.startsWith(number)) ?? names[0], moment);
}
select.addEventListener("change", () => choose(select.value));
range.addEventListener("input", () => go(range.value));
back.addEventListener("click", () => go(Number(range.value) - 1));
forth.addEventListener("click", () => go(Number(range.value) + 1));
player.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea") || event.altKey || event.ctrlKey) return;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step) {
    event.preventDefault();
    event.stopImmediatePropagation();
    go(Number(range.value) + step);
  }
}, true);
addEventListener("hashchange", fromAddress);
fromAddress();
