"""Checks resume.py: trainings that are killed in a save, and others that resume."""

import io
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # otherwise each rank does, for its optimizer, in seconds
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from exercises.checks import RANKS
from exercises.checks import killed
from exercises.checks import on_all_ranks

SOLVED = (
    "torch.distributed.checkpoint lets all ranks write their parts of one tensor, can"
    " load them on another number of ranks, and writes while the training runs on, with"
    " async_save. Which folder is the latest complete one is left to you there, too: it"
    " writes the file .metadata last, in torch/distributed/checkpoint/filesystem.py."
)
FOLDER = Path("checkpoints/run")
WIDTH = 80
EVERY = 2  # optimizer steps between two checkpoints
# The rank that is killed in a save, and in which of its operations on files. Each time
# it is a new training, which resumes from what the one before it has left.
KILLS = [(1, 1), *((0, number) for number in range(1, 6)), (1, 2)]
# Audit events of Python: operations that change a folder (os.replace is a rename).
CHANGES = {"os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir"}


# ---- the training --------------------------------------------------------------------
class Training:
    """A model that is trained on random inputs, others on each rank."""

    def __init__(self, seed, rank):
        torch.manual_seed(seed)
        self.model = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        self.parts = self.model, self.optimizer, self.scheduler
        torch.manual_seed(100 * seed + rank)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, WIDTH)).square().mean().backward()
            for weight in self.model.parameters():  # added up in the ranks' order
                parts = [torch.empty_like(weight.grad) for _ in range(RANKS)]
                dist.all_gather(parts, weight.grad)
                weight.grad = sum(parts)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def state(self):
        """Return {what: a copy of it} of everything that a step depends on."""
        averages = self.optimizer.state_dict()["state"]
        return {
            "weights": copies(self.model.state_dict()),
            "optimizer's state": {key: copies(each) for key, each in averages.items()},
            "learning rate": self.optimizer.param_groups[0]["lr"],
            "scheduler's state": copies(self.scheduler.state_dict()),
            "random numbers": torch.get_rng_state(),
        }

    def bytes(self):
        """Return the bytes of a checkpoint: weights, AdamW's two averages, random."""
        weights = sum(weight.nbytes for weight in self.model.parameters())
        return 3 * weights + RANKS * torch.get_rng_state().nbytes


def copies(tensors):
    return {
        key: each.clone() if torch.is_tensor(each) else each
        for key, each in tensors.items()
    }


def is_same(one, other):
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            is_same(each, other[key]) for key, each in one.items()
        )
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one, other)
    return one == other


def state_after(steps, rank):
    """Return the state of the training that is never interrupted."""
    return Training(0, rank).train(steps).state()


# ---- the kill ------------------------------------------------------------------------
def kill_in(number):
    """Have this process killed in the middle of its next, second, ... file operation.

    A torch.save has then written half of its bytes, another file is empty, and a rename
    has not happened yet.
    """
    left, real = number, torch.save

    def one_more(half):
        nonlocal left
        left -= 1
        if left == 0:
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    def save(state, file, *args, **kwargs):
        def half():
            buffer = io.BytesIO()
            real(state, buffer)
            content = buffer.getvalue()[: buffer.tell() // 2]
            if hasattr(file, "write"):
                file.write(content)
                file.flush()
            else:
                Path(file).write_bytes(content)

        if not isinstance(file, io.BytesIO):  # so a tensor is pickled to be sent
            one_more(half)
        return real(state, file, *args, **kwargs)

    def note(event, args):
        if event in CHANGES:
            one_more(lambda: None)
        elif event == "open" and isinstance(args[0], (str, os.PathLike)):
            path, _, flags = args
            ours = FOLDER.absolute() in Path(path).absolute().parents
            if ours and flags & os.O_TRUNC:
                one_more(lambda: Path(path).write_bytes(b""))

    torch.save = save
    sys.addaudithook(note)


# ---- the phases ----------------------------------------------------------------------
def begin(answer, rank):
    """Train from the start, and save some times."""
    training = Training(0, rank)
    before = training.state()
    step = answer.load(FOLDER, *training.parts)
    on_all_ranks(check_start, step, before, training, rank)
    for step in range(EVERY, 5 * EVERY + 1, EVERY):  # to 10, which has more digits
        before = training.train(EVERY).state()
        with mock.patch.object(torch, "save", wraps=torch.save) as save:
            answer.save(FOLDER, step, *training.parts)
        on_all_ranks(check_unchanged, before, training, rank)
        if step == EVERY:
            dist.barrier()
            on_all_ranks(check_bytes, save.call_args_list, training)
    note([step], "", rank)


def resume(answer, rank):
    """Resume from what the last phase has left; return the training and its step."""
    *lines, what = Path("note").read_text().split("\n")
    training = Training(7, rank)
    try:
        step = answer.load(FOLDER, *training.parts)
    except Exception as error:
        if not what:
            raise
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise AssertionError(
            f"{what}load() begins with half of a checkpoint, on rank {rank}:"
            f" {said.partition('. ')[0]}"
        ) from error
    check_step(step, [int(line) for line in lines], what)
    found = training.state()
    right = [None] * RANKS
    dist.all_gather_object(right, state_after(step, rank))
    on_all_ranks(check_state, found, right, step, what, rank)
    torch.set_rng_state(found["random numbers"])  # as load() has left them
    return training, step


def killed_in(victim, number):
    """Return a phase in which a rank is killed in an operation of its save."""

    @killed
    def phase(answer, rank):
        training, step = resume(answer, rank)
        training.train(EVERY)
        step += EVERY
        what = f"after rank {victim} was killed while it saved step {step}, "
        note([step - EVERY, step], what, rank)
        if rank == victim:
            kill_in(number)
        answer.save(FOLDER, step, *training.parts)
        note([step], "", rank)  # it has not so many operations

    phase.__name__ = f"killed-{victim}-{number}"
    return phase


PHASES = [begin, *(killed_in(*kill) for kill in KILLS), resume]


def note(steps, what, rank):
    """Leave to the next phase which checkpoints it may find, and what has happened."""
    dist.barrier()
    if rank == 0:
        Path("note").write_text("\n".join([*map(str, steps), what]))
    dist.barrier()


# ---- the parts of the check ----------------------------------------------------------
def check_start(step, before, training, rank):
    assert step == 0 and step is not None, (
        f"load() returns {step} where there is no checkpoint, not 0"
    )
    check_unchanged(before, training, rank, "load() without a checkpoint")


def check_unchanged(before, training, rank, what="save()"):
    after = training.state()
    for name, right in before.items():
        assert is_same(after[name], right), f"{what} changes the {name} on rank {rank}"


def check_bytes(calls, training):
    """Compare the files of the first checkpoint, and what all ranks have saved."""
    states = [state for state, *_ in (call.args for call in calls)]
    saved = sum(each.nbytes for each in tree_leaves(states) if torch.is_tensor(each))
    of_ranks = [None] * RANKS
    dist.all_gather_object(of_ranks, saved)
    files = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    saved, wanted = sum(of_ranks), training.bytes()
    found = max(files, saved)
    assert not 0.9 * wanted < saved < 1.5 * wanted <= files, (
        f"torch.save writes {saved:,} bytes, and then the folder has {files:,}:"
        " is a file copied? A copy can be cut off in the middle, a rename cannot"
    )
    assert found < 1.5 * wanted, (
        f"the ranks write {found:,} bytes for a checkpoint, and {wanted:,} are enough:"
        " what is the same on all ranks is written by one"
    )


def check_step(step, wanted, what):
    """Compare what load() returns on all ranks with the steps that may be right."""
    steps = [None] * RANKS
    dist.all_gather_object(steps, step)
    assert len({*steps}) == 1, (
        f"{what}load() returns {', '.join(map(str, steps))} on ranks 0, 1, 2: all have"
        " to load the same checkpoint"
    )
    by_name = step == 8 and wanted[0] > 9
    hint = "; does it sort names as text, where 8 comes after 10?" if by_name else ""
    assert step in wanted, (
        f"{what}load() returns {step}, but the latest complete checkpoint is of step"
        f" {wanted[0]}{hint}"
    )


def check_state(found, right, step, what, rank):
    for name, value in found.items():
        if is_same(value, right[rank][name]):
            continue
        owners = [other for other in range(RANKS) if is_same(value, right[other][name])]
        assert not owners, (
            f"{what}load() gives rank {rank} the {name} of rank {owners[0]}: each rank"
            " has its own"
        )
        half = ", so this is half of a checkpoint" if what else ""
        raise AssertionError(
            f"{what}load() returns {step}, but rank {rank} does not have the {name} of"
            f" step {step}{half}"
        )
