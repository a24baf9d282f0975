"""Evaluate on all processes, a shard on each. The metrics are those of one process.

torchrun --standalone --nproc-per-node=2 \
07_distributed_eval/demos/exact_evaluation.py FILE
"""

import sys

import digits_model
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Subset


# ---- the lines to copy ---------------------------------------------------------------
def shard_of(dataset):
    """Return every n-th sample on n ranks: each sample is on exactly one of them."""
    return Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))


@torch.no_grad()
def evaluate(model, loader, device):
    """Return mean loss, accuracy and number of samples over the shards of all ranks.

    model: without DDP's wrapper; loader: of this rank's shard.
    """
    for buffer in model.buffers():  # batch norm's statistics differ between the ranks
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        outputs = model(inputs)
        sums[0] += nn.functional.cross_entropy(outputs, targets, reduction="sum")
        sums[1] += (outputs.argmax(1) == targets).sum()
        sums[2] += len(targets)
    dist.all_reduce(sums)  # once, after the last batch
    loss, correct, count = sums.tolist()
    return loss / count, correct / count, int(count)


# ---- the run -------------------------------------------------------------------------
def main(path):
    val_set, model = digits_model.load(path)
    loader = DataLoader(shard_of(val_set), 48, collate_fn=digits_model.collate)
    loss, accuracy, count = evaluate(model, loader, torch.device("cpu"))
    logits, targets = digits_model.predict_all(path)
    assert count == len(targets)
    assert accuracy == (logits.argmax(1) == targets).double().mean()
    assert abs(loss - nn.functional.cross_entropy(logits, targets)) < 1e-6
    if dist.get_rank() == 0:
        print(f"{count} images, acc@1 {100 * accuracy:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
