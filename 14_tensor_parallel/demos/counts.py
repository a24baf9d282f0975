"""What a rank sends in a step on different meshes, and what it keeps.

torchrun --standalone --nproc-per-node=4 14_tensor_parallel/demos/counts.py
"""

import gc
import sys
import types
from importlib.util import module_from_spec
from importlib.util import spec_from_file_location
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common import launch
from common.gpt import GPT
from harness.counting import Collectives

DEPTH, WIDTH, TOKENS, SAMPLES = 4, 64, 32, 12
MESHES = ((4, 1), (2, 2), (1, 4))  # dp x tp
# what a rank sends, in units of what it gives, when the n ranks of a group form a ring
RINGS = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}


def load_stage():
    """Return this stage's script as a module, without running it."""
    spec = spec_from_file_location("train", ROOT / "14_tensor_parallel/train.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- sequence parallelism ------------------------------------------------------------
def split_sequence(model, mesh):
    """Do what split_layers does; between the layers, each rank has some tokens only."""
    some_tokens = {"output_layouts": Shard(1), "use_local_output": False}
    first = {"output_layouts": Shard(0), "use_local_output": False}  # [T, width]
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), **some_tokens),
        "positions": RowwiseParallel(input_layouts=Replicate(), **first),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.attention.out": RowwiseParallel(**some_tokens),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(**some_tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


# ---- what is counted -----------------------------------------------------------------
def make(dp, tp, sequence):
    """Return a GPT, split as the stage's script does on a mesh, and its optimizer."""
    stage = load_stage()
    if sequence:
        stage.split_layers = split_sequence
    mesh = dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    args = types.SimpleNamespace(tensor_parallel=tp, amp="off")
    torch.manual_seed(0)
    model = GPT(256, TOKENS, WIDTH, DEPTH)
    stage.shard_model(args, model, mesh)
    return model, torch.optim.AdamW(model.parameters())


def storage(tensor):
    """Return where the numbers of a tensor, or of this rank's part of it, are."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a model and its loss keep for the backward pass.

    Without the weights, which FSDP gathers again.
    """

    def __init__(self, model):
        super().__init__(self.keep, lambda tensor: tensor)
        # {address of a storage: (the storage, its bytes)}. Not that of its numbers:
        # when FSDP frees a gathered weight, an activation can get the place.
        self.kept, self.weights = {}, {}
        for module in model.modules():
            module.register_forward_pre_hook(self.note_weights)

    def note_weights(self, module, _):
        for weight in module.parameters(recurse=False):
            self.note(weight, self.weights)

    def keep(self, tensor):
        self.note(tensor, self.kept)
        return tensor

    def note(self, tensor, found):
        held = storage(tensor)
        found.setdefault(held._cdata, (held, held.nbytes()))

    def total(self):
        activations = self.kept.keys() - self.weights.keys()
        return sum(self.kept[one][1] for one in activations)


def get_loss(model, inputs):
    """Return the loss of a model that is to repeat its inputs."""
    logits = model(inputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs.flatten())


def step(model, optimizer, inputs):
    """Take a training step; return the loss."""
    optimizer.zero_grad()
    loss = get_loss(model, inputs)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def measure(dp, tp, sequence):
    """Return calls, bytes (sent in a ring, held and kept), and the loss of a step.

    All groups of these meshes have the same size, or only one rank.
    """
    model, optimizer = make(dp, tp, sequence)
    samples = torch.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS) % 256
    inputs = samples.chunk(dp)[dist.get_rank() // tp]
    step(model, optimizer, inputs)
    with Collectives() as collectives:
        loss = step(model, optimizer, inputs)
    held = sum(weight.to_local().nbytes for weight in model.parameters())
    kept = Kept(model)
    with kept:
        get_loss(model, inputs)
    found, sent = collectives.total(), 0
    assert found.keys() <= RINGS.keys()
    for name, of_a_ring in RINGS.items():
        cells = found.setdefault(name, {"calls": 0, "bytes": 0})
        sent += cells["bytes"] * of_a_ring(max(dp, tp))
    return [found[name]["calls"] for name in RINGS], [sent, held, kept.total()], loss


def main():
    tell = print if dist.get_rank() == 0 else lambda *_: None
    whole = sum(w.nbytes for w in GPT(256, TOKENS, WIDTH, DEPTH).parameters())
    tell(f"{whole:,} bytes of weights. In a step of {SAMPLES} samples, a rank")
    names = "".join(f"{name.replace('_', '-'):>15}" for name in RINGS)
    tell(f"{'':36}{'calls of':38}bytes that it")
    tell(f"{'dp x tp':18}{names}{'sends':>12}{'holds':>12}{'keeps':>12}")
    losses = {}
    for dp, tp in MESHES:
        for sequence in (False, True) if tp > 1 else (False,):
            calls, sizes, loss = measure(dp, tp, sequence)
            # a split sequence does not change what is computed
            assert abs(loss - losses.setdefault((dp, tp), loss)) < 1e-5
            name = f"{dp} x {tp}{', sequence' * sequence}"
            cells = "".join(f"{number:15}" for number in calls)
            tell(f"{name:18}{cells}", *(f"{size:11,.0f}" for size in sizes))


def read(printed):
    """Return what `main` printed, {mesh: bytes that a rank sends, holds and keeps}."""
    rows = printed.splitlines()[3:]
    sizes = {row[:18].strip(): row.replace(",", "").split()[-3:] for row in rows}
    return {name: [int(size) for size in of_mesh] for name, of_mesh in sizes.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    launch.ignore_mesh_warnings()
    main()
    gc.collect()
    dist.destroy_process_group()
