"""Solutions of the exercises in this folder's notebooks."""

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel

# ---- exercise 1 ----------------------------------------------------------------------
# The tp group are neighbors, and the dp group is every fourth rank. There are four tp
# groups, which share the batch.
same_samples = {4, 5, 6, 7}
exchange_weights = {1, 5, 9, 13}
samples = 64 // 4


# ---- exercise 2 ----------------------------------------------------------------------
# A layer that gets the same input on all ranks is split by columns. One that gets what
# is split adds up its parts: one all-reduce for the attention, and one for the MLP.
def plan_for_llama():
    first = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plan = {name: ColwiseParallel() for name in first}
    return plan | {name: RowwiseParallel() for name in ("o_proj", "down_proj")}


# ---- exercise 3 ----------------------------------------------------------------------
# The first dimension of the mesh copies, the last one shards: neighboring ranks, which
# are in one machine.
def shard(model):
    per_machine = 8
    shape = (dist.get_world_size() // per_machine, per_machine)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    fully_shard(model, mesh=mesh)


# ---- pipeline exercise 1 -------------------------------------------------------------
# 7 / (m + 7) is at most 1 / 10 if m + 7 is at least 70.
pipeline_micro_batches = 63


# ---- pipeline exercise 2 -------------------------------------------------------------
# GPipe does all forward passes first. 1F1B begins with as many as there are processes
# from this one to the end, and then frees one before it takes the next.
def pipeline_in_flight(schedule, processes, micro_batches, rank):
    if schedule == "gpipe":
        return micro_batches
    return processes - rank


# ---- mistakes exercise 1 -------------------------------------------------------------
# All ranks are one tp group, which works on the same samples: there is nothing for a
# sampler to deal out. It deals out among dp groups.
bug = "batch_size=12 // world_size, sampler=sampler"
repair = "batch_size=12"
