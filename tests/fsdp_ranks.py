"""What the processes of tests/test_fsdp.py do, which are forked without a launcher.

These functions are in a file of their own because every fork imports it.
"""

import gc
import types

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.full_state import FullModel
from common.model import GPT
from common.model import decay_groups
from tests.harness import FakeLoader
from tests.harness import load_stage
from tests.harness import make_checkpointer
from tests.harness import plain

WINDOWS, CONTEXT = 12, 8  # of a global batch


class Collectives(TorchDispatchMode):
    """Notes the all-gathers and reduce-scatters: name, dtype, bytes of the whole."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = str(operation)
        if name == "c10d._allgather_base_.default":
            self.seen.append(("all_gather", args[0].dtype, args[0].nbytes))
        elif name == "c10d._reduce_scatter_base_.default":
            self.seen.append(("reduce_scatter", args[1].dtype, args[1].nbytes))
        return operation(*args, **(kwargs or {}))


class SavedTensors(saved_tensors_hooks):
    """Counts the bytes that forward passes keep for their backward passes.

    What activation checkpointing computes again has hooks of its own.
    """

    def __init__(self):
        super().__init__(self.pack, lambda tensor: tensor)
        self.bytes = 0

    def pack(self, tensor):
        self.bytes += tensor.nbytes
        return tensor


def local_bytes(tensors):
    """Return the bytes of this rank's shards of tensors."""
    shards = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(shard.nbytes for shard in shards)


def bytes_in_memory():
    """Return the bytes behind all tensors of this process that are in use."""
    gc.collect()
    # A fork does not see those of the server, which has frozen them.
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def whole_batch(step):
    """Return the global batch of a step: tokens, and the token after each."""
    generator = torch.Generator().manual_seed(step)
    windows = torch.randint(256, (WINDOWS, CONTEXT + 1), generator=generator)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def take_steps(rank, processes, stage, dtype=torch.float64, steps=2, **flags):
    """Take steps by the stage's own functions; return what was seen of them.

    collectives: those of the last step; norms: of the gradient, one per step; weights:
    the whole ones; params, grads, states, memory: bytes of this process after the last.
    """
    defaults = {"width": 20, "depth": 4, "heads": 2, "amp": "off"}
    defaults |= {"keep_unsharded": False, "grad_accum_steps": 1}
    defaults |= {"activation_checkpointing": False}
    args = types.SimpleNamespace(
        device=torch.device("cpu"),
        dtype=dtype,
        seed=0,
        clip_grad=1.0,
        checkpoint_dir=None,
        checkpoint_every=100,
        keep_checkpoints=2,
        **{**defaults, **flags},
    )
    module, seen = load_stage(stage), types.SimpleNamespace(norms=[])
    module.is_main_process = lambda: False  # it shows no progress
    torch.manual_seed(0)
    model = GPT(256, CONTEXT, args.width, args.depth, args.heads).to(dtype)
    module.shard_model(args, model)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), 3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp == "fp16")
    clip = nn.utils.clip_grad_norm_

    def noted(*arguments):
        norm = clip(*arguments)
        seen.norms.append(plain(norm).item())
        return norm

    nn.utils.clip_grad_norm_ = noted
    own = slice(rank, None, processes)
    for step in range(1, steps + 1):
        loader = FakeLoader([tuple(each[own] for each in whole_batch(step))])
        parts = (model, optimizer, scheduler, scaler)
        ckpt = make_checkpointer(module, args, loader, *parts)
        saved = SavedTensors()
        with Collectives() as collectives, saved:
            module.train_one_epoch(args, 1, model, loader, *parts[1:], ckpt, no_signal)
        seen.collectives = collectives.seen
    seen.saved = saved.bytes
    del loader, ckpt, parts
    seen.params = local_bytes(model.parameters())
    seen.grads = local_bytes(each.grad for each in model.parameters())
    states = [value for one in optimizer.state.values() for value in one.values()]
    seen.states = local_bytes(each for each in states if each.dim())
    seen.memory = bytes_in_memory()
    seen.weights = FullModel(model).state_dict()
    return vars(seen)


def no_signal():
    """Stand for the vote of the ranks, when none of them has got a signal."""
    return types.SimpleNamespace(wait=lambda: [torch.tensor([0, 0])])


def in_group(function, rank, processes, folder, *arguments):
    """Be one process of a group; save what the function returns as folder/RANK.pt."""
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", store, rank=rank, world_size=processes)
    result = function(rank, processes, *arguments)
    torch.save(result, folder / f"{rank}.pt")
    gc.collect()
    dist.destroy_process_group()
