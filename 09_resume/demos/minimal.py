"""A training that resumes from its latest checkpoint, and nothing else.

torchrun --standalone --nproc-per-node=2 09_resume/demos/minimal.py CHECKPOINT
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path, step, model, optimizer):
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
    }
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)  # otherwise a kill while it writes destroys the last one


def load(path, model, optimizer):
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main(path):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp_model = DistributedDataParallel(model)
    # every rank loads; a first start has nothing to load
    done = load(path, model, optimizer) if path.exists() else 0
    if dist.get_rank() == 0:
        print(f"resumed from step {done}" if done else "starts at step 1", flush=True)
    for step in range(done + 1, 61):
        torch.manual_seed(1000 * step + dist.get_rank())  # stands for this step's batch
        inputs, targets = torch.randn(16, 64), torch.randint(10, (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp_model(inputs), targets).backward()
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:  # all ranks have the same state
            save(path, step, model, optimizer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    gc.collect()
    dist.destroy_process_group()
