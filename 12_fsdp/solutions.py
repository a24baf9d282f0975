"""Solutions of the exercises in this folder's notebooks."""

import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard

# ---- exercise 1 ----------------------------------------------------------------------
# Weights, gradients and two running averages: 4 times 4 bytes a parameter, divided.
# The policy converts the weights to 2 bytes before they are gathered.
gb_with_8 = 2
gb_with_16 = 1
gb_gathered = 2


# ---- exercise 2 ----------------------------------------------------------------------
# A block is gathered forward and backward, the root once, for each micro-batch; the
# gradients of each of the 13 are averaged once, after the last micro-batch.
all_gathers = 4 * (2 * 12 + 1)
reduce_scatters = 12 + 1


# ---- exercise 3 ----------------------------------------------------------------------
# The policy gathers in bfloat16 and averages in float32, and the root needs it, too.
# SHARD_GRAD_OP keeps the weights of a block until its backward pass.
def shard(model):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)


# ---- mistakes exercise 1 -------------------------------------------------------------
# A rank's gradients are shards, and each rank clipped by the norm of its own. The norm
# of all is the root of the sum of their squares, over all ranks. clip_grad_norm_
# computes it, too.
bug = ".norm()\n"
repair = """.square().sum()
    dist.all_reduce(norm)
    norm = norm.sqrt()
"""


# ---- loading exercise 1 --------------------------------------------------------------
# Between 2**e and 2**(e + 1) the numbers are 2**(e - 7) apart. A sum is rounded up from
# half of that on, and 2**(e - 8) <= 1e-5 up to e = -9: for weights up to 2**-8. The
# error function is the share of a normal distribution in such a range.
share = math.erf(2**-8 / 0.02 / math.sqrt(2))
