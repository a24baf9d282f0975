"""Save a model that is under DDP with torch.distributed.checkpoint: whose statistics?

torchrun --standalone --nproc-per-node=2 \
13_sharded_checkpoints/demos/dcp_replicas.py FOLDER
"""

import copy
import gc
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.nn.parallel import DistributedDataParallel


def main(folder):
    dist.init_process_group("gloo")
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    model = nn.Sequential(*layers)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())  # each rank has its own batch
    wrapped(torch.randn(16, 8)).sum().backward()
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, copy.deepcopy(model.state_dict()))
    from_rank_0 = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    for planner, name in ((None, "default"), (from_rank_0, "lowest_rank")):
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id=f"{folder}/{name}", planner=planner)
        loaded = {"model": copy.deepcopy(model.state_dict())}
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
        for key in ("1.running_mean", "3.running_mean"):
            (owner,) = [
                rank
                for rank, of_rank in enumerate(ranks)
                if loaded["model"][key].equal(of_rank[key])
            ]
            if dist.get_rank() == 0:
                print(f"{name:11} {key} is that of rank {owner}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
    gc.collect()
    dist.destroy_process_group()
