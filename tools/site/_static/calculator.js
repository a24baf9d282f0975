// The form of your_own_script/memory.py: the same formulas, which a test holds equal.
// A setting is an option of memory.py's table(), in the address as #gpus=8&tokens=8192.
const MOMENTS = ["forward", "loss", "backward", "last group", "optimizer"];
const WORKSPACES = 4 * 32 * 2 ** 20;
const [EIGHT_BITS, FOUR_BITS, SCALES, TABLES] = [1 + 4 / 256, 0.5, 1 / 64 + 4 / (64 * 256), 4 * (16 + 256 + 1)];
const MOST_GPUS = 4096;
const LLAMAS = ["llama", "mistral", "qwen2", "qwen3", "smollm3", "granite"];
const TARGETS = { all: ["q", "k", "v", "o", "gate", "up", "down"], qv: ["q", "v"] };
const { colors } = JSON.parse(document.getElementById("data").textContent);

// The sizes of a shape, each with its name in a config.json.
const SIZES = {
  layers: "num_hidden_layers",
  width: "hidden_size",
  heads: "num_attention_heads",
  kv_heads: "num_key_value_heads",
  head_dim: "head_dim; 0: width ÷ heads",
  inner: "intermediate_size",
  vocabulary: "vocab_size",
  positions: "learned ones; 0: none",
};
const KINDS = {
  tied: "tie_word_embeddings: the head has the embedding's weight",
  qkv_bias: "biases of queries, keys and values (attention_bias; Qwen2)",
  output_bias: "bias of attention's output (attention_bias)",
  mlp_bias: "mlp_bias",
  head_norm: "norms of queries and keys (Qwen3)",
};
// A block, the values of SIZES, and those of KINDS that are true.
const MODELS = {
  "Llama-3-8B": ["llama", 32, 4096, 32, 8, 0, 14336, 128256, 0],
  "Llama-3-70B": ["llama", 80, 8192, 64, 8, 0, 28672, 128256, 0],
  "Llama-3.2-1B": ["llama", 16, 2048, 32, 8, 0, 8192, 128256, 0, "tied"],
  "Mistral-7B": ["llama", 32, 4096, 32, 8, 0, 14336, 32000, 0],
  "Qwen3-8B": ["llama", 36, 4096, 32, 8, 128, 12288, 151936, 0, "head_norm"],
  "Qwen2-7B": ["llama", 28, 3584, 28, 4, 0, 18944, 152064, 0, "qkv_bias"],
  "Qwen2.5-1.5B": ["llama", 28, 1536, 12, 2, 0, 8960, 151936, 0, "tied", "qkv_bias"],
  "Qwen2.5-0.5B": ["llama", 24, 896, 14, 2, 0, 4864, 151936, 0, "tied", "qkv_bias"],
  "GPT-2": ["gpt", 12, 768, 12, 12, 0, 3072, 50257, 1024, "tied"],
};
const OTHER = "another shape, or a config.json";
// The sizes that tensor parallelism divides, in words.
const DIVIDED = {
  heads: "number of heads",
  kv_heads: "number of key-value heads",
  inner: "width of the MLP",
  vocabulary: "vocabulary",
  positions: "number of positions",
};
// The color of a line, by the beginning of its name.
const COLORS = {
  "weights out of": colors.copies,
  weights: colors.weights,
  adapters: colors.weights,
  frozen: colors.weights,
  gradients: colors.gradients,
  "whole gradients": colors.gradients,
  "embedding's gradient": colors.gradients,
  "head's gradients": colors.gradients,
  AdamW: colors.optimizer,
  "square roots": colors.optimizer,
  gathered: colors.weights,
  shards: colors.weights,
  autocast: colors.copies,
  DDP: colors.buckets,
  copy: colors.buckets,
  activations: colors.activations,
  logits: colors.logits,
};
const colorOf = (name) => COLORS[Object.keys(COLORS).find((start) => name.startsWith(start))] ?? "#999";

// ---- the numbers --------------------------------------------------------------------
const sum = (numbers) => numbers.reduce((one, other) => one + other, 0);
const isSharded = (groups) => groups !== "ddp" && groups !== "none";

function divided(shape, by) {
  const parts = Object.keys(DIVIDED).map((name) => [name, Math.floor(shape[name] / by)]);
  const headDim = shape.head_dim || shape.width / shape.heads;
  return { ...shape, head_dim: headDim, ...Object.fromEntries(parts) };
}

// Returns a setting's name and why it does not go with the others, or two empty texts.
function misfit(all) {
  const { tensor_parallel: by, gpus, groups, train } = all;
  const sharded = isSharded(groups);
  if (groups === "none" && gpus > 1) return ["groups", `none is for one GPU, not for ${gpus}`];
  if (all.grad_accum && !sharded) return ["grad_accum", "is FSDP2's; DDP holds whole gradients anyway"];
  if (all.offload && !sharded) return ["offload", "goes with FSDP2, whose policy it is"];
  if (all.offload && train === "qlora") return ["offload", "does not go with weights in 4 bits"];
  if (train !== "all" && all.block === "gpt")
    return ["train", `${train} is counted for a Llama's blocks, not for GPT-2's`];
  if (by === 1) return ["", ""];
  if (!sharded) return ["tensor_parallel", "goes with FSDP2, not with DDP"];
  if (train !== "all") return ["tensor_parallel", `is not counted with ${train}`];
  const sizes = [["number of GPUs", gpus]];
  for (const [name, text] of Object.entries(DIVIDED)) sizes.push([text, all[name]]);
  const wrong = sizes.find(([, size]) => size % by);
  return wrong ? ["tensor_parallel", `must divide the ${wrong[0]} (${wrong[1]})`] : ["", ""];
}

function count(shape) {
  const { width, inner, head_dim: headDim } = shape;
  const [queries, keys] = [shape.heads * headDim, shape.kv_heads * headDim];
  const gpt = shape.block === "gpt";
  const norm = width * (gpt ? 2 : 1);
  const matrices = 2 * width * (queries + keys) + (gpt ? 2 : 3) * width * inner;
  let vectors = gpt ? queries + 2 * keys + inner + 2 * width : 0;
  if (!gpt) {
    if (shape.qkv_bias) vectors += queries + 2 * keys;
    if (shape.output_bias) vectors += width;
    if (shape.mlp_bias) vectors += 2 * inner + width;
    if (shape.head_norm) vectors += 2 * headDim;
  }
  const ofBlock = matrices + vectors + 2 * norm;
  const embedding = shape.vocabulary * width;
  const ends = embedding * (shape.tied ? 1 : 2);
  const positions = shape.positions * width;
  const parameters = ends + positions + shape.layers * ofBlock + norm;
  const [up, down] = [width + inner, queries + width];
  const linears = { q: down, k: width + keys, v: width + keys, o: down, gate: up, up, down: up };
  return { gpt, norm, matrices, ofBlock, embedding, ends, positions, parameters, linears };
}

function activations(shape, { gpt }, low, residual) {
  const { width, heads, inner, head_dim: headDim } = shape;
  const norm = gpt ? (4 + low) * width + 8 : (4 + residual + low) * width + 4;
  const mlp = (gpt ? 2 : 4) * inner;
  const ofHeads = shape.head_norm ? 2 * heads * ((4 + 2 * low) * headDim + 4) : 0;
  const block = 2 * norm + 4 * heads * headDim * low + 4 * heads + ofHeads + mlp * low;
  const outside = norm + 24 + (gpt ? 0 : 8 * headDim);
  return [block, outside, Math.max((2 * inner + 2 * width) * low, 16 * width)];
}

function split(shape, groups, block, end, norm, positions) {
  const blocks = Array(shape.layers).fill(block);
  const root = (shape.tied ? 1 : 2) * end + norm + positions;
  if (groups === "whole") return [root + sum(blocks), []];
  if (groups === "ends" && !shape.tied) return [root - 2 * end, [end, ...blocks, end + norm]];
  return [root, blocks];
}

function atOnce(before, groups) {
  const previous = [before, ...groups];
  return Math.max(0, ...groups.map((group, n) => previous[n] + 2 * group));
}

function ofGroups(shape, gpus, low, groups, gathered, trained) {
  let [root, others] = split(shape, groups, ...gathered);
  const apart = others.length > shape.layers;
  const [head, end] = apart ? [others.at(-1), others[0]] : [0, 0];
  const whole = [
    Math.max(2 * root, root + atOnce(root, others)),
    root + head,
    root + atOnce(0, [...others].reverse()),
    root + 2 * end,
    0,
  ].map(Math.floor);
  [root, others] = split(shape, groups, ...trained);
  const first = apart ? others[0] : 0;
  const largest = Math.max(0, ...others);
  const waiting = apart ? 0 : others.length ? trained[1] : root;
  const last = root + first + (shape.tied ? 2 * trained[1] : 0);
  const copy = (one) => 4 * (one + Math.floor(one / gpus));
  return {
    "gathered weights": whole,
    "whole gradients": [0, 0, low * (waiting + largest), low * last, 0],
    "copy to reduce": [0, 0, copy(largest), copy(Math.max(root, first)), 0],
  };
}

const always = (bytes) => Array(5).fill(bytes);

function keptAllTheTime(shape, of, ranks, adapters, all) {
  const own = (numbers) => Math.ceil(numbers / ranks);
  const lines = {};
  let [number, trained, name] = [all.precision === "bf16-weights" ? 2 : 4, of.parameters, "weights"];
  const kinds = { 2: "bf16", 4: "float32" };
  if (all.train !== "all") {
    let [frozen, kind] = [number * own(trained), kinds[number]];
    if (all.train === "qlora") {
      const bits = shape.layers * of.matrices;
      frozen = Math.floor(FOUR_BITS * own(bits) + SCALES * bits + 2 * own(trained - bits));
      frozen += 7 * shape.layers * TABLES;
      kind = "4 bits";
    }
    lines[`frozen weights, ${kind}`] = always(frozen);
    [trained, name, number] = [shape.layers * adapters, "adapters", 4];
  }
  let kind = kinds[number];
  lines[`${name}, ${kind}`] = always(number * own(trained));
  if (all.grad_accum) lines["gradients, float32"] = always(4 * trained);
  else lines[`gradients, ${kind}`] = always(number * own(trained));
  let averages = 2 * number * own(trained);
  if (all.optimizer === "adamw-8bit" && all.train === "all") {
    const matrices = shape.layers * of.matrices + of.ends + of.positions;
    averages = Math.floor(2 * EIGHT_BITS * own(matrices) + 2 * number * own(trained - matrices));
    averages += 2 * 1024 * (7 * shape.layers + 3);
    kind = "8 bits";
  }
  lines[`AdamW's averages, ${kind}`] = always(averages);
  if (all.optimizer === "adamw") lines["square roots of averages"] = [0, 0, 0, 0, number * own(trained)];
  return lines;
}

const adaptersOf = (of, all) =>
  all.train === "all" ? 0 : sum(TARGETS[all.targets].map((name) => all.lora_rank * of.linears[name]));

function inHostMemory(model, all) {
  const shape = divided(model, all.tensor_parallel);
  const of = count(shape);
  const ranks = Math.floor(all.gpus / all.tensor_parallel);
  return Math.max(...together(keptAllTheTime(shape, of, ranks, adaptersOf(of, all), all)));
}

function ofLoss(shape, tokens, low, sharded, chunk, train) {
  if (!chunk || chunk >= tokens) {
    const numbers = tokens * shape.vocabulary;
    return { "logits and loss": [low + 4, low + 12, 2 * low, low, low].map((one) => numbers * one) };
  }
  const numbers = chunk * shape.vocabulary;
  const inputs = 2 * tokens * shape.width * low;
  const lines = { "logits and loss": [numbers * (low + 4), numbers * (low + 12) + inputs, inputs, 0, 0] };
  const both = sharded ? 2 * low : 4 + low;
  if (train === "all") lines["head's gradients"] = [0, both * shape.vocabulary * shape.width, 0, 0, 0];
  return lines;
}

const lowOf = (all) => (all.precision === "float32" ? 4 : 2);

function inParts(of, adapters, all) {
  const low = lowOf(all);
  const parts = [of.ofBlock, of.embedding, of.norm, of.positions];
  const gathered = parts.map((one) => low * one);
  if (all.train === "all") return [gathered, parts];
  gathered[0] += low * adapters;
  if (all.train === "qlora") gathered[0] -= of.matrices * (low - FOUR_BITS);
  return [gathered, [adapters, 0, 0, 0]];
}

function table(model, all) {
  const { tokens, groups, tensor_parallel: by, train, precision } = all;
  const [whole, gpus] = [count(divided(model, 1)), Math.floor(all.gpus / by)];
  const shape = divided(model, by);
  const of = count(shape);
  const [low, sharded] = [lowOf(all), isSharded(groups)];
  const adapters = adaptersOf(of, all);
  const lines = all.offload ? {} : keptAllTheTime(shape, of, sharded ? gpus : 1, adapters, all);
  const [gathered, trained] = inParts(of, adapters, all);
  if (sharded) {
    Object.assign(lines, ofGroups(shape, gpus, low, groups, gathered, trained));
    if (by > 1) lines["embedding's gradient"] = [0, 0, 0, low * whole.embedding, 0];
  } else {
    const size = train === "all" && precision === "bf16-weights" ? 2 : 4;
    const numbers = train === "all" ? of.parameters : shape.layers * adapters;
    if (groups === "ddp") lines["DDP's buckets"] = always(size * numbers);
    let used = shape.layers * of.ofBlock + of.norm + of.embedding;
    if (precision !== "bf16" || train === "qlora") used = 0;
    const copies = low === 2 ? 2 * (used + shape.layers * adapters) : 0;
    lines["autocast's copies of weights"] = [copies, copies, copies, 0, 0];
  }
  if (all.offload) {
    const stored = precision === "bf16-weights" ? 2 : 4;
    const bytes = stored === low ? stored : stored + low;
    const parts = gathered.map((one) => Math.floor(one / low));
    const [root, others] = split(shape, groups, ...parts);
    const moved = bytes * Math.ceil(Math.max(root, ...others, 0) / gpus) + 4 * adapters;
    lines["shards on their way"] = [moved, moved, moved, moved, 0];
  }
  if (train === "qlora") {
    const largest = shape.width * Math.max(shape.inner, shape.heads * shape.head_dim);
    const moment = Math.floor(largest * (low + 4 / 64));
    lines["weights out of 4 bits"] = [moment, 0, moment, 0, 0];
  }
  const residual = sharded || precision === "bf16-weights" || train === "qlora" ? low : 4;
  let [block, outside, moving] = activations(shape, of, low, residual);
  if (train !== "all") {
    block += TARGETS[all.targets].length * all.lora_rank * low;
    moving += 2 * shape.inner * low;
  }
  let [kept, again] = [shape.layers * block + outside, 0];
  if (all.activation_checkpointing)
    [kept, again] = [shape.layers * residual * shape.width + outside, block];
  const perToken = [kept + again, kept, kept + again + moving, moving, 0];
  lines.activations = perToken.map((one) => tokens * one);
  Object.assign(lines, ofLoss(model, tokens, low, sharded, all.loss_chunk, train));
  lines["workspaces of cuBLAS"] = always(WORKSPACES);
  return { parameters: whole.parameters, lines };
}

const together = (lines) => MOMENTS.map((_, n) => sum(Object.values(lines).map((line) => line[n])));

// How many GPUs it takes: the first number of groups that fits, by bisection.
function smallest(model, room, all) {
  const by = all.tensor_parallel;
  const many = isSharded(all.groups) ? Math.floor(MOST_GPUS / by) : 1;
  const fits = (groups) =>
    Math.max(...together(table(model, { ...all, gpus: by * groups }).lines)) <= 0.95 * room * 2 ** 30;
  let [low, high] = [1, many + 1];
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) high = middle;
    else low = middle + 1;
  }
  return low <= many ? by * low : null;
}

// ---- how long -----------------------------------------------------------------------
function operations(model, all) {
  const shape = divided(model, 1);
  const of = count(shape);
  const [adapters, each] = [adaptersOf(of, all), all.train === "all" ? 6 : 4];
  const length = all.length || Math.min(shape.positions || all.tokens, all.tokens);
  const attention = 4 * length * shape.heads * shape.head_dim;
  let block = each * of.matrices + 6 * adapters + 3 * attention;
  if (all.activation_checkpointing) {
    const adapted = all.train !== "all" && TARGETS[all.targets].includes("down");
    const last = shape.width * (adapted ? all.lora_rank : shape.inner);
    block += 2 * (of.matrices + adapters - last) + attention;
  }
  return shape.layers * block + each * of.embedding;
}

function sent(model, all) {
  const shape = divided(model, 1);
  const of = count(shape);
  const [gathered, trained] = inParts(of, adaptersOf(of, all), all);
  let [reduced] = split(shape, "whole", ...trained);
  if (!isSharded(all.groups)) {
    const size = all.precision === "bf16-weights" && all.train === "all" ? 2 : 4;
    return (2 * size * reduced * (all.gpus - 1)) / all.gpus;
  }
  const [whole] = split(shape, "whole", ...gathered);
  const [, others] = split(shape, all.groups, ...gathered);
  const first = others.length > shape.layers && all.train !== "all" ? 1 : 0;
  const again = sum(others.slice(first, shape.layers + 1));
  reduced = all.grad_accum ? 0 : 4 * reduced;
  return ((whole + again + reduced) * (all.gpus - 1)) / all.gpus;
}

// Returns hours at least, and the seconds in which a step computes and sends.
function howLong(model, all) {
  const computes = all.tokens / all.tokens_per_second;
  const sends = all.bandwidth ? sent(model, all) / (1e9 * all.bandwidth) : 0;
  const steps = all.total_tokens / (all.gpus * all.tokens);
  return [(steps * Math.max(computes, sends)) / 3600, computes, sends];
}

// ---- a config.json ------------------------------------------------------------------
// Returns the settings of a shape; throws an Error that says what is wrong.
function fromConfig(text) {
  const config = JSON.parse(text);
  const kind = config?.model_type;
  if (!LLAMAS.includes(kind)) throw Error(`cannot count a ${kind}; known are ${LLAMAS.join(", ")}`);
  const number = (key, standard) => {
    const value = config[key] ?? standard;
    if (value === undefined) throw Error(`config.json has no ${key}`);
    if (!Number.isInteger(value) || value < 1)
      throw Error(`${key} is ${JSON.stringify(value)}, and should be an integer, 1 or more`);
    return value;
  };
  const [width, heads] = [number("hidden_size"), number("num_attention_heads")];
  const biased = !["mistral", "qwen2"].includes(kind) && Boolean(config.attention_bias);
  return {
    block: "llama",
    layers: number("num_hidden_layers"),
    width,
    heads,
    kv_heads: number("num_key_value_heads", heads),
    head_dim: number("head_dim", Math.floor(width / heads)),
    inner: number("intermediate_size"),
    vocabulary: number("vocab_size"),
    positions: 0,
    tied: Boolean(config.tie_word_embeddings),
    qkv_bias: kind === "qwen2" || biased,
    output_bias: biased,
    mlp_bias: ["llama", "smollm3", "granite"].includes(kind) && Boolean(config.mlp_bias),
    head_norm: kind === "qwen3",
  };
}

// ---- the form -----------------------------------------------------------------------
const form = document.createElement("form");
form.className = "calculator";
const number = (name, label, value, least = 1) =>
  `<label><span>${label}</span> <input type="number" name="${name}" min="${least}" step="1" value="${value}" required></label>`;
const amount = (name, label) =>
  `<label><span>${label}</span> <input type="number" name="${name}" min="0.001" step="any"></label>`;
const box = (name, label, checked = "") =>
  `<label class="box"><input type="checkbox" name="${name}" ${checked}> <span>${label}</span></label>`;
const choice = (name, label, options) =>
  `<label><span>${label}</span> <select name="${name}">${Object.entries(options)
    .map(([value, text]) => `<option value="${value}">${text}</option>`)
    .join("")}</select></label>`;
const models = [...Object.keys(MODELS), OTHER];
form.innerHTML = `
  ${choice("model", "model", Object.fromEntries(models.map((name) => [name, name])))}
  ${choice("train", "what is trained", { all: "all weights", lora: "LoRA: adapters", qlora: "QLoRA: adapters, weights in 4 bits" })}
  ${number("gpus", "GPUs", 8)}
  ${number("room", "GiB of a GPU, as nvidia-smi says", 79)}
  ${number("tokens", "tokens of a micro-batch, on each GPU", 8192)}
  ${choice("precision", "precision", { bf16: "computes in bf16, weights float32", "bf16-weights": "weights in bf16, too", float32: "float32" })}
  ${choice("optimizer", "optimizer", { adamw: "AdamW", "adamw-8bit": "8-bit AdamW" })}
  ${choice("loss_chunk", "loss", { 0: "of all tokens at once", 1024: "in chunks of 1,024 tokens", 256: "in chunks of 256 tokens" })}
  ${box("activation_checkpointing", "activation checkpointing", "checked")}
  ${box("offload", "weights and AdamW in host memory (offload)")}
  <fieldset class="shape"><legend>the shape, by its names in config.json</legend>
    <label class="wide"><span>paste a config.json here, or fill in the fields</span> <textarea rows="2" class="config" spellcheck="false"></textarea></label>
    ${choice("block", "blocks", { llama: "of a Llama", gpt: "of GPT-2" })}
    ${Object.entries(SIZES).map(([name, key]) => number(name, `${name.replace("_", " ")} <small>${key}</small>`, 1, ["positions", "head_dim"].includes(name) ? 0 : 1)).join("")}
    ${Object.entries(KINDS).map(([name, text]) => box(name, text)).join("")}
  </fieldset>
  <details><summary>How long will it take?</summary><div>
  ${amount("tokens_per_second", "tokens per second, measured on one GPU")}
  ${amount("total_tokens", "tokens of the run, such as 15e9")}
  ${amount("bandwidth", "GB/s that a GPU sends (empty: no limit)")}
  ${number("length", "tokens of a sequence (0: all of a micro-batch)", 0, 0)}
  </div></details>
  <details><summary>More choices</summary><div>
  ${choice("groups", "how it is sharded", { ends: "FSDP2: blocks, embedding, head", blocks: "FSDP2: blocks only", whole: "FSDP2: the whole model at once", ddp: "not at all: DDP", none: "not at all: one GPU, without DDP" })}
  ${number("tensor_parallel", "GPUs that split each layer (tensor parallelism)", 1)}
  ${number("lora_rank", "rank of the adapters", 8)}
  ${choice("targets", "layers with adapters", { all: "all of a block", qv: "queries and values" })}
  ${box("grad_accum", "reduce gradients only after the last micro-batch")}
  </div></details>`;
const results = document.createElement("div");
results.className = "calculated";
results.setAttribute("aria-live", "polite");
document.querySelector(".bd-article h1").after(form, results);
const fields = form.elements;
const pasted = form.querySelector("textarea");
const SHAPE = ["block", ...Object.keys(SIZES), ...Object.keys(KINDS)];
const STANDARD = settings();

function put(name, value) {
  const field = fields[name];
  if (field.type === "checkbox") field.checked = value === true || value === "true";
  else field.value = value;
}

function fillShape() {
  const shape = MODELS[fields.model.value];
  form.querySelector("fieldset").hidden = Boolean(shape);
  if (!shape) return;
  const [block, ...values] = shape;
  put("block", block);
  Object.keys(SIZES).forEach((name, n) => put(name, values[n]));
  for (const name of Object.keys(KINDS)) put(name, values.includes(name));
}

function settings() {
  const found = {};
  for (const field of form.querySelectorAll("[name]")) {
    const isNumber = field.type === "number" || field.name === "loss_chunk";
    found[field.name] = field.type === "checkbox" ? field.checked : isNumber ? Number(field.value) : field.value;
  }
  return found;
}

// Returns what a setting is called on the page.
const labelOf = (name) => fields[name].labels[0].querySelector("span").firstChild.textContent.trim();

// As Python rounds them, so that both print the same: a half to the even number.
function gib(bytes) {
  const hundredths = (100 * bytes) / 2 ** 30;
  const isHalf = hundredths % 1 === 0.5;
  return ((isHalf ? 2 * Math.round(hundredths / 2) : Math.round(hundredths)) / 100).toFixed(2);
}

function problemOf(all, unknown) {
  if (unknown) return unknown;
  if (!MODELS[all.model] && pasted.value.trim())
    try {
      fromConfig(pasted.value);
    } catch (error) {
      return `config.json: ${error.message}`;
    }
  const wrong = [...form.querySelectorAll("input")].find((field) => !field.checkValidity());
  const kind = wrong?.step === "any" ? "a number" : "an integer";
  if (wrong) return `${labelOf(wrong.name)}: should be ${kind}, ${wrong.min} or more`;
  if (!all.head_dim && all.width % all.heads) return "heads must divide width";
  if (all.length > all.tokens) return `${labelOf("length")}: more than those of a micro-batch`;
  const [name, why] = misfit(all);
  return name && `${labelOf(name)}: ${why}`;
}

// Returns a paragraph on how long it takes, or none if nobody asks.
function time(all) {
  if (!all.tokens_per_second || !all.total_tokens) return "";
  if (all.tensor_parallel > 1) return "<p>How long it takes is not counted with tensor parallelism.</p>";
  const [hours, computes, sends] = howLong(all, all);
  const share = Math.round(100 * (1 - computes / Math.max(computes, sends)));
  const waits = all.bandwidth ? `${share}% of them wait for the network` : "the network is not counted";
  const each = operations(all, all);
  const fixed = (value, digits = 2) =>
    value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const least = hours >= 48 ? `${fixed(hours / 24)} days` : `${fixed(hours)} hours`;
  return `<p><strong>At least ${least}, ${fixed(hours * all.gpus)} GPU hours;</strong> ${waits}.
    The speed means ${fixed((all.tokens_per_second * each) / 1e12, 1)} TFLOP/s, ${fixed(each / 1e9)} GFLOP for a token;
    a step sends ${fixed(sent(all, all) / 1e9)} GB.</p>`;
}

function show(unknown = "") {
  const all = settings();
  const problem = problemOf(all, unknown);
  if (problem) return results.replaceChildren(problem);

  const { parameters, lines } = table(all, all);
  const sums = together(lines);
  const most = Math.max(...sums);
  const used = most / 2 ** 30 / all.room;
  const says =
    used > 1 ? `does not fit in ${all.room} GiB` : used > 0.95 ? `fits in ${all.room} GiB only just: leave a few GiB` : `fits in ${all.room} GiB`;
  const takes = smallest(all, all.room, all);
  const many = takes
    ? `It takes <strong>${takes} GPU${takes > 1 ? "s" : ""}</strong> of ${all.room} GiB, with a twentieth of each left free.`
    : `More GPUs of ${all.room} GiB alone do not make it fit.`;
  const host = all.offload ? ` In host memory: ${gib(inHostMemory(all, all))} GiB for each GPU.` : "";
  const wide = Math.max(most, all.room * 2 ** 30);
  const bars = MOMENTS.map((moment, n) => {
    const parts = Object.entries(lines).filter(([, sizes]) => sizes[n]);
    const bar = parts.map(
      ([name, sizes]) =>
        `<span title="${name}: ${gib(sizes[n])} GiB" style="width:${(100 * sizes[n]) / wide}%;background:${colorOf(name)}"></span>`,
    );
    return `<div class="bar"><b>${moment}</b><i>${bar.join("")}<u style="left:${(100 * all.room * 2 ** 30) / wide}%"></u></i><em>${gib(sums[n])}</em></div>`;
  });
  const cells = (values) => values.map((bytes) => `<td>${bytes ? gib(bytes) : "-"}</td>`).join("");
  const rows = Object.entries(lines).map(
    ([name, sizes]) => `<tr><th><span style="background:${colorOf(name)}"></span>${name}</th>${cells(sizes)}</tr>`,
  );
  results.innerHTML = `<p><strong>At most ${gib(most)} GiB: ${says}.</strong> ${many}${host}
    The fullest moment is <em>${MOMENTS[sums.indexOf(most)]}</em>; ${parameters.toLocaleString("en-US")} parameters.</p>
    ${time(all)}
    ${bars.join("")}
    <p class="note">The vertical line is the GPU's memory. The colors are those of the table.</p>
    <div class="wide pst-scrollable-table-container"><table><thead><tr><th>GiB on each GPU</th>${MOMENTS.map((m) => `<th>${m}</th>`).join("")}</tr></thead>
    <tbody>${rows.join("")}<tr class="together"><th>together</th>${cells(sums)}</tr></tbody></table></div>`;
}

function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  form.reset();
  let unknown = "";
  const set = (name) => {
    const field = fields[name];
    if (!field || !given.has(name)) return;
    put(name, given.get(name));
    if (field.type === "select-one" && field.value !== given.get(name))
      unknown ||= `${labelOf(name)}: there is no ${given.get(name)}`;
  };
  set("model");
  fillShape();
  for (const name of given.keys()) set(name);
  for (const one of form.querySelectorAll("details"))
    one.open = [...one.querySelectorAll("[name]")].some((field) => given.has(field.name));
  show(unknown);
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => {
  if (event.target === fields.model) fillShape();
  if (event.target === pasted)
    try {
      for (const [name, value] of Object.entries(fromConfig(pasted.value))) put(name, value);
    } catch {} // show() says what is wrong
  const all = settings();
  const known = MODELS[all.model] ? SHAPE : [];
  const changed = Object.entries(all).filter(([name, value]) => value !== STANDARD[name] && !known.includes(name));
  history.replaceState(null, "", `#${new URLSearchParams(changed)}`);
  show();
});
addEventListener("hashchange", fromAddress);
fromAddress();
