"""What a rank sends in a step on different meshes, what it holds, and what it keeps.

torchrun --standalone --nproc-per-node=4 14_tensor_parallel/demos/counts.py
"""

import gc
import sys
import types
from contextlib import nullcontext
from importlib.util import module_from_spec
from importlib.util import spec_from_file_location
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.parallel import parallelize_module

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common import launch
from common.gpt import GPT
from harness.counting import Collectives
from harness.counting import Kept
from harness.counting import size

DEPTH, WIDTH, TOKENS, SAMPLES = 4, 64, 32, 12
NAMES = ("all_gather", "reduce_scatter", "all_reduce")
ROWS = [(4, 1, ""), (2, 2, ""), (2, 2, "sequence")]  # dp, tp, and what else is split
ROWS += [(1, 4, ""), (1, 4, "sequence"), (1, 4, "sequence, loss")]


def load_stage():
    """Return this stage's script as a module, without running it."""
    spec = spec_from_file_location("train", ROOT / "14_tensor_parallel/train.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- sequence parallelism ------------------------------------------------------------
def make_sequence_plan():
    """Return a plan: between the layers, a rank has its part of each sequence."""
    part = {"output_layouts": Shard(1), "use_local_output": False}  # of [B, T, width]
    first = {"output_layouts": Shard(0), "use_local_output": False}  # of [T, width]
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), **part),
        "positions": RowwiseParallel(input_layouts=Replicate(), **first),
        "blocks.*.norm*": SequenceParallel(),
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.attention.out": RowwiseParallel(**part),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(**part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


# ---- what is counted -----------------------------------------------------------------
def make(dp, tp, also):
    """Return a GPT, split as the stage's script does on a mesh, and its optimizer."""
    stage, plan = load_stage(), make_sequence_plan()
    if "loss" in also:  # the logits stay split, as DTensors
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    if also:
        stage.split_layers = lambda model, mesh: parallelize_module(model, mesh, plan)
    mesh = dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    args = types.SimpleNamespace(tensor_parallel=tp, amp="off")
    torch.manual_seed(0)
    model = GPT(256, TOKENS, WIDTH, DEPTH)
    stage.shard_model(args, model, mesh)
    return model, torch.optim.AdamW(model.parameters())


def get_loss(model, inputs):
    """Return the loss of a model that is to repeat its inputs."""
    logits = model(inputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs.flatten())


def step(model, optimizer, inputs, context):
    """Take a training step; return the loss."""
    optimizer.zero_grad()
    with context():  # for loss_parallel, around the loss and its backward pass
        loss = get_loss(model, inputs)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def measure(dp, tp, also):
    """Return the calls of a step; bytes sent in rings, held and kept; and the loss."""
    context = loss_parallel if "loss" in also else nullcontext
    model, optimizer = make(dp, tp, also)
    samples = torch.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS) % 256
    inputs = samples.chunk(dp)[dist.get_rank() // tp]
    step(model, optimizer, inputs, context)
    with Collectives() as collectives:
        loss = step(model, optimizer, inputs, context)
    held = size(model.parameters())
    with Kept() as kept, context():
        get_loss(model, inputs)
    found = collectives.total()
    calls = [found.get(name, {"calls": 0})["calls"] for name in NAMES]
    return calls, [collectives.sent, held, size(kept.activations(model))], loss


def main():
    tell = print if dist.get_rank() == 0 else lambda *_: None
    whole = sum(w.nbytes for w in GPT(256, TOKENS, WIDTH, DEPTH).parameters())
    tell(f"{whole:,} bytes of weights. In a step of {SAMPLES} samples, a rank")
    names = "".join(f"{name.replace('_', '-'):>15}" for name in NAMES)
    tell(f"{'':42}{'calls of':38}bytes that it")
    tell(f"{'dp x tp':21}{names}{'sends':>12}{'holds':>12}{'keeps':>12}")
    losses = {}
    for dp, tp, also in ROWS:
        calls, sizes, loss = measure(dp, tp, also)
        # what else is split does not change what is computed
        assert abs(loss - losses.setdefault((dp, tp), loss)) < 1e-5
        name = f"{dp} x {tp}{f', {also}' * bool(also)}"
        cells = "".join(f"{number:15}" for number in calls)
        tell(f"{name:21}{cells}", *(f"{number:11,.0f}" for number in sizes))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    launch.ignore_mesh_warnings()
    main()
    gc.collect()
    dist.destroy_process_group()
