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
player.style.setProperty("--computes", colors.compute ?? "gray");
player.style.setProperty("--sends", colors.buckets);
player.innerHTML = `
  <form class="filter"><label>stage <select></select></label>
    <span class="moves"><button type="button" aria-label="back">◀</button>
    <input type="range" min="1" aria-label="moment">
    <button type="button" aria-label="forward">▶</button></span><output></output></form>
  <div class="strip" aria-hidden="true"></div>
  <p class="says" aria-live="polite"></p><p class="why"></p>
  <div class="ranks"></div><p class="legend"></p>
  <div class="highlight"><pre></pre></div>`;
document.querySelector(".bd-article h1").closest("section").append(player); // below the words
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

const lineOf = (stage, { line }) => scripts[stage].split("\n")[line - 1];

// The part of the step that a moment belongs to, from the line that runs.
function phaseOf(stage, moment) {
  const line = lineOf(stage, moment);
  const parts = { "model(inputs)": "forward", "backward()": "backward", clip_grad_norm: "clip", "step(": "optimizer" };
  return parts[Object.keys(parts).find((text) => line.includes(text))] ?? "before";
}

// Whether a collective is within a group that splits layers: neighbors, and not all.
const inLayer = (stage, { ranks }) => ranks.length < recorded[stage].length && ranks[1] === ranks[0] + 1;
const isBucket = (stage, moment) =>
  moment.what === "all_reduce" && phaseOf(stage, moment) === "backward" && !inLayer(stage, moment);

function words(stage, moment) {
  const { what, module, given, whole } = moment;
  if (what === "optimizer") return "The <code>optimizer</code> has updated each rank's own weights.";
  if (what === "forward") return `Forward: <code>${module}</code> has computed its output.`;
  if (what === "backward") return `Backward: the gradient of the output of <code>${module}</code> is there.`;
  const name = `<code>${what}</code>`;
  if (what === "all_gather") return `${name}: each rank gives ${bytes(given)}, and all get ${bytes(whole)}.`;
  if (what === "reduce_scatter") return `${name}: each rank gives ${bytes(given)}, and keeps a share of the average.`;
  if (what === "broadcast") return `${name}: all get ${bytes(whole)} of rank 0.`;
  return `${name}: each rank gives ${bytes(given)}, and all get the ${isBucket(stage, moment) ? "average" : "sum"}.`;
}

function why(stage, moment) {
  const { what } = moment;
  const phase = phaseOf(stage, moment);
  if (what === "optimizer")
    return recorded[stage][0].some(([name]) => name === "reduce_scatter")
      ? "Each rank updates its own shards, and no other rank has these."
      : "All ranks have the same weights and the same averaged gradients, so they compute the same new weights.";
  if (what === "forward") return "Each rank computes this for its own samples. What backward will need stays in memory: the activations grow.";
  if (what === "backward") return "Backward goes from the last module to the first, and frees the activations that it has used.";
  if (what === "broadcast") return "Batch norm's running statistics follow each rank's own samples. DDP gives all ranks those of rank 0 before each forward pass.";
  if (what === "reduce_scatter") return "The ranks had different samples, so FSDP2 averages their gradients. Each rank keeps the part that belongs to its shards.";
  if (what === "all_gather" && inLayer(stage, moment)) return "Each rank has computed the logits of a part of the vocabulary. The loss needs all of them.";
  if (what === "all_gather")
    return phase === "backward"
      ? "The whole weights were freed after the forward pass, so backward gathers them again."
      : "Each rank keeps a shard of the weights. The next module needs them whole, so FSDP2 gathers them now.";
  if (phase === "before") return "The ranks count who has received a signal to stop, so that all of them stop after the same step.";
  if (phase === "clip") return "The norm of all gradients is clipped. Each rank has the squares of its own shards, and the ranks add these up.";
  if (isBucket(stage, moment)) return "A bucket of gradients is complete. DDP averages it while backward computes those of the modules before.";
  return phase === "backward"
    ? "Each rank has a part of the layer, and with it a part of the gradient of the layer's input. The sum is the gradient."
    : "Each rank has computed its part of the layer's product. The sum is the layer's output.";
}

// Returns the moment that first needs a collective's result: buckets and gradients wait
// for the end of backward, all else is needed by what comes next.
function neededAt(stage, moments, n) {
  const moment = moments[n];
  if (isBucket(stage, moment) || moment.what === "reduce_scatter")
    return moments.findIndex((each) => ["clip", "optimizer"].includes(phaseOf(stage, each)));
  return n + 1;
}

// Draws two lanes over the step: what rank 0 computes, and the collectives, each from
// its call to the moment that needs it.
function strip(stage, here) {
  const moments = recorded[stage][0].map(parse);
  const cell = (n, end, lane, kind) =>
    `<span class="${kind}${n === here ? " here" : ""}" data-moment="${n + 1}" style="grid-column:${n + 1}/${end + 1};grid-row:${lane}"></span>`;
  const rows = []; // where the last collective of a row ends
  const cells = moments.map((moment, n) => {
    if (!moment.ranks) return cell(n, n + 1, 1, moment.what);
    const end = neededAt(stage, moments, n);
    const row = [...rows, 0].findIndex((taken) => taken <= n);
    rows[row] = end;
    return cell(n, end, row + 2, "sent");
  });
  player.querySelector(".strip").innerHTML = cells.join("");
}

function show() {
  const ranks = recorded[select.value].map((moments) => parse(moments[range.value - 1]));
  const most = Math.max(
    ...recorded[select.value].flat().map((moment) => Object.values(moment.at(-1)).reduce((a, b) => a + b, 0)),
  );
  output.value = `${range.value} of ${range.max}`;
  player.querySelector(".says").innerHTML = words(select.value, ranks[0]);
  player.querySelector(".why").textContent = why(select.value, ranks[0]);
  strip(select.value, range.value - 1);
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
player.querySelector(".strip").addEventListener("click", (event) => {
  if (event.target.dataset.moment) go(event.target.dataset.moment);
});
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
