"""A detector's loss is divided by its number of objects: how, over all ranks?

Detectors such as SSD and FCOS divide the parts of their loss by max(1, n), where n is
the number of positives (matched anchors) in the batch. It differs from rank to rank,
and DDP averages the ranks as equals. All-reduce n, and clamp afterwards: clamped first,
a rank without objects counts as one. The loss of a torchvision detector is divided by
the time it leaves `forward`, and a factor corrects it: max(1, n of the rank) times the
number of ranks, because DDP divides by that, over max(1, n of all ranks). A part that
is a mean over the images stays as it is, and so does the loss of torchvision's
RetinaNet, which divides that of each image by the image's own positives.

$ torchrun --standalone --nproc-per-node=2 recipes/detection_loss.py
divided by the positives of all ranks: equal to one process: True
clamped before they are added up: equal to one process: False
divided by each rank's own positives: equal to one process: False
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD


# ---- the lines to copy ---------------------------------------------------------------
def over_all_ranks(losses, positives):
    """Return parts of a loss such that DDP's average divides by all ranks' positives.

    losses: {name: part}, each divided by max(1, positives); positives: their number on
    this rank, a tensor. All ranks call it, so it is for the training only.
    """
    everywhere = positives.clone()
    dist.all_reduce(everywhere)
    factor = positives.clamp(min=1) * dist.get_world_size() / everywhere.clamp(min=1)
    return {name: factor * part for name, part in losses.items()}


class DistributedSSD(SSD):
    def compute_loss(self, targets, head_outputs, anchors, matched_idxs):
        losses = super().compute_loss(targets, head_outputs, anchors, matched_idxs)
        return over_all_ranks(losses, torch.cat(matched_idxs).ge(0).sum())


# ---- the proof -----------------------------------------------------------------------
GLOBAL_BATCH, SIZE = 12, 32
OBJECTS = [12, 1, 0]  # of so many images of each global batch, the others have none


class ClampedFirst(SSD):
    def compute_loss(self, targets, head_outputs, anchors, matched_idxs):
        losses = super().compute_loss(targets, head_outputs, anchors, matched_idxs)
        positives = torch.cat(matched_idxs).ge(0).sum().clamp(min=1)
        return over_all_ranks(losses, positives)


def make_batch(number):
    """Return the images and targets of a global batch."""
    generator = torch.Generator().manual_seed(number)
    images = torch.rand(GLOBAL_BATCH, 3, SIZE, SIZE, generator=generator)
    targets = []
    for image in range(GLOBAL_BATCH):
        objects = (1 + image % 3) * (image < OBJECTS[number])
        corners = 16 * torch.rand(objects, 2, generator=generator)
        boxes = torch.cat([corners, corners + 12], 1)
        labels = torch.ones(objects, dtype=torch.int64)
        targets.append({"boxes": boxes, "labels": labels})
    return list(images), targets


def train(make, wrap, rank, world_size, device):
    """Train on this rank's part of each global batch; return the weights."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.GroupNorm(1, 8), nn.ReLU()
    backbone = nn.Sequential(*layers)
    backbone.out_channels = [8]
    boxes = DefaultBoxGenerator([[2]], scales=[0.3, 0.6])
    mean = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    model = make(backbone, boxes, (SIZE, SIZE), 2, **mean).to(device)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(len(OBJECTS)):
        images, targets = make_batch(number)
        images = [image.to(device) for image in images[rank::world_size]]
        for target in targets:
            target.update({name: value.to(device) for name, value in target.items()})
        optimizer.zero_grad()
        sum(wrapped(images, targets[rank::world_size]).values()).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = train(SSD, lambda model: model, 0, 1, device)
    for name, make in {
        "divided by the positives of all ranks": DistributedSSD,
        "clamped before they are added up": ClampedFirst,
        "divided by each rank's own positives": SSD,
    }.items():
        weights = train(make, DistributedDataParallel, rank, world_size, device)
        equal = (weights - expected).abs().max().item() < 1e-10
        assert equal == (make is DistributedSSD or world_size == 1)
        if rank == 0:
            print(f"{name}: equal to one process: {equal}", flush=True)


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a DDP model still alive can abort the process at exit
    dist.destroy_process_group()
