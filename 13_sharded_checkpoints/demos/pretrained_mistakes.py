"""What goes wrong with a pretrained model; the arguments name some of the mistakes.

torchrun --standalone --nproc-per-node=2 \
    13_sharded_checkpoints/demos/pretrained_mistakes.py saving FOLDER

The folder is the one that pretrained_mistakes_models.py has written.
"""

import argparse
import contextlib
import copy
import functools
import gc
import re
import sys
import types
import warnings
from datetime import timedelta
from pathlib import Path

import accelerate
import peft
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "your_own_script/hugging_face"))

from meta_memory import Memory

import fsdp
import lora

CPU = torch.device("cpu")
IGNORED = -100  # the label of a position without a loss
WHOLE = StateDictOptions(full_state_dict=True)
WEIGHTS_NAME = "model.safetensors"


# ---- models --------------------------------------------------------------------------
def make_mesh():
    """Return the mesh of all processes."""
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def make(path):
    """Return the model of a folder on the meta device, in float32."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def shard(model, policy=False, mesh=None):
    """Shard a model as fsdp.py does, with its bfloat16 policy if asked for."""
    fsdp.shard_model(model, mesh or make_mesh(), bf16=policy)
    return model


def read(model, path):
    """Fill the weights from the files of a folder, each rank its shards."""
    weights = dict(model.named_parameters())
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(path))


def load(path, dtype="float32", policy=False, mesh=None):
    """Return the sharded model of a folder, loaded as fsdp.py does: no mistake."""
    args = types.SimpleNamespace(model=path, dtype=dtype, bf16=policy)
    return fsdp.load_model(args, CPU, mesh or make_mesh())


# ---- batches, losses and output ------------------------------------------------------
def get_batch(seed=2, start=0, step=1):
    """Return a batch of 16 sequences, or of every `step`th of them."""
    ((inputs, labels),) = fsdp.collate(fsdp.make_dataset(16, seed)[start::step])
    return inputs, labels


def get_my_batch(seed=1):
    """Return this rank's part of a batch."""
    return get_batch(seed, dist.get_rank(), dist.get_world_size())


def get_loss(model, batch=None):
    """Return the loss on a batch, or on one that is the same for all ranks."""
    inputs, labels = batch or get_batch()
    logits = model(**inputs, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def whole_weights(model):
    """Return a copy of the whole weights; all ranks have to call it."""
    return copy.deepcopy(get_model_state_dict(model, options=WHOLE))


def kept_for_backward(model, autocast=False):
    """Return the tensors that autograd keeps from a forward pass."""
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ),
        torch.autocast("cpu", torch.bfloat16, autocast),
    ):
        get_loss(model)
    return kept


def count_kept_copies(model):
    """Return the bytes of weights in bfloat16 that are kept under autocast."""
    kept = kept_for_backward(model, autocast=True)
    shapes = {weight.shape for weight in model.parameters() if weight.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}  # as a product uses them
    copies = [t for t in kept if t.dtype == torch.bfloat16 and t.shape in shapes]
    storages = [copy.untyped_storage() for copy in copies]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def train_at_low_rate(text, model):
    """Take eight steps, and tell which share of the weights has changed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0)
    old = whole_weights(model)
    for seed in range(8):
        get_loss(model, get_my_batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    new = whole_weights(model)
    changed = sum((new[name] != old[name]).sum().item() for name in old)
    share = changed / sum(weight.numel() for weight in old.values())
    dtype = next(iter(optimizer.state.values()))["exp_avg"].dtype
    tell(f"{text:21}{dtype!s:16}{share:.1%} have changed")


def tell(text):
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(f"    {text}", flush=True)


def tell_each(text):
    """Print the texts of all ranks, in order, except those that are None."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if len(set(texts)) == 1:
        texts = {"both ranks": text}
    else:
        texts = {f"rank {rank}": each for rank, each in enumerate(texts)}
    for ranks, each in texts.items():
        if each is not None:
            tell(f"{ranks}: {each}")


# ---- loading, without an error -------------------------------------------------------
def no_mistake(folder):
    tell(f"loss {get_loss(load(folder / 'llama')):.4f}")


def buffers_left_empty(folder):
    model = shard(make(folder / "llama"))
    # fills what torch.empty returns with NaN, so that the outcome is always the same
    torch.use_deterministic_algorithms(True)
    model.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    read(model, folder / "llama")  # the mistake: the files have no buffers
    tell(f"if to_empty() has found NaN: loss {get_loss(model):.4f}")
    for buffer in model.buffers():
        buffer.zero_()
    tell(f"if it has found zeros: loss {get_loss(model):.4f}")


def all_weights_initialized(folder):
    model = shard(make(folder / "llama"))
    model.to_empty(device="cpu")
    read(model, folder / "llama")
    torch.manual_seed(0)
    model.initialize_weights()  # the mistake: after loading
    tell(f"loss {get_loss(model):.4f}")


def read_after_an_evaluation(folder):
    reader = dcp.HuggingFaceStorageReader(folder / "llama")
    for names in ("named_parameters", "state_dict"):  # the first is the mistake
        model = load(folder / "llama")
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(0.01)  # stands for a training that went wrong
            get_loss(model)
        weights = dict(getattr(model, names)())
        whole = [name for name in weights if not isinstance(weights[name], DTensor)]
        dcp.load(weights, storage_reader=reader)
        loss = get_loss(model)
        loss.backward()
        tell(f"{names}: loss {loss:.4f}, after backward {get_loss(model):.4f}")
        tell(f"    whole: {', '.join(whole) or 'none'}")


# ---- loading, with an error ----------------------------------------------------------
def tied_in_two_groups(folder):
    model = make(folder / "tied")
    for module in (model.get_input_embeddings(), model.get_output_embeddings(), model):
        fully_shard(module, mesh=make_mesh())
    model.to_empty(device="cpu")
    get_loss(model)


def state_dict_of_a_tied_model(folder):
    model = shard(make(folder / "tied")).to_empty(device="cpu")
    reader = dcp.HuggingFaceStorageReader(folder / "tied")
    dcp.load(model.state_dict(), storage_reader=reader)


def names_of_a_base_model(folder):
    model = shard(make(folder / "tied")).to_empty(device="cpu")
    weights = dict(model.named_parameters())
    renamed = {name.removeprefix("model."): weights[name] for name in weights}
    reader = dcp.HuggingFaceStorageReader(folder / "tied-base")
    dcp.load(renamed, storage_reader=reader)
    tell(f"by the names of the file: {len(renamed)} weights read")
    dcp.load(weights, storage_reader=reader)  # the mistake


def from_pretrained_on_meta(folder):
    with torch.device("meta"):
        AutoModelForCausalLM.from_pretrained(folder / "llama")


def plain_load_state_dict(folder):
    weights = load_file(folder / "llama" / WEIGHTS_NAME)
    load(folder / "llama").load_state_dict(weights)


def embedding_resized_late(folder):
    load(folder / "llama").resize_token_embeddings(260)


# ---- another dtype on rank 0 ---------------------------------------------------------
def dtype_on_rank_0_only(folder):
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(
            folder / "llama", dtype=torch.float32
        )
    else:
        config = AutoConfig.from_pretrained(folder / "llama")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # the mistake: no dtype=
    weights = model.state_dict()
    shard(model).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    get_loss(model)


# ---- dtypes --------------------------------------------------------------------------
def bfloat16_from_the_file(folder):
    path = folder / "llama"
    tell("weights              AdamW's state   after 8 steps at lr=1e-5")
    model = AutoModelForCausalLM.from_pretrained(path)  # the mistake
    train_at_low_rate("as in the file", shard(model, policy=True))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    train_at_low_rate("dtype=torch.float32", shard(model, policy=True))
    model = AutoModelForCausalLM.from_pretrained(path)
    train_at_low_rate("model.float()", shard(model, policy=True).float())


def autocast_without_the_policy(folder):
    for policy in (False, True):
        model = load(folder / "llama", policy=policy)
        size = count_kept_copies(model)
        total = sum(2 * weight.numel() for weight in model.parameters())
        line = "autocast and the policy" if policy else "autocast alone"
        tell(f"{line}: {size:,} of {total:,} bytes of weights in bfloat16 are kept")


def policy_without_autocast(folder):
    tell(f"float32: loss {get_loss(load(folder / 'llama')):.6f}")
    model = load(folder / "llama", policy=True)
    loss = get_loss(model)  # the mistake: cross_entropy computes in bfloat16
    tell(f"the policy alone: loss {loss:.6f}, {loss.dtype}")
    with torch.autocast("cpu", torch.bfloat16):
        loss = get_loss(model)
    tell(f"the policy and autocast: loss {loss:.6f}, {loss.dtype}")


def norms_in_float32(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    for block in model.model.layers:
        block.input_layernorm.float()
    get_loss(shard(model, policy=True))


# ---- the loss ------------------------------------------------------------------------
def sum_over_all_tokens(model, inputs, labels):
    """What fsdp.py does: no mistake."""
    tokens = count_tokens(labels)
    logits = model(**inputs).logits
    loss_sum = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return loss_sum * dist.get_world_size() / tokens


def num_items_in_batch(model, inputs, labels):
    """The same through the model's own loss: no mistake."""
    tokens = count_tokens(labels)
    loss = model(**inputs, labels=unshifted(inputs), num_items_in_batch=tokens).loss
    return loss * dist.get_world_size()


def mean_of_each_rank(model, inputs, _):
    return model(**inputs, labels=unshifted(inputs)).loss


def without_world_size(model, inputs, labels):
    tokens = count_tokens(labels)
    return model(**inputs, labels=unshifted(inputs), num_items_in_batch=tokens).loss


def padding_counted(model, inputs, _):
    return model(**inputs, labels=inputs["input_ids"]).loss


def shifted_twice(model, inputs, labels):
    return model(**inputs, labels=labels).loss


def unshifted(inputs):
    """Return the labels that a model of transformers takes: it shifts them itself."""
    return inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)


def count_tokens(labels):
    """Return the number of labels on all ranks."""
    tokens = (labels != IGNORED).sum()
    dist.all_reduce(tokens)
    return tokens


# ---- how the losses are compared -----------------------------------------------------
LOSSES = (
    sum_over_all_tokens,
    num_items_in_batch,
    mean_of_each_rank,
    without_world_size,
    padding_counted,
    shifted_twice,
)


def losses(folder):
    """Compare each loss's gradient with that of one process on all sequences."""
    sequences = sorted(fsdp.make_dataset(16, seed=1), key=len)
    short, long = sequences[:8], sequences[8:]  # a rank has far fewer tokens
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float64)
    ((inputs, labels),) = fsdp.collate(sequences)
    loss = get_loss(model, (inputs, labels))
    loss.backward()
    wanted = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    tell(f"{'one process':22}loss {loss:.4f}")
    ((inputs, labels),) = fsdp.collate(short if dist.get_rank() == 0 else long)
    tell_each(f"{(labels != IGNORED).sum()} tokens with a label")
    for get in LOSSES:
        model = load(folder / "llama", dtype="float64")
        loss = get(model, inputs, labels)
        loss.backward()
        grads = [weight.grad.full_tensor() for weight in model.parameters()]
        found = torch.cat([grad.flatten() for grad in grads])
        mean = loss.detach()
        dist.all_reduce(mean)
        off = (found - wanted).norm() / wanted.norm()
        mean = mean / dist.get_world_size()
        tell(f"{get.__name__:22}loss {mean:.4f}, gradient off by {off:.2g}")


# ---- adapters ------------------------------------------------------------------------
def adapters_after_fully_shard(folder):
    train_adapters(add_adapters(load(folder / "llama")))


def adapters_before_fully_shard(folder):
    """The cure."""
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    model = add_adapters(model)
    shard(model.get_base_model())
    train_adapters(model)


def add_adapters(model):
    """Add adapters by peft, the same on all ranks."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, config)


def adapters_without_the_policy(folder):
    for policy in (True, False):  # without it, the mistake
        model = AutoModelForCausalLM.from_pretrained(folder / "llama")
        lora.add_lora(model, ["q_proj", "v_proj"], 4, torch.float32)
        get_loss(shard(model, policy)).backward()
        grads = [weight.grad for weight in model.parameters() if weight.requires_grad]
        tell(f"with the policy: gradients in {grads[0].dtype}")


# ---- how the adapters are trained ----------------------------------------------------
def train_adapters(model):
    """Take two steps, and tell what each rank has then."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    sharded = sum(isinstance(weight, DTensor) for weight in trained)
    tell(f"{sharded} of {len(trained)} adapters are sharded")
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for seed in (1, 2):
        optimizer.zero_grad()
        get_loss(model, get_my_batch(seed)).backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    with torch.no_grad():  # on the same sequences on all ranks
        loss = get_loss(model)
    tell_each(f"norm {norm:.4f}, then loss {loss:.4f}")


# ---- saving --------------------------------------------------------------------------
def save_without_a_state_dict(folder):
    model, outcome = load(folder / "llama"), "fails"
    try:
        model.save_pretrained(folder / "saved")  # the mistake
        outcome = "returns"
    finally:
        tell_each(f"save_pretrained {outcome}")
        files = sorted(path.name for path in (folder / "saved").iterdir())
        tell(f"the folder has {', '.join(files)}")


def bfloat16_saved(folder):
    model = load(folder / "llama")
    weights = whole_weights(model)
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    if dist.get_rank() == 0:
        model.config.dtype = torch.bfloat16  # without effect: the next line sets it
        model.save_pretrained(folder / "bfloat16", state_dict=weights)
        tell(f"save_pretrained alone: {dtypes_of(folder / 'bfloat16')}")
        model.config.dtype = torch.bfloat16
        model.config.save_pretrained(folder / "bfloat16")
        tell(f"then config.save_pretrained: {dtypes_of(folder / 'bfloat16')}")


def dtypes_of(path):
    """Return the dtypes of the weights in the file of a folder, and when loaded."""
    (in_file,) = {each.dtype for each in load_file(path / WEIGHTS_NAME).values()}
    loaded = AutoModelForCausalLM.from_pretrained(path).dtype
    return f"{in_file} in the file, from_pretrained returns {loaded}"


def saved_twice(folder):
    model = load(folder / "llama")
    weights = whole_weights(model)
    if dist.get_rank() == 0:
        for name in ("first", "second"):
            model.save_pretrained(folder / name, state_dict=weights)
            files = sorted(path.name for path in (folder / name).iterdir())
            tell(f"{name}: {', '.join(files)}; left in weights: {len(weights)}")


def tied_weight_saved_twice(folder):
    model = load(folder / "tied")
    weights = whole_weights(model)
    named = {name: weights[name] for name, _ in model.named_parameters()}
    if dist.get_rank() == 0:
        for what, saved in (("the state dict", weights), ("named_parameters", named)):
            model.save_pretrained(folder / "saved", state_dict=saved)
            path = folder / "saved" / WEIGHTS_NAME
            size = path.stat().st_size
            tell(f"{what}: {len(load_file(path))} tensors, {size:,} bytes")


def deepcopy(folder):
    copy.deepcopy(load(folder / "llama"))


# ---- evaluating and generating -------------------------------------------------------
def global_batch_evaluated(folder):
    model = load(folder / "llama", policy=True)
    sequences = fsdp.make_dataset(16, seed=2)
    for name, count in (("a micro-batch", 4), ("the global batch", 16)):  # the mistake
        ((inputs, labels),) = fsdp.collate(sequences[:count])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs, use_cache=False).logits
            with Memory() as memory:
                nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        tell(f"{name}: {labels.numel()} positions, {memory.peak:,} bytes for the loss")


def inference_mode(folder):
    model = load(folder / "llama")
    with torch.inference_mode():
        get_loss(model)
    get_loss(model).backward()


def generate_on_rank_0(folder):
    prompt = torch.tensor([[5, 8, 11, 14, 17, 20, 23, 26]])
    length = 3 + 3 * dist.get_rank()  # may differ between the ranks
    model = load(folder / "llama")
    tokens = model.generate(prompt, max_new_tokens=length, do_sample=False)
    tell_each(f"{tokens[0, prompt.shape[1] :].tolist()}")
    group = dist.new_group(timeout=timedelta(seconds=5))
    model = load(folder / "llama", mesh=DeviceMesh.from_group(group, "cpu"))
    if dist.get_rank() == 0:
        model.generate(prompt, max_new_tokens=3, do_sample=False)  # the mistake


def sharded_folder_on_rank_0(folder):
    path = folder / "sharded"
    model = load(folder / "llama")
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    if dist.get_rank() == 0:
        model.config.save_pretrained(path)
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(path)  # on all ranks: no mistake
    tell_each(f"loss {get_loss(loaded):.4f}")
    del model
    with default_group_with_timeout(seconds=5):
        if dist.get_rank() == 0:
            AutoModelForCausalLM.from_pretrained(path)  # the mistake


# ---- activation checkpointing and compile --------------------------------------------
def checkpointing_in_eval_mode(folder):
    for cure in ("none", "activation_checkpointing_enable", "model.train(), too"):
        model = AutoModelForCausalLM.from_pretrained(
            folder / "llama", dtype=torch.float32
        )
        shard(model)
        if cure != "none":
            model.activation_checkpointing_enable()
        if cure == "model.train(), too":
            model.train()
        tell(f"{cure:32}{len(kept_for_backward(model)):4} tensors kept for backward")


def old_name(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(folder / "llama").gradient_checkpointing_enable()
    for warning in caught:
        tell(f"{warning.category.__name__}: {warning.message}")


def blocks_compiled_before_loading(folder):
    model = make(folder / "llama")
    for number, block in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(block)
    read(shard(model).to_empty(device="cpu"), folder / "llama")


def blocks_compiled_before_saving(folder):
    model = load(folder / "llama")
    for number, block in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(block)
    weights = whole_weights(model)
    weights = {name: weights[name] for name, _ in model.named_parameters()}


# ---- Accelerate and Trainer ----------------------------------------------------------
def accelerate_on_cpus(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    report_wrapper(accelerator.prepare(model))


def trainer_on_cpus(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    args = transformers.TrainingArguments(
        folder / "trainer",
        fsdp=True,
        fsdp_config={"version": 2},
        use_cpu=True,
        max_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": tokens, "labels": tokens} for tokens in [range(8)] * 16]
    trainer = transformers.Trainer(model, args, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)  # it prints seconds
    trainer.train()
    report_wrapper(trainer.model_wrapped)


def report_wrapper(model):
    sharded = sum(isinstance(weight, DTensor) for weight in model.parameters())
    weights = len(list(model.parameters()))
    tell(f"{type(model).__name__}, {sharded} of {weights} weights are sharded")


# ---- the run -------------------------------------------------------------------------
GROUPS = {
    "silent_loading": (
        no_mistake,
        buffers_left_empty,
        all_weights_initialized,
        read_after_an_evaluation,
    ),
    "loading": (
        tied_in_two_groups,
        state_dict_of_a_tied_model,
        names_of_a_base_model,
        from_pretrained_on_meta,
        plain_load_state_dict,
        embedding_resized_late,
    ),
    "another_dtype": (dtype_on_rank_0_only,),
    "dtypes": (
        bfloat16_from_the_file,
        autocast_without_the_policy,
        policy_without_autocast,
        norms_in_float32,
    ),
    "losses": (losses,),
    "adapters": (
        adapters_after_fully_shard,
        adapters_before_fully_shard,
        adapters_without_the_policy,
    ),
    "saving": (
        save_without_a_state_dict,
        bfloat16_saved,
        saved_twice,
        tied_weight_saved_twice,
        deepcopy,
    ),
    "alone": (
        global_batch_evaluated,
        inference_mode,
        generate_on_rank_0,
        sharded_folder_on_rank_0,
    ),
    "compile": (
        checkpointing_in_eval_mode,
        old_name,
        blocks_compiled_before_loading,
        blocks_compiled_before_saving,
    ),
    "neighbors": (accelerate_on_cpus, trainer_on_cpus),
}
ERRORS = (Exception, dcp.CheckpointException)  # which is not an Exception


@functools.cache
def find_others():
    """Return the store of all processes, this one's rank, and their number."""
    return next(dist.rendezvous("env://"))


def start_group(name, seconds=300):
    """Make the default group; `seconds` is how long a rank waits for another one."""
    store, rank, world_size = find_others()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )


@contextlib.contextmanager
def default_group_with_timeout(seconds):
    """Replace the default group by one whose ranks do not wait long for each other.

    Nobody leaves before rank 0 does.
    """
    store, rank, _ = find_others()
    end_group()
    start_group("short", seconds)
    try:
        yield
    finally:
        if rank == 0:
            store.set("rank 0 leaves", "")
        store.wait(["rank 0 leaves"])
        end_group()
        start_group("after it")


def end_group():
    gc.collect()  # on gloo, a model still alive can abort the process
    dist.destroy_process_group()


def reason(error):
    """Return the type of an error, and what its text says.

    DCP's errors have the traceback of each rank in their text: of these, the last line
    of the first.
    """
    text = re.sub(r"\[/\S+?:\d+\] ", "", str(error))  # a line of torch's C++ code
    # a set, whose order differs from run to run
    text = re.sub(r"\{(torch\.float32), (torch\.bfloat16)\}", r"{\2, \1}", text)
    text = re.sub(r", whose dimensions .*?, an", " ... an", text)
    text = re.sub(r"\.You can make a clone .*", "", text)
    first, *others = (line.strip() for line in text.splitlines())
    inside = [line for line in others if re.match(r"\w+Error: ", line)]
    if inside:
        first += f" ... {inside[0]}"
    elif first.endswith(":"):
        first += f" {others[0]}"
    return f"{type(error).__name__}: {first}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if not (args.folder / "llama").is_dir():
        parser.error(f"{args.folder} has no models: run pretrained_mistakes_models.py")
    start_group("first")
    for mistake in GROUPS[args.group]:
        if dist.get_rank() == 0:
            print(mistake.__name__, flush=True)
        text = None
        try:
            mistake(args.folder)
        except ERRORS as error:
            text = reason(error)
        tell_each(text)


if __name__ == "__main__":
    main()
    end_group()
