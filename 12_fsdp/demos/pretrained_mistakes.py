"""What goes wrong when a model is loaded under FSDP2; the arguments name the mistakes.

torchrun --standalone --nproc-per-node=2 \
    12_fsdp/demos/pretrained_mistakes.py FOLDER not_loaded zero_frequencies

Before the first mistake, a small trained Llama is written to the folder, in bfloat16 as
a download has it.
"""

import gc
import sys
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig


# ---- the model, sharded and loaded ---------------------------------------------------
def make(path, dtype=torch.float32):
    """Return the model of a folder on the meta device."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def shard(model):
    """Shard each block, then the rest; return the model."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def read(model, path):
    """Fill the weights from the files of a folder, each rank its shards."""
    weights = dict(model.named_parameters())
    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(path))


def load(path):
    """Return the sharded model of a folder: no mistake."""
    model = shard(make(path)).to_empty(device="cpu")
    model.initialize_weights()  # the buffers, which are in no file
    read(model, path)
    return model


# ---- the task, and output ------------------------------------------------------------
def get_loss(model, seed=0):
    """Return the loss on 16 sequences that count up, each by a step of its own."""
    generator = torch.Generator().manual_seed(seed)
    start, step = torch.randint(1, 8, (2, 16, 1), generator=generator)
    tokens = start + step * torch.arange(24)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def write_model(path):
    """Train a small Llama a little, so that its loss is low, and write it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for seed in range(100):
        get_loss(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(path)


def tell(text):
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def tell_each(text):
    """Print the texts of all ranks, in order, and return them."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    for rank, each in enumerate(texts):
        tell(f"rank {rank}: {each}")
    return texts


# ---- weights that nobody loaded ------------------------------------------------------
def not_loaded(path):
    torch.use_deterministic_algorithms(True)  # fills empty memory with nan, not 0
    model = shard(make(path)).to_empty(device="cpu")  # the mistake: nothing after it
    torch.use_deterministic_algorithms(False)
    tell(f"not loaded: loss {get_loss(model):.4f}")


def drawn_in_shards(path):
    model = shard(make(path)).to_empty(device="cpu")
    torch.manual_seed(0)
    model.initialize_weights()  # the mistake: each rank draws as if it were alone
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=options)["model.embed_tokens.weight"]
    assert whole[:128].equal(whole[128:])
    tell(f"drawn in shards: loss {get_loss(model):.4f}, both ranks have equal rows")


# ---- buffers that are in no file -----------------------------------------------------
def zero_frequencies(path):
    model = load(path)
    tell(f"no mistake: loss {get_loss(model):.4f}")
    for buffer in model.buffers():
        buffer.zero_()  # what to_empty() may leave there
    tell(f"frequencies of zero: loss {get_loss(model):.4f}")


# ---- read after an evaluation --------------------------------------------------------
def read_after_an_evaluation(path):
    model = load(path)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.01)  # stands for a training that went wrong
        get_loss(model)
    read(model, path)  # the mistake: some weights are whole now
    loss = get_loss(model)
    loss.backward()
    after = get_loss(model)
    tell(f"read after an evaluation: loss {loss:.4f}, after a backward {after:.4f}")
    assert after > 5 > loss


# ---- another dtype on rank 0 ---------------------------------------------------------
def dtype_on_rank_0_only(path):
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        model = make(path, torch.bfloat16)  # the mistake
    weights = model.state_dict()
    shard(model).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    tell("loaded")
    get_loss(model)


# ---- adapters ------------------------------------------------------------------------
def adapters(path):
    train_adapters("after", add_adapters(load(path)))  # the mistake
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = add_adapters(whole)
    shard(model.get_base_model())
    train_adapters("before", model)


def add_adapters(model):
    """Add adapters by peft, the same on all ranks."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(model, config)


# ---- how they are trained ------------------------------------------------------------
def train_adapters(when, model):
    """Take eight steps; compare the ranks' losses on the same sequences."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    sharded = sum(isinstance(weight, DTensor) for weight in trained)
    tell(f"get_peft_model {when} fully_shard: {sharded} of {len(trained)} are sharded")
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    for seed in range(dist.get_rank(), 16, 2):
        optimizer.zero_grad()
        get_loss(model, seed).backward()
        optimizer.step()
    with torch.no_grad():
        texts = tell_each(f"loss on the same sequences {get_loss(model):.4f}")
    assert (len(set(texts)) == 1) == (when == "before")


# ---- problems ------------------------------------------------------------------------
def problems(model):
    """Return a line for each thing that is often wrong, before the first step."""
    found = [] if model.training else ["the model is in evaluation mode"]
    for name, weight in model.named_parameters():
        if weight.requires_grad and not isinstance(weight, DTensor):
            found.append(f"{name} is trained and not sharded")
        if weight.requires_grad and weight.dtype != torch.float32:
            found.append(f"{name} is trained in {weight.dtype}")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            found.append(f"{name} is on the meta device")
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not buffer.is_meta:
            if not buffer.isfinite().all():
                found.append(f"{name} is not finite")
            elif not buffer.any():
                found.append(f"{name} is all zero")
    return found


# ---- what problems finds -------------------------------------------------------------
def check(path):
    zeros = load(path).train()
    assert not problems(zeros)
    zeros.get_buffer("model.rotary_emb.inv_freq").zero_()
    for name, model, count in (
        ("to_empty forgotten", shard(make(path)), 41),
        ("a buffer of zeros", zeros, 1),
        ("from_pretrained alone", AutoModelForCausalLM.from_pretrained(path), 79),
    ):
        first, *others = problems(model)
        tell(f"{name}: {first}, and {len(others)} more")
        assert len(others) == count - 1


# ---- the run -------------------------------------------------------------------------
def main():
    path = Path(sys.argv[1]) / "llama"
    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and not path.is_dir():
        write_model(path)
    dist.barrier()
    for name in sys.argv[2:]:
        globals()[name](path)
    gc.collect()  # on gloo, a model still alive can abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
