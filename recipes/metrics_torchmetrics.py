"""F1, AUROC and average precision with DDP: why do they change with the number of GPUs?

The mean of the ranks' values is not the value over all samples, and DistributedSampler
counts some samples twice, so that all ranks have equally many. Give each rank a shard
without padding, and let torchmetrics combine the ranks' states in compute(), which is
collective: all ranks call it. F1 keeps a few counts, but AUROC and average precision
(over classes, not detection's) keep every score and label, and every rank gathers all
of them, unless `thresholds` bounds this memory and makes the values approximate. Pass
probabilities: for other scores torchmetrics decides anew in each `update`, by the
values of that batch, whether to apply a sigmoid, and then the order is wrong.

$ torchrun --standalone --nproc-per-node=2 recipes/metrics_torchmetrics.py
shards: F1 0.5454, AUROC 0.7409, average precision 0.6242
mean of the ranks: F1 0.5369, AUROC 0.8043, average precision 0.7352
padded: F1 0.5613, AUROC 0.7569, average precision 0.6536
shards' values equal those of one process and of scikit-learn: True
state of rank 0's 49 samples: F1 96 bytes, AUROC 1568, average precision 1568
"""

import os

import torch
import torch.distributed as dist
from sklearn.metrics import average_precision_score
from sklearn.metrics import f1_score
from sklearn.metrics import roc_auc_score
from torch.utils.data import DistributedSampler
from torchmetrics.classification import MulticlassAUROC
from torchmetrics.classification import MulticlassAveragePrecision
from torchmetrics.classification import MulticlassF1Score


# ---- the lines to copy ---------------------------------------------------------------
def update_and_compute(metric, batches, device):
    metric.to(device)  # its state is what nccl sends
    for probabilities, labels in batches:  # of this rank's shard, without padding
        metric.update(probabilities.to(device), labels.to(device))
    return metric.compute()  # combines the states of all ranks, which all call it


# ---- the proof -----------------------------------------------------------------------
SAMPLES, CLASSES, BATCH = 97, 3, 16


def make_outputs():
    """Return the labels of all samples, and a model's probabilities of each class."""
    generator = torch.Generator().manual_seed(2)
    shares = torch.tensor([0.6, 0.3, 0.1])
    labels = shares.multinomial(SAMPLES, replacement=True, generator=generator)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator, dtype=torch.float64)
    return labels, (logits + torch.eye(CLASSES)[labels]).softmax(1)


def evaluate(indices, device, **options):
    """Return the three values over these samples, and the bytes of their states."""
    labels, probabilities = make_outputs()
    values, sizes = [], []
    for kind in (MulticlassF1Score, MulticlassAUROC, MulticlassAveragePrecision):
        # The mean over the classes; for F1, "micro" would be the accuracy.
        metric = kind(CLASSES, average="macro", **options)
        batches = torch.tensor(list(indices)).split(BATCH)
        pairs = [(probabilities[batch], labels[batch]) for batch in batches]
        values.append(update_and_compute(metric, pairs, device).double())
        states = metric.metric_state.values()
        tensors = sum((s if isinstance(s, list) else [s] for s in states), [])
        sizes.append(sum(tensor.nbytes for tensor in tensors))
    return torch.stack(values), sizes


def of_scikit_learn():
    labels, probabilities = make_outputs()
    return torch.tensor([
        f1_score(labels, probabilities.argmax(1), average="macro"),
        roc_auc_score(labels, probabilities, multi_class="ovr"),
        average_precision_score(torch.eye(CLASSES)[labels], probabilities),
    ])  # fmt: skip


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = range(rank, SAMPLES, world_size)  # some ranks have one sample less
    values, sizes = evaluate(shard, device)
    means, _ = evaluate(shard, device, sync_on_compute=False)  # of this rank
    dist.all_reduce(means)
    means /= world_size
    padded, _ = evaluate(DistributedSampler(range(SAMPLES), shuffle=False), device)
    one, _ = evaluate(range(SAMPLES), device, sync_on_compute=False)
    rows = ("shards", values), ("mean of the ranks", means), ("padded", padded)
    for expected in (one, of_scikit_learn().to(device)):
        assert (values - expected).abs().max() < 1e-6  # F1 is computed in float32
    for wrong in (means, padded):
        assert ((wrong - one).abs().max() > 1e-3) == (world_size > 1)
    if rank == 0:
        for name, (f1, auroc, ap) in rows:
            print(f"{name}: F1 {f1:.4f}, AUROC {auroc:.4f},", end=" ")
            print(f"average precision {ap:.4f}")
        print("shards' values equal those of one process and of scikit-learn: True")
        print(f"state of rank 0's {len(shard)} samples: F1 {sizes[0]} bytes, ", end="")
        print(f"AUROC {sizes[1]}, average precision {sizes[2]}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
