"""A training run in one process, resumed from checkpoints that lack something.

python 09_resume/demos/forgetful.py

30 steps an epoch on the digits: a network with dropout, SGD with momentum, and a
learning rate that warms up. It is interrupted after step 80 of 200.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data
from common.lr_schedule import warmup_cosine

TRAIN, VAL = ((images.flatten(1) / 255, labels) for images, labels in data.digits())
EPOCH, STEPS, INTERRUPTED = 30, 200, 80
CASES = ("nothing", "scheduler", "momentum", "position", "random state")


class Run:
    def __init__(self):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 10)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = warmup_cosine(self.optimizer, STEPS)
        self.step = 0  # how many steps have been taken

    def train_until(self, last):
        images, labels = TRAIN
        while self.step < last:
            epoch, place = divmod(self.step, EPOCH)
            order = torch.randperm(1440, generator=torch.Generator().manual_seed(epoch))
            batch = order[48 * place : 48 * place + 48]
            output = self.model(images[batch])  # dropout asks torch for random numbers
            loss = nn.functional.cross_entropy(output, labels[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def val_loss(self):
        images, labels = VAL
        with torch.no_grad():
            output = self.model.eval()(images)
        return nn.functional.cross_entropy(output, labels).item()


def resumed(run, forgets):
    """Return a new run in the state of another one, which lacks one of CASES."""
    random_state = torch.get_rng_state()
    new = Run()  # which seeds torch
    new.model.load_state_dict(run.model.state_dict())
    optimizer = run.optimizer.state_dict()
    if forgets == "momentum":
        optimizer["state"] = {}
    new.optimizer.load_state_dict(optimizer)
    if forgets != "scheduler":
        new.scheduler.load_state_dict(run.scheduler.state_dict())
    new.step = run.step
    if forgets == "position":
        new.step -= run.step % EPOCH  # the epoch begins again
    if forgets != "random state":
        torch.set_rng_state(random_state)
    return new


def main():
    whole = Run()
    whole.train_until(STEPS)
    weights = whole.weights()
    print(f"{'not interrupted':45} val loss {whole.val_loss():.3f}")
    for forgets in CASES:
        run = Run()
        run.train_until(INTERRUPTED)
        run = resumed(run, forgets)
        run.train_until(STEPS)
        off = (run.weights() - weights).abs().max()
        print(f"forgets {forgets:13} a weight is off by {off:.3f}", end="  ")
        print(f"val loss {run.val_loss():.3f}")
        assert (off == 0) == (forgets == "nothing")


if __name__ == "__main__":
    main()
