"""Two replica groups under torchft: one dies and comes back, the other never restarts.

`make torchft` installs torchft in .venv-torchft, an environment that sees the torch in
.venv. The program starts torchft's lighthouse, which keeps track of who is alive, and a
torchrun for each group. Then it compares the groups' weights with those of one process.

$ .venv-torchft/bin/python other_libraries/torchft_train.py
group 0: step 7 is not taken, since group 1 died in it
group 1: back, and took step 16 with the averages of the others
group 0: trained on alone, in steps 7 to 16
group 0's weights against those of group 1: off by 0e+00
against one process that takes the same batches: off by 0e+00
against a run in which no group died: off by 3e-01
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torchft import DistributedDataParallel
from torchft import Manager
from torchft import Optimizer
from torchft import ProcessGroupGloo

STEPS, DIES_IN, COMES_BACK_AFTER = 30, 7, 15


def make_model_and_optimizer():
    torch.manual_seed(0)  # the same weights in all groups
    model = nn.Linear(64, 10).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch_loss(model, step, group):
    torch.manual_seed(1000 * step + group)  # stands for this group's batch in this step
    inputs, targets = torch.randn(16, 64).double(), torch.randint(10, (16,))
    return nn.functional.cross_entropy(model(inputs), targets)


def train(folder):
    """Train in the process of one group; write down who took part in which step."""
    group = int(os.environ["REPLICA_GROUP_ID"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model, optimizer = make_model_and_optimizer()

    def state_dict():  # a group that comes back gets it from one that is alive
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,  # fewer groups than this take no step
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        replica_id=f"group-{group}",
        init_sync=False,  # since all groups begin with the same weights
    )
    ft_model = DistributedDataParallel(manager, model)
    ft_optimizer = Optimizer(manager, optimizer)
    if attempt == 0:
        (folder / f"{group} is here").touch()
        wait_for(folder / f"{1 - group} is here")  # otherwise one could begin alone
    groups_in_step = {}
    while (done := manager.current_step()) < STEPS:  # not every pass takes a step
        if group == 0 and done == COMES_BACK_AFTER:
            wait_for(folder / "1 is back")  # these steps are so short
            time.sleep(1)
        ft_optimizer.zero_grad()  # asks the lighthouse which groups take part
        if group == 1 and attempt == 1:
            (folder / "1 is back").touch()
        loss = batch_loss(ft_model, done + 1, group)
        if group == 1 and attempt == 0 and done + 1 == DIES_IN:
            manager.wait_quorum()  # until the others count on this group
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()  # averages over the groups that take part
        ft_optimizer.step()  # takes no step if one of them has failed meanwhile
        step = manager.current_step()
        if group == 0 and step == done:
            say(f"group 0: step {step + 1} is not taken, since group 1 died in it")
        elif group == 1 and attempt == 1 and not groups_in_step:
            say(f"group 1: back, and took step {step} with the averages of the others")
        if step != done:
            groups_in_step[step] = manager.num_participants()
    torch.save(model.state_dict(), folder / f"group-{group}.pt")
    (folder / f"group-{group}.json").write_text(json.dumps(groups_in_step))
    manager.shutdown(wait=False)


def say(text):
    print(text, flush=True)


def wait_for(file):
    while not file.exists():
        time.sleep(0.1)


def replay(groups_in_step):
    """Take the same steps in this process, each with the batches that took part."""
    model, optimizer = make_model_and_optimizer()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        groups = groups_in_step[step]
        for group in range(groups):
            (batch_loss(model, step, group) / groups).backward()
        optimizer.step()
    return model.state_dict()


def max_abs_diff(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def main(folder):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    lighthouse = [Path(sys.executable).with_name("torchft_lighthouse")]
    lighthouse += ["--min_replicas=1", "--heartbeat_timeout_ms=2000"]
    lighthouse += [f"--bind=[::]:{port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=1", "--max-restarts=1", __file__, folder]
    with (folder / "log.txt").open("w") as log:
        alive = subprocess.Popen(lighthouse, stderr=log)
        groups = [
            subprocess.Popen(
                torchrun,
                stderr=log,
                env={
                    **os.environ,
                    "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}",
                    "REPLICA_GROUP_ID": str(group),
                },
            )
            for group in range(2)
        ]
        codes = [group.wait() for group in groups]
        alive.kill()
    if any(codes):
        sys.exit((folder / "log.txt").read_text())
    states = [torch.load(folder / f"group-{group}.pt") for group in range(2)]
    groups_in_step = json.loads((folder / "group-0.json").read_text())
    groups_in_step = {int(step): groups for step, groups in groups_in_step.items()}
    alone = [step for step, groups in groups_in_step.items() if groups == 1]
    assert alone == list(range(alone[0], alone[-1] + 1))
    say(f"group 0: trained on alone, in steps {alone[0]} to {alone[-1]}")
    all_alive = dict.fromkeys(range(1, STEPS + 1), 2)
    for what, other in (
        ("group 0's weights against those of group 1", states[1]),
        ("against one process that takes the same batches", replay(groups_in_step)),
        ("against a run in which no group died", replay(all_alive)),
    ):
        say(f"{what}: off by {max_abs_diff(states[0], other):.0e}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
