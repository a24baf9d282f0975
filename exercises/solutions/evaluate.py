"""The exact loss and accuracy of a model, over the shards of all ranks."""

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def evaluate(model, batches):
    was_training = model.training
    model.eval()
    # Sums can be added up over ranks, and means cannot: a shard of five samples would
    # count as much as one of five thousand. float32 counts up to 16 million only.
    sums = torch.zeros(3, dtype=torch.float64)
    for inputs, targets in batches:
        outputs = model(inputs)
        # Tensors all along: .item() would have Python wait for the GPU in each batch.
        sums[0] += nn.functional.cross_entropy(outputs, targets, reduction="sum")
        sums[1] += (outputs.argmax(1) == targets).sum()
        sums[2] += len(targets)
    model.train(was_training)
    # After the loop, because the ranks have different numbers of batches. A rank
    # without any adds three zeros, and the others wait for it as well.
    dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    return loss / count, correct / count
