// The form of your_own_script/memory.py: the same formulas, which a test holds equal.
// A setting is a flag of memory.py, in the address as #gpus=8&tokens=8192.
const MOMENTS = ["forward", "loss", "backward", "last group", "optimizer"];
const WORKSPACES = 4 * 32 * 2 ** 20;
const { colors } = JSON.parse(document.getElementById("data").textContent);

// block, layers, width, heads, kv_heads, inner, vocabulary, positions, tied, qkv_bias
const MODELS = {
  "Llama-3-8B": ["llama", 32, 4096, 32, 8, 14336, 128256, 0, false, false],
  "Llama-3-70B": ["llama", 80, 8192, 64, 8, 28672, 128256, 0, false, false],
  "Mistral-7B": ["llama", 32, 4096, 32, 8, 14336, 32000, 0, false, false],
  "Qwen2-7B": ["llama", 28, 3584, 28, 4, 18944, 152064, 0, false, true],
  "Qwen2.5-0.5B": ["llama", 24, 896, 14, 2, 4864, 151936, 0, true, true],
  "GPT-2": ["gpt", 12, 768, 12, 12, 3072, 50257, 1024, true, false],
};
// The sizes that tensor parallelism divides, in words.
const DIVIDED = {
  heads: "number of heads",
  kv_heads: "number of key-value heads",
  inner: "width of the MLP",
  vocabulary: "vocabulary",
  positions: "number of positions",
};
const SIZES = ["layers", "width", "heads", "kv_heads", "inner", "vocabulary", "positions"];
const COLORS = {
  "weights, float32": colors.weights,
  "gradients, float32": colors.gradients,
  "whole gradients": colors.gradients,
  "embedding's gradient": colors.gradients,
  "AdamW's averages, float32": colors.optimizer,
  "square roots of averages": colors.optimizer,
  "gathered weights": colors.weights,
  "autocast's copies of weights": colors.copies,
  "DDP's buckets": colors.buckets,
  "copy to reduce": colors.buckets,
  activations: colors.activations,
  "logits and loss": colors.logits,
};

// ---- the numbers --------------------------------------------------------------------
function divided(shape, by) {
  const parts = Object.keys(DIVIDED).map((name) => [name, Math.floor(shape[name] / by)]);
  return { ...shape, head_dim: shape.width / shape.heads, ...Object.fromEntries(parts) };
}

function misfit(all) {
  const by = all.tensor_parallel;
  if (by === 1) return "";
  if (all.groups === "ddp") return "goes with FSDP2, not with DDP";
  const sizes = [["number of GPUs", all.gpus]];
  for (const [name, text] of Object.entries(DIVIDED)) sizes.push([text, all[name]]);
  const wrong = sizes.find(([, size]) => size % by);
  return wrong ? `must divide the ${wrong[0]} (${wrong[1]})` : "";
}

function count(shape) {
  const { width, inner, head_dim: headDim } = shape;
  const [queries, keys] = [shape.heads * headDim, shape.kv_heads * headDim];
  const gpt = shape.block === "gpt";
  const norm = width * (gpt ? 2 : 1);
  const attention = 2 * width * (queries + keys);
  const ofBlock = gpt
    ? attention + 2 * width * inner + queries + 2 * keys + inner + 2 * width + 2 * norm
    : attention + 3 * width * inner + (shape.qkv_bias ? queries + 2 * keys : 0) + 2 * norm;
  const embedding = shape.vocabulary * width;
  const ends = embedding * (shape.tied ? 1 : 2) + shape.positions * width;
  const parameters = ends + shape.layers * ofBlock + norm;
  return { gpt, norm, ofBlock, embedding, parameters };
}

function activations(shape, { gpt }, low, residual) {
  const { width, heads, inner, head_dim: headDim } = shape;
  const norm = gpt ? (4 + low) * width + 8 : (4 + residual + low) * width + 4;
  const mlp = (gpt ? 2 : 4) * inner;
  const block = 2 * norm + 4 * heads * headDim * low + 4 * heads + mlp * low;
  const outside = norm + 24 + (gpt ? 0 : 8 * headDim);
  return [block, outside, Math.max((2 * inner + 2 * width) * low, 16 * width)];
}

function split(shape, of, groups) {
  const blocks = Array(shape.layers).fill(of.ofBlock);
  let root = of.parameters - shape.layers * of.ofBlock;
  if (groups === "whole") return [of.parameters, []];
  if (groups === "ends" && !shape.tied) {
    root -= 2 * of.embedding;
    return [root, [of.embedding, ...blocks, of.embedding + of.norm]];
  }
  return [root, blocks];
}

function atOnce(before, groups) {
  const previous = [before, ...groups];
  return Math.max(0, ...groups.map((group, n) => previous[n] + 2 * group));
}

function ofGroups(shape, of, gpus, low, groups) {
  const [root, others] = split(shape, of, groups);
  const apart = others.length > shape.layers;
  const [head, first] = apart ? [others.at(-1), others[0]] : [0, 0];
  const largest = Math.max(0, ...others);
  const waiting = apart ? 0 : others.length ? of.embedding : root;
  const last = root + first + (shape.tied ? 2 * of.embedding : 0);
  const copy = (one) => 4 * (one + Math.floor(one / gpus));
  return {
    "gathered weights": [
      low * Math.max(2 * root, root + atOnce(root, others)),
      low * (root + head),
      low * (root + atOnce(0, [...others].reverse())),
      low * (root + 2 * first),
      0,
    ],
    "whole gradients": [0, 0, low * (waiting + largest), low * last, 0],
    "copy to reduce": [0, 0, copy(largest), copy(Math.max(root, first)), 0],
  };
}

function table(model, options) {
  const { tokens, groups, tensor_parallel: by } = options;
  const [whole, gpus] = [count(divided(model, 1)), Math.floor(options.gpus / by)];
  const shape = divided(model, by);
  const of = count(shape);
  const [low, sharded] = [options.precision === "bf16" ? 2 : 4, groups !== "ddp"];
  const weights = of.parameters;
  const own = sharded ? Math.ceil(weights / gpus) : weights;
  const always = (bytes) => Array(5).fill(bytes);
  const lines = {
    "weights, float32": always(4 * own),
    "gradients, float32": always(4 * (options.grad_accum ? weights : own)),
    "AdamW's averages, float32": always(8 * own),
    "square roots of averages": [0, 0, 0, 0, 4 * own],
  };
  if (sharded) {
    Object.assign(lines, ofGroups(shape, of, gpus, low, groups));
    if (by > 1) lines["embedding's gradient"] = [0, 0, 0, low * whole.embedding, 0];
  } else {
    const used = shape.layers * of.ofBlock + of.norm + of.embedding;
    const copies = low === 2 ? 2 * used : 0;
    lines["DDP's buckets"] = always(4 * weights);
    lines["autocast's copies of weights"] = [copies, copies, copies, 0, 0];
  }
  const residual = sharded ? low : 4;
  const [block, outside, moving] = activations(shape, of, low, residual);
  let [kept, again] = [shape.layers * block + outside, 0];
  if (options.activation_checkpointing)
    [kept, again] = [shape.layers * residual * shape.width + outside, block];
  const perToken = [kept + again, kept, kept + again + moving, moving, 0];
  lines.activations = perToken.map((one) => tokens * one);
  const numbers = tokens * model.vocabulary;
  const perNumber = [low + 4, low + 12, 2 * low, low, low];
  lines["logits and loss"] = perNumber.map((one) => numbers * one);
  lines["workspaces of cuBLAS"] = always(WORKSPACES);
  return { parameters: whole.parameters, lines };
}

// ---- the form -----------------------------------------------------------------------
const form = document.createElement("form");
form.className = "calculator";
const number = (name, label, value) =>
  `<label>${label} <input type="number" name="${name}" min="1" step="1" value="${value}" required></label>`;
const box = (name, label) =>
  `<label><input type="checkbox" name="${name}"> ${label}</label>`;
form.innerHTML = `
  <label>model <select name="model">${Object.keys(MODELS)
    .map((name) => `<option>${name}</option>`)
    .join("")}<option>another shape</option></select></label>
  ${number("gpus", "GPUs that share the work", 8)}
  ${number("tensor_parallel", "of which split each layer: tensor parallelism", 1)}
  ${number("tokens", "tokens of a micro-batch, per GPU or group of these", 8192)}
  ${number("room", "GiB of a GPU, as nvidia-smi says", 79)}
  <label>precision <select name="precision"><option>bf16</option><option>float32</option></select></label>
  <label>sharded <select name="groups">
    <option value="ends">FSDP2: blocks, embedding, head</option>
    <option value="blocks">FSDP2: blocks only</option>
    <option value="whole">FSDP2: the whole model at once</option>
    <option value="ddp">not at all: DDP</option></select></label>
  ${box("activation_checkpointing", "activation checkpointing")}
  ${box("grad_accum", "reduce only after the last micro-batch")}
  <fieldset><legend>another shape</legend>
    <label>blocks <select name="block"><option value="llama">of a Llama</option><option value="gpt">of GPT-2</option></select></label>
    ${SIZES.map((name) => number(name, name.replace("_", " "), 1)).join("")}
    ${box("tied", "the head has the embedding's weight")}
    ${box("qkv_bias", "biases of queries, keys and values")}
  </fieldset>`;
const results = document.createElement("div");
results.className = "calculated";
results.setAttribute("aria-live", "polite");
document.querySelector(".bd-article h1").after(form, results);
const fields = form.elements;
fields.positions.min = 0;

function fillShape() {
  const shape = MODELS[fields.model.value];
  form.querySelector("fieldset").hidden = Boolean(shape);
  if (!shape) return;
  const [block, ...others] = shape;
  fields.block.value = block;
  SIZES.forEach((name, n) => (fields[name].value = others[n]));
  [fields.tied.checked, fields.qkv_bias.checked] = others.slice(-2);
}

function settings() {
  const found = {};
  for (const field of form.querySelectorAll("[name]"))
    found[field.name] =
      field.type === "checkbox" ? field.checked : field.type === "number" ? Number(field.value) : field.value;
  return found;
}

const gib = (bytes) => (bytes / 2 ** 30).toFixed(2);

function show() {
  const all = settings();
  const wrong = [...form.querySelectorAll("input")].find((field) => !field.checkValidity());
  let problem = wrong && `${wrong.name}: ${wrong.validationMessage}`;
  if (!problem && all.width % all.heads) problem = "heads must divide width";
  if (!problem && all.groups === "ddp" && all.grad_accum)
    problem = "reducing only after the last micro-batch is FSDP2's; DDP holds whole gradients anyway";
  if (!problem && misfit(all)) problem = `tensor_parallel ${misfit(all)}`;
  if (problem) return results.replaceChildren(problem);

  const { parameters, lines } = table(all, all);
  const sums = MOMENTS.map((_, n) => Object.values(lines).reduce((sum, line) => sum + line[n], 0));
  const most = Math.max(...sums);
  const left = all.room - most / 2 ** 30;
  const says =
    left < 0 ? `does not fit in ${all.room} GiB` : left < 4 ? `fits in ${all.room} GiB only just: leave a few GiB` : `fits in ${all.room} GiB`;
  const wide = Math.max(most, all.room * 2 ** 30);
  const bars = MOMENTS.map((moment, n) => {
    const parts = Object.entries(lines).filter(([, sizes]) => sizes[n]);
    const bar = parts.map(
      ([name, sizes]) =>
        `<span title="${name}: ${gib(sizes[n])} GiB" style="width:${(100 * sizes[n]) / wide}%;background:${COLORS[name] ?? "#999"}"></span>`,
    );
    return `<div class="bar"><b>${moment}</b><i>${bar.join("")}<u style="left:${(100 * all.room * 2 ** 30) / wide}%"></u></i></div>`;
  });
  const cells = (values) => values.map((bytes) => `<td>${bytes ? gib(bytes) : "-"}</td>`).join("");
  const rows = Object.entries(lines).map(
    ([name, sizes]) =>
      `<tr><th><span style="background:${COLORS[name] ?? "#999"}"></span>${name}</th>${cells(sizes)}</tr>`,
  );
  results.innerHTML = `<p><strong>At most ${gib(most)} GiB: ${says}.</strong> The fullest moment is
    <em>${MOMENTS[sums.indexOf(most)]}</em>; ${parameters.toLocaleString("en-US")} parameters.</p>
    ${bars.join("")}
    <div class="wide pst-scrollable-table-container"><table><thead><tr><th>GiB on each GPU</th>${MOMENTS.map((m) => `<th>${m}</th>`).join("")}</tr></thead>
    <tbody>${rows.join("")}<tr class="together"><th>together</th>${cells(sums)}</tr></tbody></table></div>`;
}

function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const set = (name) => {
    const field = fields[name];
    if (field && given.has(name)) {
      if (field.type === "checkbox") field.checked = given.get(name) === "true";
      else field.value = given.get(name);
    }
  };
  set("model");
  fillShape();
  for (const name of given.keys()) set(name);
  show();
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => {
  if (event.target === fields.model) fillShape();
  const all = settings();
  if (MODELS[all.model]) for (const name of ["block", ...SIZES, "tied", "qkv_bias"]) delete all[name];
  history.replaceState(null, "", `#${new URLSearchParams(all)}`);
  show();
});
addEventListener("hashchange", fromAddress);
fromAddress();
