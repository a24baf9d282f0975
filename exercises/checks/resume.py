"""Checks resume.py: trainings that are killed in a save, and others that resume."""

import io
import os
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo  # otherwise each rank does, for its optimizer, in seconds
import torch.distributed as dist
from torch import nn

RANKS = 3
FOLDER = Path("checkpoints/run")
WIDTH = 80
EVERY = 2  # optimizer steps between two checkpoints
# The rank that is killed in a save, and in which of its operations on files. Each time
# it is a new training, which resumes from what the one before it has left.
KILLS = [(2, 1), *((0, number) for number in range(1, 9)), (1, 2)]
# Audit events of Python: operations that change a folder (os.replace is a rename).
CHANGES = {"os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir"}


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
                parts = [torch.empty_like(weight.grad) for _ in range(RANKS)]
                dist.all_gather(parts, weight.grad)
                weight.grad = sum(parts)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def state(self):
        """Return {what: it as bytes} of everything that a step depends on."""
        parts = {
            "weights or buffers": self.model.state_dict(),
            "optimizer's state": self.optimizer.state_dict(),
            "scheduler's state": self.scheduler.state_dict(),
            "random numbers": torch.get_rng_state(),
        }
        return {name: as_bytes(part) for name, part in parts.items()}


def as_bytes(part):
    """Return a state as bytes: equal for states that are equal to the last bit."""
    if torch.is_tensor(part):
        return f"{part.dtype}{[*part.shape]}".encode() + part.numpy().tobytes()
    if isinstance(part, dict):
        keys = sorted(part, key=str)
        return b"".join(str(key).encode() + as_bytes(part[key]) for key in keys)
    if isinstance(part, list | tuple):
        return b"".join(map(as_bytes, part))
    return str(part).encode()


# ---- the kill ------------------------------------------------------------------------
def kill_in(number):
    """Have this process killed in the middle of its next, second, ... file operation.

    A torch.save has then left half of its bytes, another file is empty, and a rename
    has not happened yet.
    """
    left, real = number, torch.save

    def one_more(leave_half):
        nonlocal left
        left -= 1
        if left == 0:
            leave_half()
            os.kill(os.getpid(), signal.SIGKILL)

    def save(state, file, *args, **kwargs):
        real(state, file, *args, **kwargs)
        if not isinstance(file, io.BytesIO):  # so a tensor is pickled to be sent
            path = Path(file.name if hasattr(file, "write") else file)
            one_more(lambda: os.truncate(path, path.stat().st_size // 2))

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
    assert step == 0 and step is not None, (
        f"load() returns {step} where there is no checkpoint, not 0"
    )
    check_unchanged(before, training, "load() without a checkpoint")
    for step in range(EVERY, 5 * EVERY + 1, EVERY):  # to 10, which has more digits
        before = training.train(EVERY).state()
        answer.save(FOLDER, step, *training.parts)
        check_unchanged(before, training, "save()")
        dist.barrier()
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
            f"{what}load() begins with half of a checkpoint: {said.partition('. ')[0]}"
        ) from error
    check_step(step, [int(line) for line in lines], what)
    check_state(training, step, what, rank)
    return training, step


def killed_in(victim, number):
    """Return a phase in which a rank is killed in an operation of its save."""

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

    return phase


PHASES = [begin, *(killed_in(*kill) for kill in KILLS), resume]


def note(steps, what, rank):
    """Leave to the next phase which checkpoints it may find, and what has happened."""
    dist.barrier()
    if rank == 0:
        Path("note").write_text("\n".join([*map(str, steps), what]))
    dist.barrier()


# ---- the parts of the check ----------------------------------------------------------
def check_unchanged(before, training, what):
    for name, part in training.state().items():
        assert part == before[name], f"{what} changes the {name}"


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


def check_state(training, step, what, rank):
    """Compare what load() has loaded with the training that is never interrupted."""
    found, random = training.state(), torch.get_rng_state()
    right = Training(0, rank).train(step).state()
    half = ", so this is half of a checkpoint" if what else ""
    for name, part in found.items():
        assert part == right[name], (
            f"{what}load() returns {step}, but this rank does not have the {name} of"
            f" step {step}{half}"
        )
    torch.set_rng_state(random)  # as load() has left them
