"""Checks resume.py: what a kill at each moment of a save leaves is loaded."""

import copy
import os
import shutil
import sys
from pathlib import Path

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
    assert step == 0, f"load() returns {step} where there is no checkpoint, not 0"
    check_unchanged(states[0], training, "load() without a checkpoint")
    moments = Moments(folder, rank)
    start_again(answer)  # it may have imported torch.save
    for step in range(EVERY, LAST + 1, EVERY):
        states[step] = training.train(EVERY).state()
        with moments.of(step):
            answer.save(folder, step, *training.parts)
        check_unchanged(states[step], training, "save()")
        dist.barrier()
    load(answer, rank, folder, [LAST], states)
    states[LAST + EVERY] = training.train(EVERY).state()
    copies = [None] * dist.get_world_size()
    dist.all_gather_object(copies, moments.copies)
    for step, left in sum(copies, []):
        if rank == 0:  # under the old name: a file in it may contain its path
            shutil.rmtree(folder)
            left.rename(folder)
        dist.barrier()
        start_again(answer)
        what = f"after a kill while step {step} was saved, "
        steps = [step - EVERY, step]
        step, training = load(answer, rank, folder, steps, states, what)
        # The training goes on, and saves over what the kill has left.
        training.train(EVERY)
        try:
            with moments.of(step + EVERY):
                answer.save(folder, step + EVERY, *training.parts)
        except Exception as error:
            error.add_note(f"This was {what}and the training then went on.")
            raise
        dist.barrier()
        what += f"and step {step + EVERY} then, "
        load(answer, rank, folder, [step + EVERY], states, what)


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

    The others have begun when rank 0 does the first of these operations. At those of
    another rank, rank 0 has gone as far as it can without that rank. So it has given a
    folder its name, for instance, if it does not wait for it.
    """

    def __init__(self, folder, rank):
        super().__init__()
        self.folder, self.rank, self.copies = folder.absolute(), rank, []
        self.step, self.saves = None, 0  # the one that is saved now; how many were
        sys.addaudithook(self.hear)
        torch.save = self.half_of(torch.save)

    def of(self, step):
        self.step = step
        self.saves += 1
        self.events.clear()
        return self

    def __exit__(self, *error):
        self.tell(len(self.calls) + 1)
        self.step = None
        return super().__exit__(*error)

    def note(self, operation, args, result):
        super().note(operation, args, result)
        self.tell(len(self.calls))

    def tell(self, calls):
        """Say how many collectives rank 0 has begun, or that another has begun."""
        what = self.rank or f"calls-{calls}"
        _get_default_store().set(f"{self.saves}/{what}", "")

    def wait_for_others(self):
        keys = [f"{self.saves}/{rank}" for rank in range(1, dist.get_world_size())]
        if self.rank:
            self.tell(None)
            keys = [f"{self.saves}/calls-{len(self.calls) + 1}"]
        _get_default_store().wait(keys)

    def kill(self, path=None, half=False):
        """Copy the folder; there the file at `path` is empty, or has half its bytes."""
        number = path.stat().st_ino if path and path.exists() else None
        self.wait_for_others()
        left = Path(f"{self.folder}-{self.step}-{self.rank}-{len(self.copies)}")
        step, self.step = self.step, None  # hear() is not to hear what is done here
        try:
            shutil.copytree(self.folder, left, symlinks=True)
            if path:  # which may have another name by now, or is not there yet
                files = [*self.folder.rglob("*")]
                same = [each for each in files if each.lstat().st_ino == number]
                for each in same or [path]:
                    with (left / each.relative_to(self.folder)).open("ab") as file:
                        file.truncate(file.tell() // 2 if half else 0)
            self.copies.append((step, left))
        except OSError:  # it is not there yet, or another rank has changed it meanwhile
            shutil.rmtree(left, ignore_errors=True)
        self.step = step

    def kill_in(self, path, half=False):
        if self.step and self.folder in path.parents:
            self.kill(path, half)

    def half_of(self, save):
        def saved(obj, f, *args, **kwargs):
            save(obj, f, *args, **kwargs)
            if isinstance(f, str | os.PathLike):  # of others, hear() has heard
                self.kill_in(Path(f).absolute(), half=True)

        return saved

    def hear(self, event, args):
        if self.step and event in CHANGES:
            self.kill()
        elif event == "open" and isinstance(args[0], str | os.PathLike):
            path, flags = Path(args[0]).absolute(), args[2]
            if flags & os.O_TRUNC or flags & os.O_CREAT and not path.exists():
                self.kill_in(path)


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
            f"{what}load() fails: {said.partition('. ')[0]}"
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


def start_again(answer):
    """Execute the answer as a new process does: it forgets its global variables."""
    answer.__spec__.loader.exec_module(answer)


def check_unchanged(before, training, what):
    for name, part in training.state().items():
        assert is_same(part, before[name]), f"{what} changes the {name}"
