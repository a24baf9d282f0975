"""Checks resume.py: what a kill at each moment of a save leaves is loaded."""

import copy
import io
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # otherwise each rank does, for its optimizer, in seconds
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._pytree import tree_leaves

from exercises.checks import Recording

WIDTH = 80
EVERY = 2  # optimizer steps between two checkpoints
LAST = 10  # has more digits than the step before
# Audit events of Python: operations that change a folder (os.replace is a rename).
CHANGES = {"os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir"}


def check(answer, rank):
    folder = Path(f"{dist.get_world_size()}-ranks/checkpoints")
    training = Training(0, rank)
    states = {0: training.state()}
    step = answer.load(folder, *training.parts)
    assert step == 0 and step is not None, (
        f"load() returns {step} where there is no checkpoint, not 0"
    )
    check_unchanged(states[0], training, "load() without a checkpoint")
    moments = Moments(folder, rank)
    for step in range(EVERY, LAST + 1, EVERY):
        states[step] = training.train(EVERY).state()
        with moments.of(step):
            answer.save(folder, step, *training.parts)
        check_unchanged(states[step], training, "save()")
        dist.barrier()
    load(answer, rank, folder, [LAST], states)
    copies = [None] * dist.get_world_size()
    dist.all_gather_object(copies, moments.copies)
    for step, left in sum(copies, []):
        what = f"after a kill while step {step} was saved, "
        steps = [step - EVERY, step]
        found, training = load(answer, rank, left, steps, states, what)
        if found < step:  # the training goes on, and saves over what the kill left
            answer.save(left, step, *training.train(EVERY).parts)
            dist.barrier()
            load(answer, rank, left, [step], states, f"{what}and saved again, ")


# ---- the training --------------------------------------------------------------------
class Model(nn.Linear):
    """Has a buffer, too: how many batches it was trained on."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, inputs):
        self.batches += 1
        return super().forward(inputs)


class Training:
    """A model that is trained on random inputs, others on each rank."""

    def __init__(self, seed, rank):
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        self.parts = self.model, self.optimizer, self.scheduler
        torch.manual_seed(100 * seed + rank)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, WIDTH)).square().mean().backward()
            for weight in self.model.parameters():  # added up in the ranks' order
                ranks = range(dist.get_world_size())
                parts = [torch.empty_like(weight.grad) for _ in ranks]
                dist.all_gather(parts, weight.grad)
                weight.grad = sum(parts)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def state(self):
        """Return a copy of everything that a step depends on."""
        parts = {
            "weights or buffers": self.model.state_dict(),
            "optimizer's state": self.optimizer.state_dict(),
            "scheduler's state": self.scheduler.state_dict(),
            "random numbers": torch.get_rng_state(),
        }
        return copy.deepcopy(parts)


def is_same(one, other):
    """Return whether two parts of a state are equal to the last bit."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(x.equal(y) if torch.is_tensor(x) else x == y for x, y in pairs)


# ---- the kills -----------------------------------------------------------------------
class Moments(Recording):
    """Copies the folder as a kill would leave it, in each of a save's file operations.

    A torch.save has then written half of its bytes, another file is empty, and a rename
    has not happened yet. copies: pairs of the step that was saved, and the copy

    At such a moment, rank 0 has gone as far as it can without the others. So it has
    given a folder its name, for instance, if it does not wait for this rank.
    """

    def __init__(self, folder, rank):
        super().__init__()
        self.folder, self.rank, self.copies = folder.absolute(), rank, []
        self.step = None  # the one that is saved now
        sys.addaudithook(self.hear)

    def of(self, step):
        self.step = step
        self.events.clear()
        return self

    def __enter__(self):
        super().__enter__()
        patch = mock.patch.object(torch, "save", self.half_of(torch.save))
        self.patches.enter_context(patch)
        return self

    def __exit__(self, *error):
        self.tell(len(self.calls) + 1)
        self.step = None
        return super().__exit__(*error)

    def note(self, operation, args, result):
        super().note(operation, args, result)
        self.tell(len(self.calls))

    def tell(self, calls):
        """Have rank 0 say how many collectives it has begun."""
        if self.rank == 0:
            _get_default_store().set(f"{self.step}/{calls}", "")

    def kill(self, path=None, size=0):
        """Copy the folder; size: of the file at `path`, which is cut off there."""
        number = path.stat().st_ino if path and path.exists() else None
        if self.rank:
            _get_default_store().wait([f"{self.step}/{len(self.calls) + 1}"])
        left = Path(f"{self.folder}-{self.step}-{self.rank}-{len(self.copies)}")
        try:
            shutil.copytree(self.folder, left)
            for each in self.folder.rglob("*"):  # it may have another name by now
                if each.stat().st_ino == number:
                    os.truncate(left / each.relative_to(self.folder), size)
        except OSError:  # it is not there yet, or another rank has changed it meanwhile
            return
        self.copies.append((self.step, left))

    def half_of(self, save):
        def saved(state, file, *args, **kwargs):
            save(state, file, *args, **kwargs)
            if not isinstance(file, io.BytesIO):  # so a tensor is pickled to be sent
                path = Path(file.name if hasattr(file, "write") else file)
                self.kill(path, path.stat().st_size // 2)

        return saved

    def hear(self, event, args):
        if self.step is None:
            return
        if event in CHANGES:
            self.kill()
        elif event == "open" and isinstance(args[0], (str, os.PathLike)):
            path, _, flags = Path(args[0]), *args[1:]
            if self.folder in path.absolute().parents and flags & os.O_TRUNC:
                self.kill(path)


# ---- the parts of the check ----------------------------------------------------------
def load(answer, rank, folder, wanted, states, what=""):
    """Load into a new training; return the step and the training.

    wanted: the steps that may be right, first that of the latest complete checkpoint;
    states: {step: its state}; what: begins a message.
    """
    training = Training(7, rank)
    try:
        step = answer.load(folder, *training.parts)
    except Exception as error:
        if not what:
            raise
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise AssertionError(
            f"{what}load() begins with half of a checkpoint: {said.partition('. ')[0]}"
        ) from error
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    assert len({*steps}) == 1, (
        f"{what}load() returns {', '.join(map(str, steps))} on ranks 0, 1, ...: all"
        " have to load the same checkpoint"
    )
    by_name = step == LAST - EVERY and wanted == [LAST]
    hint = "; does it sort names as text, where 8 comes after 10?" if by_name else ""
    assert step in wanted, (
        f"{what}load() returns {step}, but the latest complete checkpoint is of step"
        f" {wanted[0]}{hint}"
    )
    if step == 0:
        return step, Training(0, rank)
    half = ", so this is half of a checkpoint" if what else ""
    for name, part in training.state().items():
        assert is_same(part, states[step][name]), (
            f"{what}load() returns {step}, but this rank does not have the {name} of"
            f" step {step}{half}"
        )
    return step, training


def check_unchanged(before, training, what):
    for name, part in training.state().items():
        assert is_same(part, before[name]), f"{what} changes the {name}"
