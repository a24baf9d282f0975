"""Evaluate shards: F1 follows from counts, which add up, and AUC needs all outputs.

torchrun --standalone --nproc-per-node=2 \
07_distributed_eval/demos/needs_all_outputs.py FILE
"""

import sys

import digits_model
import torch
import torch.distributed as dist


# ---- the lines to copy ---------------------------------------------------------------
def confusion_matrix(answers, targets, classes):
    """Count each pair of a target and an answer over the shards of all ranks."""
    pairs = torch.bincount(classes * targets + answers, minlength=classes**2)
    dist.all_reduce(pairs)
    return pairs.view(classes, classes)


def gather_rows(rows):
    """Return the rows of all ranks, on all ranks, which may have different numbers."""
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, rows.cpu())
    return torch.cat(shards)


# ---- the run -------------------------------------------------------------------------
def mean_f1(confusion):
    """Return the mean of the classes' F1; a class that never occurs is left out."""
    ends = confusion.sum(0) + confusion.sum(1)
    return (2 * confusion.diag() / ends)[ends > 0].mean()


def auc(confidences, correct):
    """Return how often a correct answer is more confident than a wrong one."""
    right, wrong = confidences[correct == 1], confidences[correct == 0]
    return (right[:, None] > wrong).double().mean()


def mean_of_ranks(value):
    value = value.double()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main(path):
    val_set, model = digits_model.load(path)
    shard = range(dist.get_rank(), len(val_set), dist.get_world_size())
    images, targets = val_set.__getitems__(list(shard))
    logits = model(images)
    answers, confidences = logits.argmax(1), logits.softmax(1).amax(1)
    rows = torch.stack([confidences, answers == targets], 1)  # what AUC needs of each

    f1 = mean_f1(confusion_matrix(answers, targets, 10))
    all_rows = gather_rows(rows)
    means = mean_of_ranks(auc(*rows.T))
    if dist.get_rank() == 0:
        logits, targets = digits_model.predict_all(path)  # the set, on one process
        answers, confidences = logits.argmax(1), logits.softmax(1).amax(1)
        counts = torch.bincount(10 * targets + answers, minlength=100)
        alone = mean_f1(counts.view(10, 10)), auc(confidences, answers == targets)
        ours = f1, auc(*all_rows.T)
        assert alone[0] == ours[0] and abs(alone[1] - ours[1]) < 1e-6
        assert abs(means - alone[1]) > 1e-3
        print(f"one process      F1 {alone[0]:.5f}  AUC {alone[1]:.5f}")
        print(f"these lines      F1 {ours[0]:.5f}  AUC {ours[1]:.5f}")
        print(f"mean of shards               AUC {means:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
