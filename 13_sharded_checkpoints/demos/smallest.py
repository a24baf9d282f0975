"""Take three steps from where the last start stopped, and save all of it in shards.

torchrun --standalone --nproc-per-node=2 13_sharded_checkpoints/demos/smallest.py FOLDER
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class AppState(Stateful):  # dcp.save and dcp.load call its two methods
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, loaded):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        self.step = loaded["step"]


def main(folder):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # the same weights and points on all ranks
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 1)).double()
    points = torch.randn(100, 2, dtype=torch.float64)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = AppState(model, optimizer)
    latest = max(folder.glob("step-*"), default=None)
    if latest is not None:
        dcp.load({"app": state}, checkpoint_id=latest)
    for _ in range(3):
        loss = (model(points)[:, 0] - points.norm(dim=1)).square().mean()
        if dist.get_rank() == 0:
            print(f"after {state.step} steps: loss {loss.item():.12f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.step += 1
    path = folder / f"step-{state.step:09}"
    unfinished = path.with_name(f".{path.name}.tmp")
    dcp.save({"app": state}, checkpoint_id=unfinished)  # returns when all have written
    if dist.get_rank() == 0:
        unfinished.rename(path)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    gc.collect()
    dist.destroy_process_group()
