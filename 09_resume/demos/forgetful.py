"""A training run in one process, resumed from checkpoints that lack something.

30 steps an epoch on the digits: a network with dropout, SGD with momentum, and a
learning rate that warms up.
"""

import copy
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data
from common.lr_schedule import warmup_cosine

(IMAGES, LABELS), _ = data.digits()
IMAGES = IMAGES.flatten(1) / 255
EPOCH, STEPS, INTERRUPTED = 30, 200, 80
CASES = ("scheduler", "momentum", "position", "random state", "nothing")


class Run:
    def __init__(self):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 10)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = warmup_cosine(self.optimizer, STEPS)
        self.step = 0  # how many steps have been taken

    def take_step(self):
        epoch, place = divmod(self.step, EPOCH)
        order = torch.randperm(1440, generator=torch.Generator().manual_seed(epoch))
        batch = order[48 * place : 48 * place + 48]
        output = self.model(IMAGES[batch])  # dropout asks torch for random numbers
        loss = nn.functional.cross_entropy(output, LABELS[batch])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def resume(state, forgets):
    """Return a new run in a state that lacks one of CASES."""
    model, optimizer, scheduler, step, random_state = state
    run = Run()
    run.model.load_state_dict(model)
    if forgets == "momentum":
        optimizer = {**optimizer, "state": {}}
    run.optimizer.load_state_dict(optimizer)
    if forgets != "scheduler":
        run.scheduler.load_state_dict(scheduler)
    run.step = step
    if forgets == "position":
        run.step -= step % EPOCH  # the epoch begins again
    if forgets != "random state":
        torch.set_rng_state(random_state)
    return run


def train(forgets=None):
    """Return two lists: the learning rate in each step, and the weights after it.

    With one of CASES, the run is interrupted after step 80 and resumed.
    """
    run, rates, weights = Run(), [None] * STEPS, [None] * STEPS
    interrupted = INTERRUPTED if forgets else None
    while run.step < STEPS:
        if run.step == interrupted:
            interrupted = None
            parts = [run.model, run.optimizer, run.scheduler]
            state = copy.deepcopy([part.state_dict() for part in parts])
            run = resume([*state, run.step, torch.get_rng_state()], forgets)
        rates[run.step] = run.optimizer.param_groups[0]["lr"]
        run.take_step()
        weights[run.step - 1] = run.weights()
    return rates, weights
