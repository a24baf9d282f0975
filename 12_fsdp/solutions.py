"""Solutions of the exercises in 12_fsdp.ipynb."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard

# ---- exercise 1 ----------------------------------------------------------------------
# Weights, gradients and two running averages: 4 times 4 bytes a parameter, divided.
gb_with_8 = 2
gb_with_16 = 1
# The policy converts the weights to 2 bytes before they are gathered.
gb_gathered = 2


# ---- exercise 2 ----------------------------------------------------------------------
# A block is gathered forward and backward, the root once, for each micro-batch; the
# gradients of each of the 13 are averaged once, after the last micro-batch.
all_gathers = 4 * (2 * 12 + 1)
reduce_scatters = 12 + 1


# ---- exercise 3 ----------------------------------------------------------------------
def shard(model):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # SHARD_GRAD_OP keeps weights until the backward pass
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
