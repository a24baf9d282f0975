"""What the processes of tests/test_fsdp.py do, which are forked without a launcher.

These functions are in a file of their own because every fork imports it.
"""

import gc
import types
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from common.full_state import FullModel
from common.model import GPT
from common.model import decay_groups
from tests.training import FakeLoader
from tests.training import load_stage
from tests.training import plain
from tests.training import stage_args
from tests.training import train_first_epoch
from tools.counting import Collectives

WINDOWS, CONTEXT = 12, 8  # of a global batch
FLAGS = ("--batch-size", WINDOWS, "--context-length", CONTEXT)
FLAGS += ("--width", 20, "--depth", 4, "--heads", 2)


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


def take_steps(rank, processes, stage, *flags, **switches):
    """Take two steps by the stage's own functions; return what was seen of them.

    collectives: those of the second step, as of tools/counting.py; saved: the bytes
    that it kept for its backward pass; norms: of the gradient, one per step; weights:
    the whole ones; params, grads, states, memory: bytes of this process afterwards.
    """
    module, seen = load_stage(stage), types.SimpleNamespace(norms=[])
    # until all modules pass flags
    flags += tuple(f"--{name.replace('_', '-')}" for name in switches if switches[name])
    args = stage_args(module, *FLAGS, *flags)
    torch.manual_seed(0)
    model = GPT(256, CONTEXT, args.width, args.depth, args.heads).to(args.dtype)
    module.shard_model(args, model)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), 3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp == "fp16")
    clip = nn.utils.clip_grad_norm_

    def noted(*arguments):
        norm = clip(*arguments)
        seen.norms.append(plain(norm).item())
        return norm

    own = slice(rank, None, processes)
    for step in (1, 2):
        loader = FakeLoader([tuple(each[own] for each in whole_batch(step))])
        parts = (model, loader, optimizer, scheduler, scaler)
        collectives, saved = Collectives(), SavedTensors()
        with mock.patch.object(nn.utils, "clip_grad_norm_", noted), collectives, saved:
            train_first_epoch(stage, module, args, *parts)
    seen.collectives, seen.saved = collectives.seen, saved.bytes
    del loader, parts
    seen.params = local_bytes(model.parameters())
    seen.grads = local_bytes(each.grad for each in model.parameters())
    states = [value for one in optimizer.state.values() for value in one.values()]
    seen.states = local_bytes(each for each in states if each.dim())
    seen.memory = bytes_in_memory()
    seen.weights = FullModel(model).state_dict()
    return vars(seen)


def in_group(function, rank, processes, folder, *arguments):
    """Be one process of a group; save what the function returns as folder/RANK.pt."""
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", store, rank=rank, world_size=processes)
    result = function(rank, processes, *arguments)
    torch.save(result, folder / f"{rank}.pt")
    gc.collect()
    dist.destroy_process_group()
