"""Gather outputs of different lengths, and stop all ranks in the same epoch.

torchrun --standalone --nproc-per-node=3 07_distributed_eval/demos/gather_and_stop.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

# 1. Outputs of different lengths: image i has i % 4 boxes of four numbers.
found = {i: torch.full((i % 4, 4), float(i)) for i in range(rank, 10, world_size)}
everything = [None] * world_size if rank == 0 else None
dist.gather_object(found, everything, dst=0)
if rank == 0:
    boxes = {i: box for part in everything for i, box in part.items()}
    print("number of boxes of images 0 to 9:", [len(boxes[i]) for i in range(10)])

# 2. Early stopping: is the loss of the validation set above the best so far?
best = 0.42
loss_sum, images = [(30.0, 100), (50.0, 100), (39.6, 99)][rank]
sums = torch.tensor([loss_sum, images], dtype=torch.float64)
own = (sums[0] / sums[1]).item() > best
dist.all_reduce(sums)
shared = (sums[0] / sums[1]).item() > best

# 3. A decision that only rank 0 can take: by its clock, the run has had its time.
stop = torch.tensor([rank == 0])
dist.broadcast(stop, src=0)

decisions = [None] * world_size
dist.all_gather_object(decisions, (own, shared, stop.item()))
if rank == 0:
    for name, answers in zip(
        ("by its shard's loss", "by the whole set's loss", "told by rank 0's clock"),
        zip(*decisions, strict=True),
        strict=True,
    ):
        print(f"stop, {name}: {list(answers)}")
dist.destroy_process_group()
