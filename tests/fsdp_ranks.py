"""What the processes of stages/test_fsdp.py do, which are forked without a launcher.

These functions are in a file of their own because every fork imports it.
"""

import gc
import sys
import types
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from common import checkpoint
from common.gpt import GPT
from common.gpt import decay_groups
from harness.counting import Collectives
from tests.resume_harness import app_state
from tests.resume_harness import take_step
from tests.training import FakeLoader
from tests.training import load_stage
from tests.training import mesh_of
from tests.training import plain
from tests.training import stage_args
from tests.training import train_first_epoch

WINDOWS, CONTEXT = 12, 8  # of a global batch
FLAGS = ("--batch-size", WINDOWS, "--context-length", CONTEXT)
FLAGS += ("--width", 20, "--depth", 4, "--heads", 2)


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


def take_steps(rank, processes, stage, *flags):
    """Take two steps by the stage's own functions; return what was seen of them.

    collectives: those of the second step, as of harness/counting.py; norms: of the
    gradient, one per step; weights: the whole ones; params, grads, states, memory:
    bytes of this process afterwards.
    """
    module, seen = load_stage(stage), types.SimpleNamespace(norms=[])
    args = stage_args(module, *FLAGS, *flags)
    torch.manual_seed(0)
    model = GPT(256, CONTEXT, args.width, args.depth, args.heads).to(args.dtype)
    module.shard_model(args, model, *mesh_of(module, args))
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), 3e-3)
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
        collectives = Collectives()
        with mock.patch.object(nn.utils, "clip_grad_norm_", noted), collectives:
            train_first_epoch(stage, module, args, *parts)
    seen.collectives = collectives.seen
    del loader, parts
    seen.params = local_bytes(model.parameters())
    seen.grads = local_bytes(each.grad for each in model.parameters())
    states = [value for one in optimizer.state.values() for value in one.values()]
    seen.states = local_bytes(each for each in states if each.dim())
    seen.memory = bytes_in_memory()
    named = model.named_parameters()
    seen.weights = {name: plain(each).detach() for name, each in named}
    return vars(seen)


def save_and_load(rank, processes, stage, folder):  # noqa: ARG001
    """Save a checkpoint and load it into another model, by a stage's own functions.

    Return what was seen of that: gathered, the bytes of the weights and momenta in what
    this process has to save; loads, how often it called checkpoint.load; opened, how
    often it opened a file with a checkpoint's name; weights, before, after: those of
    this process's shards that were saved, and of the other model around its loading.
    """
    module, seen = load_stage(stage), types.SimpleNamespace(loads=0, opened=0)
    args = stage_args(module, "--checkpoint-dir", f"{folder}/checkpoints")
    first, second = (app_state(stage, module, args, seed) for seed in (0, 1))
    module.load_latest(args, first)
    take_step(first)
    module.save_checkpoint(args, first)
    state = first.state_dict()
    leaves = tree_leaves([state["model"], state["optimizer"]])
    seen.gathered = sum(each.nbytes for each in leaves if torch.is_tensor(each))
    seen.weights = [each.to_local() for each in first.model.parameters()]
    seen.before = [each.to_local().clone() for each in second.model.parameters()]

    def note(event, arguments):
        if event == "open" and str(arguments[0]).endswith(".pt"):
            seen.opened += 1

    def load(path):
        seen.loads += 1
        return original(path)

    original = checkpoint.load
    sys.addaudithook(note)
    with mock.patch.object(checkpoint, "load", load):
        module.load_latest(args, second)
    seen.after = [each.to_local() for each in second.model.parameters()]
    seen.steps = second.step
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
