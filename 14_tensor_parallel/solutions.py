"""Solutions of the exercises in this folder's notebooks."""

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel

# ---- exercise 1 ----------------------------------------------------------------------
same_samples = {4, 5, 6, 7}  # the tp group: neighbors
exchange_weights = {1, 5, 9, 13}  # the dp group: every fourth rank
samples = 64 // 4  # there are four tp groups


# ---- exercise 2 ----------------------------------------------------------------------
def plan_for_llama():
    first = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plan = {name: ColwiseParallel() for name in first}
    return plan | {name: RowwiseParallel() for name in ("o_proj", "down_proj")}


# ---- exercise 3 ----------------------------------------------------------------------
def shard(model):
    """Shard over the ranks of a machine, and copy across machines."""
    per_machine = 8
    shape = (dist.get_world_size() // per_machine, per_machine)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    fully_shard(model, mesh=mesh)


# ---- pipeline_parallel.ipynb, exercise 1 ---------------------------------------------
# 7 / (m + 7) is at most 1 / 10 if m + 7 is at least 70.
pipeline_micro_batches = 63


# ---- pipeline_parallel.ipynb, exercise 2 ---------------------------------------------
def pipeline_in_flight(schedule, processes, micro_batches, rank):
    if schedule == "gpipe":
        return micro_batches
    # A process begins with as many forward passes as there are processes from it to the
    # end. Then one more backward pass is done before each forward pass.
    return processes - rank
