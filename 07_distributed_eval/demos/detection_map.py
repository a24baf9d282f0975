"""Evaluate a detector on shards: match boxes on each rank, and rank them all together.

torchrun --standalone --nproc-per-node=2 07_distributed_eval/demos/detection_map.py
"""

import torch
import torch.distributed as dist
from torchvision.ops import box_iou

IMAGES, CLASSES = 40, 3


def make_image(index):
    """Return made-up objects, and what a detector finds, with its scores.

    Both are boxes and classes. Image i has i % 4 objects; the detector finds a box
    near each of them, with a higher score on average, and two wrong ones.
    """
    generator = torch.Generator().manual_seed(index)
    objects = index % 4
    corners = 100 * torch.rand(objects + 2, 2, generator=generator)
    squares = torch.cat([corners, corners + 30], 1)
    classes = torch.randint(CLASSES, (objects + 2,), generator=generator)
    scores = torch.rand(objects + 2, generator=generator)
    scores[:objects] += 0.3
    found = squares + 3 * torch.randn(objects + 2, 4, generator=generator)
    return (squares[:objects], classes[:objects]), (found, classes, scores)


def match(index):
    """Return this image's objects by class, and [class, score, hit] of each detection.

    The detections choose in the order of their scores. A hit is the first one that
    overlaps an object of its class with an intersection over union of at least 0.5.
    """
    (boxes, classes), (found, found_classes, scores) = make_image(index)
    overlap = box_iou(found, boxes)
    overlap[found_classes[:, None] != classes] = 0
    hits = torch.zeros(len(found))
    order = scores.argsort(descending=True).tolist()
    for detection in order if len(boxes) else []:  # without objects, nothing is hit
        best, chosen = overlap[detection].max(0)
        if best >= 0.5:
            hits[detection] = 1
            overlap[:, chosen] = 0  # an object is hit once
    rows = torch.stack([found_classes, scores, hits], 1)
    return classes.bincount(minlength=CLASSES), rows


def mean_average_precision(objects, detections):
    """Return the mean over the classes of the area below precision over recall.

    A class without objects has none.
    """
    areas = []
    for number in objects.nonzero().flatten():
        rows = detections[detections[:, 0] == number]
        hits = rows[rows[:, 1].argsort(descending=True), 2]
        precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
        precision = precision.flip(0).cummax(0).values.flip(0)  # the best from here on
        areas.append((precision * hits).sum() / objects[number])
    return torch.stack(areas).mean()


# ---- the lines to copy ---------------------------------------------------------------
def combine(matches):
    """Return the objects by class, and the detections, of several images or shards."""
    objects, detections = zip(*matches, strict=True)
    return torch.stack(objects).sum(0), torch.cat(detections)


def gather_matches(shard):
    """Return the same of all ranks' shards, which differ in length, on all ranks."""
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, shard)
    return combine(shards)


# ---- the run -------------------------------------------------------------------------


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = combine(match(index) for index in range(rank, IMAGES, world_size))
    mean = mean_average_precision(*shard)
    dist.all_reduce(mean)
    mean /= world_size

    gathered = mean_average_precision(*gather_matches(shard))
    if rank == 0:
        alone = mean_average_precision(*combine(map(match, range(IMAGES))))
        assert torch.isclose(gathered, alone) and abs(mean - alone) > 1e-3
        print(f"mAP of one process            {alone:.4f}")
        print(f"mAP of the gathered matches   {gathered:.4f}")
        print(f"mean of the ranks' mAPs       {mean:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
