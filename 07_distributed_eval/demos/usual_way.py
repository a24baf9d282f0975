"""Evaluate on all processes as many scripts do. The result is not exact.

torchrun --standalone --nproc-per-node=2 07_distributed_eval/demos/usual_way.py FILE
"""

import sys

import digits_model
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
val_set, model = digits_model.load(sys.argv[1])
sampler = DistributedSampler(val_set, shuffle=False)
loader = DataLoader(
    val_set, batch_size=48, sampler=sampler, collate_fn=digits_model.collate
)

accuracies = []
for images, targets in loader:
    correct = model(images).argmax(1) == targets
    accuracies.append(100 * correct.double().mean())
accuracy = torch.stack(accuracies).mean()  # the average over this rank's batches
dist.all_reduce(accuracy)
accuracy /= dist.get_world_size()  # the average over the ranks
images = torch.tensor(len(sampler))
dist.all_reduce(images)
if dist.get_rank() == 0:
    print(f"{images} images, acc@1 {accuracy:.3f}")
dist.destroy_process_group()
