"""Two ranks that make the same two calls, in different orders.

torchrun --standalone --nproc-per-node=2 03_ddp_launch/demos/predict.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
a = torch.tensor(1.0 + rank)  # 1 on rank 0, 2 on rank 1
b = torch.tensor(10.0 + 10 * rank)  # 10 on rank 0, 20 on rank 1

first, second = (a, b) if rank == 0 else (b, a)
dist.all_reduce(first)
dist.all_reduce(second)

print(f"rank {rank}: a = {a:.0f}, b = {b:.0f}\n", end="", flush=True)
dist.destroy_process_group()
