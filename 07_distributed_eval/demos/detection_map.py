"""Evaluate a detector on shards: match boxes on each rank, rank them all on rank 0.

torchrun --standalone --nproc-per-node=2 07_distributed_eval/demos/detection_map.py
"""

import torch
import torch.distributed as dist
from torchvision.ops import box_iou

IMAGES, CLASSES = 40, 3


def make_image(index):
    """Return made-up objects, and what a detector finds, with its scores.

    Both are boxes and classes. Image i has 1 + i % 4 objects; the detector finds a box
    near each of them, with a higher score on average, and as many wrong ones.
    """
    generator = torch.Generator().manual_seed(index)
    objects = 1 + index % 4
    corners = 100 * torch.rand(2 * objects, 2, generator=generator)
    squares = torch.cat([corners, corners + 30], 1)
    classes = torch.randint(CLASSES, (2 * objects,), generator=generator)
    scores = torch.rand(2 * objects, generator=generator)
    scores[:objects] += 0.3
    found = squares + 3 * torch.randn(2 * objects, 4, generator=generator)
    return (squares[:objects], classes[:objects]), (found, classes, scores)


def match(index):
    """Return this image's objects by class, and [class, score, hit] of each detection.

    The detections choose in the order of their scores. A hit is the first one that
    overlaps an object of its class with an intersection over union of at least 0.5.
    """
    (boxes, classes), (found, found_classes, scores) = make_image(index)
    overlap = box_iou(found, boxes)
    overlap[found_classes[:, None] != classes] = 0
    rows = []
    for detection in scores.argsort(descending=True).tolist():
        best, chosen = overlap[detection].max(0)
        hit = best >= 0.5
        if hit:
            overlap[:, chosen] = 0  # an object is hit once
        rows.append((found_classes[detection], scores[detection], hit))
    return classes.bincount(minlength=CLASSES), torch.tensor(rows)


def mean_average_precision(objects, detections):
    """Return the mean over the classes of the area below precision over recall."""
    areas = []
    for number in range(CLASSES):
        rows = detections[detections[:, 0] == number]
        hits = rows[rows[:, 1].argsort(descending=True), 2]
        precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
        precision = precision.flip(0).cummax(0).values.flip(0)  # the best from here on
        areas.append((precision * hits).sum() / objects[number])
    return torch.stack(areas).mean()


def combine(matches):
    """Return the objects by class, and the detections, of several images."""
    objects, detections = zip(*matches, strict=True)
    return torch.stack(objects).sum(0), torch.cat(detections)


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = combine(match(index) for index in range(rank, IMAGES, world_size))
    mean = mean_average_precision(*shard)
    dist.all_reduce(mean)
    mean /= world_size

    shards = [None] * world_size if rank == 0 else None
    dist.gather_object(shard, shards, dst=0)  # the shards differ in length
    if rank == 0:
        gathered = mean_average_precision(*combine(shards))
        alone = mean_average_precision(*combine(map(match, range(IMAGES))))
        assert torch.isclose(gathered, alone) and abs(mean - alone) > 1e-3
        print("detections of each rank:", [len(detections) for _, detections in shards])
        print(f"mAP of one process            {alone:.4f}")
        print(f"mAP of the gathered matches   {gathered:.4f}")
        print(f"mean of the ranks' mAPs       {mean:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
