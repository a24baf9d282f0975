"""What the scripts of your_own_script/ do first in tests: a `prepare` of a job.

The scripts there import nothing of ours, so what they did is seen through torch. Each
of these functions has a script train in float64.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler
from torch.utils.data import RandomSampler

from harness.counting import Collectives
from harness.counting import between_steps


def call_after(owner, name, function):
    """Call a function after each `owner.name`, with its result and arguments."""
    original = getattr(owner, name)

    def called(*arguments, **options):
        result = original(*arguments, **options)
        function(result, *arguments)
        return result

    setattr(owner, name, called)


def record(folder):
    """Save what this rank did to folder/rank-R.pt, when the script ends.

    It is a dict. `noise`: what is drawn for the samples of each step; `sums`: what each
    evaluation has after its all-reduce; `ranks`: the number of processes; `saves`: how
    often torch.save was called; `elements`: how many of the gradient's elements this
    rank has.
    """
    torch.set_default_dtype(torch.float64)
    seen = {"noise": [], "sums": [], "saves": 0}
    save = torch.save

    def drawn(noise, _):
        seen["noise"].append(noise.cpu())

    def reduced(_, tensor, *op):
        if not op:  # fsdp_resumable.py also asks for a maximum
            seen["sums"].append(tensor.tolist())
        seen["ranks"] = dist.get_world_size()

    def saved(*_):
        seen["saves"] += 1

    def count_elements(optimizer, *_):
        groups = [group["params"] for group in optimizer.param_groups]
        gradients = [weight.grad for weights in groups for weight in weights]
        shards = [getattr(each, "_local_tensor", each) for each in gradients]
        seen["elements"] = sum(each.numel() for each in shards)

    call_after(torch, "randn_like", drawn)
    call_after(dist, "all_reduce", reduced)
    call_after(torch, "save", saved)
    register_optimizer_step_pre_hook(count_elements)
    path = Path(folder, f"rank-{os.environ['RANK']}.pt")
    call_after(dist, "destroy_process_group", lambda *_: save(seen, path))


def kill_in_save(checkpoint):
    """Have the last rank kill itself before it writes its shards of a checkpoint.

    checkpoint: its number, 1 for the first.
    """
    torch.set_default_dtype(torch.float64)
    count, write_data = itertools.count(1), FileSystemWriter.write_data

    def killed(*arguments):
        is_last = dist.get_rank() == dist.get_world_size() - 1
        if next(count) == checkpoint and is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return write_data(*arguments)

    FileSystemWriter.write_data = killed


def shuffle_as_after(num_samples):
    """Have shuffle=True take the same samples as after.py's sampler, in its order."""
    torch.set_default_dtype(torch.float64)
    epochs = itertools.count(1)

    def order(sampler):
        of_after = DistributedSampler(range(len(sampler)), num_replicas=1, rank=0)
        of_after.set_epoch(next(epochs))
        return itertools.islice(of_after, num_samples)

    RandomSampler.__iter__ = order


def exact_norm(collectives=None):
    """Have Llama's norm compute in the dtype of its input.

    transformers computes it in float32, whatever the dtype of the model. The rounding
    then depends on how the samples are dealt to the ranks, and hides everything else.

    collectives: a folder for rank-R.pt, which gets those of the second optimizer step:
    what Collectives.total returns, of harness/counting.py.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.set_default_dtype(torch.float64)

    def forward(self, x):
        mean = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + self.variance_epsilon))

    LlamaRMSNorm.forward = forward
    if collectives:
        seen = Collectives()

        def save():
            seen.__exit__(None, None, None)
            path = Path(collectives, f"rank-{dist.get_rank()}.pt")
            torch.save(seen.total(), path)

        between_steps(1, 2, seen.__enter__, save)


def exact_norm_and_shuffle(num_samples):
    """Do what exact_norm and shuffle_as_after do."""
    exact_norm()
    shuffle_as_after(num_samples)


def import_again(names, prepare=None):
    """Forget modules that the server of the forks has imported; then call `prepare`."""
    for name in names:
        sys.modules.pop(name, None)
    if prepare:
        prepare()
