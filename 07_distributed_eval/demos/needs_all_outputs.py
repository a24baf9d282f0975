"""Evaluate shards: F1 follows from counts, which add up, and AUC needs all outputs.

torchrun --standalone --nproc-per-node=2 \
07_distributed_eval/demos/needs_all_outputs.py FILE
"""

import sys

import digits_model
import torch
import torch.distributed as dist


# ---- the lines to copy: counts -------------------------------------------------------
def count_pairs(answers, targets, classes):
    """Count each pair of a target and an answer: the confusion matrix of this shard."""
    pairs = classes * targets + answers
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def mean_f1(confusion):
    """Return the mean of the classes' F1; a class that never occurs is left out."""
    ends = confusion.sum(0) + confusion.sum(1)
    return (2 * confusion.diag() / ends)[ends > 0].mean()


def f1_of_all(answers, targets, classes):
    """Return the mean F1 over the shards of all ranks, on all ranks."""
    confusion = count_pairs(answers, targets, classes)
    dist.all_reduce(confusion)
    return mean_f1(confusion)


# ---- the lines to copy: outputs ------------------------------------------------------
def gather_rows(rows, indices, total):
    """Return [total, columns] on rank 0: the rows of all ranks, in the set's order.

    rows: this rank's [n, columns]; indices: their n places in the set.
    """
    gathered = rows.new_zeros(total, rows.shape[1])
    gathered[indices] = rows  # on all other ranks, these rows are zero
    dist.reduce(gathered, dst=0)
    return gathered


# ---- the run -------------------------------------------------------------------------
def auc(confidences, correct):
    """Return how often a correct answer is more confident than a wrong one."""
    right, wrong = confidences[correct], confidences[~correct]
    return (right[:, None] > wrong).double().mean()


def histogram(confidences):
    """Count confidences in bins of equal width between 0 and 1."""
    return torch.histc(confidences, bins=1000, min=0, max=1).double()


def auc_of_counts(right, wrong):
    """Return the same from two histograms; within a bin, half of the pairs count."""
    below = wrong.cumsum(0) - wrong / 2
    return (right * below).sum() / (right.sum() * wrong.sum())


def mean_of_ranks(value):
    value = value.double()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main(path):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    val_set, model = digits_model.load(path)
    shard = list(range(rank, len(val_set), world_size))
    images, targets = val_set.__getitems__(shard)
    logits = model(images)
    confidences, correct = logits.softmax(1).amax(1), logits.argmax(1) == targets

    f1_of_means = mean_of_ranks(mean_f1(count_pairs(logits.argmax(1), targets, 10)))
    f1 = f1_of_all(logits.argmax(1), targets, classes=10)

    # Of each image, one row with what the metric needs: a confidence, and a bit.
    rows = gather_rows(torch.stack([confidences, correct], 1), shard, len(val_set))
    auc_of_means = mean_of_ranks(auc(confidences, correct))
    counts = torch.stack([histogram(confidences[each]) for each in (correct, ~correct)])
    dist.all_reduce(counts)

    if rank == 0:
        logits, targets = digits_model.predict_all(path)  # the set, on one process
        answers = logits.argmax(1)
        exact_f1 = mean_f1(count_pairs(answers, targets, 10))
        exact = auc(logits.softmax(1).amax(1), answers == targets)
        gathered = auc(rows[:, 0], rows[:, 1] == 1)
        assert f1 == exact_f1 and abs(f1_of_means - exact_f1) > 1e-6
        assert abs(gathered - exact) < 1e-6 < abs(auc_of_means - exact)
        print(f"F1 of one process           {exact_f1:.5f}")
        print(f"F1 from the added counts    {f1:.5f}")
        print(f"mean of the shards' F1      {f1_of_means:.5f}")
        print(f"AUC of one process          {exact:.5f}")
        print(f"AUC of the gathered outputs {gathered:.5f}")
        print(f"AUC from counts             {auc_of_counts(*counts):.5f}")
        print(f"mean of the shards' AUCs    {auc_of_means:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
