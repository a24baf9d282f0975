"""Evaluate shards: a confusion matrix adds up, and AUC does not.

torchrun --standalone --nproc-per-node=2 \
07_distributed_eval/demos/needs_all_outputs.py FILE
"""

import sys

import digits_model
import torch
import torch.distributed as dist


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


def main(path):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    val_set, predict = digits_model.load(path)
    shard = list(range(rank, len(val_set), world_size))
    images, targets = val_set.__getitems__(shard)
    logits = predict(images)

    # 1. Counts add up.
    pairs = 10 * targets + logits.argmax(1)
    confusion = torch.bincount(pairs, minlength=100)
    dist.all_reduce(confusion)

    # 2. Outputs are collected in the order of the set: each rank fills its own rows.
    all_logits = torch.zeros(len(val_set), 10)
    all_logits[shard] = logits
    dist.reduce(all_logits, dst=0)  # all other ranks have zeros in these rows

    # 3. A shard's AUC, and counts from which AUC can be approximated.
    confidences, correct = logits.softmax(1).amax(1), logits.argmax(1) == targets
    mean = auc(confidences, correct)
    dist.all_reduce(mean)
    mean /= world_size
    counts = torch.stack([histogram(confidences[each]) for each in (correct, ~correct)])
    dist.all_reduce(counts)

    if rank == 0:
        expected, labels = digits_model.predict_all(path)
        answers = expected.argmax(1)
        whole = torch.bincount(10 * labels + answers, minlength=100)
        assert torch.equal(confusion, whole)
        assert torch.allclose(all_logits, expected, atol=1e-4)
        exact = auc(expected.softmax(1).amax(1), answers == labels)
        gathered = all_logits.softmax(1).amax(1), all_logits.argmax(1) == labels
        assert abs(auc(*gathered) - exact) < 1e-6 < abs(mean - exact)
        confusion = confusion.view(10, 10)
        print("images:", confusion.sum().item(), "correct:", confusion.trace().item())
        print(f"AUC of one process          {exact:.5f}")
        print(f"AUC of the gathered outputs {auc(*gathered):.5f}")
        print(f"AUC from counts             {auc_of_counts(*counts):.5f}")
        print(f"mean of the shards' AUCs    {mean:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
