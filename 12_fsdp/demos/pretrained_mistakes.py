"""What goes wrong with a pretrained model under FSDP2; the arguments name the mistakes.

torchrun --standalone --nproc-per-node=2 \
    12_fsdp/demos/pretrained_mistakes.py FOLDER losses

Before the first mistake, a small trained Llama is written to the folder, in bfloat16 as
a download has it.
"""

import functools
import gc
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import accelerate
import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "your_own_script/hugging_face"))

from fine_tune import collate
from fine_tune import make_dataset
from make_model import make_config

IGNORED = -100  # the label of a position without a loss
WHOLE = StateDictOptions(full_state_dict=True)


# ---- the model, sharded and loaded ---------------------------------------------------
def make(path, dtype=torch.float32):
    """Return the model of a folder on the meta device."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def shard(model, **options):
    """Shard each block, then the rest; return the model."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def read(model, path):
    """Fill the weights from the files of a folder, each rank its shards."""
    weights = dict(model.named_parameters())
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(path))


def load(path, dtype=torch.float32, **options):
    """Return the sharded model of a folder: no mistake."""
    model = shard(make(path, dtype), **options).to_empty(device="cpu")
    model.initialize_weights()  # the buffers, which are in no file
    read(model, path)
    return model


# ---- batches, losses and output ------------------------------------------------------
def get_batch(seed=2, start=0, step=1):
    """Return a batch of 16 sequences, or of every `step`th of them."""
    ((inputs, labels),) = collate(make_dataset(16, seed)[start::step])
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
    weights = get_model_state_dict(model, options=WHOLE)
    return {name: weight.clone() for name, weight in weights.items()}


def write_model(path):
    """Train a small Llama a little, so that its loss is low, and write it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("llama"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for seed in range(120):
        get_loss(model, get_batch(10 + seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(path)


def tell(text):
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def tell_each(text):
    """Print the texts of all ranks, in order."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    for rank, each in enumerate(texts):
        tell(f"rank {rank}: {each}")
    return texts


# ---- loading -------------------------------------------------------------------------
def weights_drawn_again(folder):
    model = shard(make(folder / "llama")).to_empty(device="cpu")
    read(model, folder / "llama")
    torch.manual_seed(0)
    model.initialize_weights()  # the mistake: after loading
    tell(f"no mistake: loss {get_loss(load(folder / 'llama')):.4f}")
    tell(f"weights drawn again: loss {get_loss(model):.4f}; ln 256 is 5.5452")


def read_after_an_evaluation(folder):
    model = load(folder / "llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.01)  # stands for a training that went wrong
        get_loss(model)
    read(model, folder / "llama")  # the mistake: some weights are whole now
    loss = get_loss(model)
    loss.backward()
    after = get_loss(model)
    tell(f"read after an evaluation: loss {loss:.4f}, after a backward {after:.4f}")
    assert after > 5 > loss


# ---- dtype_on_rank_0_only ------------------------------------------------------------
def dtype_on_rank_0_only(folder):
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(
            folder / "llama", dtype=torch.float32
        )
    else:
        model = make(folder / "llama", torch.bfloat16)  # the mistake
    weights = model.state_dict()
    shard(model).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    tell("loaded")
    get_loss(model)


# ---- losses --------------------------------------------------------------------------
def sum_over_all_tokens(model, inputs, labels):  # no mistake
    logits = model(**inputs).logits.flatten(0, 1)
    loss_sum = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return loss_sum * dist.get_world_size() / count_tokens(labels)


def num_items_in_batch(model, inputs, labels):  # no mistake
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
    sequences = sorted(make_dataset(16, seed=1), key=len)
    short, long = sequences[:8], sequences[8:]  # a rank has far fewer tokens
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float64)
    ((inputs, labels),) = collate(sequences)
    loss = get_loss(model, (inputs, labels))
    loss.backward()
    wanted = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    tell(f"{'one process':22}loss {loss:.4f}")
    ((inputs, labels),) = collate(short if dist.get_rank() == 0 else long)
    tell_each(f"{(labels != IGNORED).sum()} tokens with a label")
    for get in LOSSES:
        model = load(folder / "llama", torch.float64)
        loss = get(model, inputs, labels)
        loss.backward()
        grads = [weight.grad.full_tensor() for weight in model.parameters()]
        found = torch.cat([grad.flatten() for grad in grads])
        mean = loss.detach()
        dist.all_reduce(mean)
        off = (found - wanted).norm() / wanted.norm()
        mean = mean / dist.get_world_size()
        tell(f"{get.__name__:22}loss {mean:.4f}, gradient off by {off:.2g}")
        # transformers' own loss converts its logits to float32
        assert off < 1e-5 if get in LOSSES[:2] else off > 0.2


# ---- adapters ------------------------------------------------------------------------
def adapters_after_fully_shard(folder):
    model = add_adapters(load(folder / "llama"))  # the mistake
    assert not train_adapters("get_peft_model after fully_shard", model)


def adapters_before_fully_shard(folder):  # the cure
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    model = add_adapters(model)
    shard(model.get_base_model())
    assert train_adapters("get_peft_model before fully_shard", model)


def add_adapters(model):
    """Add adapters by peft, the same on all ranks."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, config)


# ---- how the adapters are trained ----------------------------------------------------
def train_adapters(name, model):
    """Take two steps; return whether all ranks then have the same model."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    sharded = sum(isinstance(weight, DTensor) for weight in trained)
    tell(f"{name}: {sharded} of {len(trained)} adapters are sharded")
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for seed in (1, 2):
        optimizer.zero_grad()
        get_loss(model, get_my_batch(seed)).backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    with torch.no_grad():
        loss = get_loss(model)
    texts = tell_each(f"norm {norm:.4f}, then loss on the same sequences {loss:.4f}")
    return len(set(texts)) == 1


# ---- saving --------------------------------------------------------------------------
def saved_in_bfloat16(folder):
    model = load(folder / "llama")
    weights = whole_weights(model)
    if dist.get_rank() == 0:
        path = folder / "bfloat16"
        halves = {name: weight.bfloat16() for name, weight in weights.items()}
        model.save_pretrained(path, state_dict=halves)  # config.json says float32
        dtype = AutoModelForCausalLM.from_pretrained(path).dtype
        tell(f"saved in bfloat16: from_pretrained returns {dtype}")
        assert dtype == torch.float32
        model.config.dtype = torch.bfloat16
        model.config.save_pretrained(path)  # the cure, after save_pretrained
        dtype = AutoModelForCausalLM.from_pretrained(path).dtype
        tell(f"and config.json corrected: from_pretrained returns {dtype}")
        assert dtype == torch.bfloat16


def saved_twice(folder):
    model = load(folder / "llama")
    weights = whole_weights(model)
    if dist.get_rank() == 0:
        for name in ("first", "second"):
            model.save_pretrained(folder / name, state_dict=weights)  # empties weights
            files = sorted(path.name for path in (folder / name).iterdir())
            tell(f"the {name} folder: {', '.join(files)}")
        assert "model.safetensors" not in files


# ---- from_pretrained_on_rank_0 -------------------------------------------------------
def from_pretrained_on_rank_0(folder):
    path = folder / "sharded"
    model = load(folder / "llama")
    # a file per rank
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    if dist.get_rank() == 0:
        model.config.save_pretrained(path)
    del model
    patient = restart_group(seconds=5)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    tell(f"from_pretrained on all ranks: loss {get_loss(loaded):.4f}")
    if dist.get_rank() == 0:
        try:
            AutoModelForCausalLM.from_pretrained(path)  # the mistake
        except RuntimeError as error:
            assert "in gather_object" in "".join(traceback.format_exception(error))
            tell(f"from_pretrained on rank 0: {error}")
    dist.barrier(patient)
    end_group()
    start_group("patient")


# ---- checkpointing_in_eval_mode ------------------------------------------------------
def checkpointing_in_eval_mode(folder):
    path = folder / "llama"
    model = shard(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    before = count_kept(model)
    model.activation_checkpointing_enable()
    mistake = count_kept(model)  # from_pretrained returns it in evaluation mode
    model.train()
    cure = count_kept(model)
    tell(f"without activation checkpointing: {before} tensors kept for backward")
    tell(f"with it: {mistake}; and with model.train(): {cure}")
    assert before == mistake > 5 * cure


def count_kept(model):
    """Return how many tensors autograd keeps from a forward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        get_loss(model)
    return len(kept)


# ---- fsdp_on_cpus --------------------------------------------------------------------
def fsdp_on_cpus(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    report_wrapper("Accelerate", accelerator.prepare(model))

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
    report_wrapper("the Trainer", trainer.model_wrapped)


def report_wrapper(name, model):
    sharded = sum(isinstance(weight, DTensor) for weight in model.parameters())
    weights = len(list(model.parameters()))
    tell(f"{name}: {type(model).__name__}, {sharded} of {weights} weights are sharded")
    assert sharded == 0


# ---- problems ------------------------------------------------------------------------
def problems(model):
    """Return a line for each thing that is often wrong, before the first step."""
    found = [] if model.training else ["the model is in evaluation mode"]
    for name, weight in model.named_parameters():
        if weight.is_meta:
            found.append(f"{name} is on the meta device")
        if weight.requires_grad and not isinstance(weight, DTensor):
            found.append(f"{name} is trained and not sharded")
        if weight.requires_grad and weight.dtype != torch.float32:
            found.append(f"{name} is trained in {weight.dtype}")
    for name, buffer in model.named_buffers():
        if not buffer.isfinite().all():
            found.append(f"{name} is not finite")
        elif buffer.is_floating_point() and not buffer.any():
            found.append(f"{name} is all zero")
    return found


# ---- what problems finds -------------------------------------------------------------
def check(folder):
    path = folder / "llama"
    zeros = load(path).train()
    assert not problems(zeros)
    zeros.get_buffer("model.rotary_emb.inv_freq").zero_()
    late = add_adapters(load(path)).train()
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    halves = shard(AutoModelForCausalLM.from_pretrained(path))
    for name, model, count in (
        ("a buffer of zeros", zeros, 1),
        ("get_peft_model after fully_shard", late, 16),
        ("fully_shard forgotten", whole, 39),
        ("dtype= and train() forgotten", halves, 40),
    ):
        first, *others = problems(model)
        tell(f"{name}: {first}, and {len(others)} more")
        assert len(others) == count - 1


# ---- the run -------------------------------------------------------------------------
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


def restart_group(seconds):
    """Replace the default group by a less patient one; return one that is patient."""
    dist.barrier()
    end_group()
    start_group("impatient", seconds)
    return dist.new_group(timeout=timedelta(seconds=300))


def end_group():
    gc.collect()  # on gloo, a model still alive can abort the process
    dist.destroy_process_group()


def main():
    folder = Path(sys.argv[1])
    start_group("first")
    if dist.get_rank() == 0 and not (folder / "llama").is_dir():
        write_model(folder / "llama")
    dist.barrier()
    for name in sys.argv[2:]:
        globals()[name](folder)
    end_group()


if __name__ == "__main__":
    main()
