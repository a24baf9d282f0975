"""Measure what a rank holds in a training step, in MiB: with DDP, and with FSDP.

torchrun --standalone --nproc-per-node=4 12_fsdp/demos/memory.py DDP|FSDP [FILE.json]

DDP alone, kind by kind; or DDP and FSDP, at rest and at the fullest moment of a step.
The file gets the bars of a picture: {label: {kind: MiB}}.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT
from harness.counting import Kept
from harness.counting import Memory
from harness.counting import size

VOCABULARY, WIDTH, DEPTH = 4096, 192, 4
WINDOWS, CONTEXT_LENGTH = 8, 32  # of the global batch
KINDS = ("weights", "gradients", "buckets", "AdamW", "copies", "activations", "logits")
AT_REST = ("weights", "gradients", "AdamW")
# ranks, with or without autocast to bfloat16, and a way to distribute the model
DDP = [(1, [False], "DDP"), (2, [False], "DDP"), (4, [False], "DDP")]
DDP += [(4, [False], "DDP, bucket view"), (4, [True], "DDP, autocast")]
FSDP = [(n, [False, True], kind) for kind in ("DDP", "FSDP") for n in (1, 2, 4)]
OTHERS = ("no reshard", "only the root", "ends apart")
FSDP += [(4, [False, True], kind) for kind in OTHERS]


def shard(model, kind, mesh, amp):
    """Shard a model as the script does, or in one of three other ways."""
    policy = MixedPrecisionPolicy()
    if amp:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy}
    for block in model.blocks if kind != "only the root" else ():
        fully_shard(block, **options, reshard_after_forward=kind != "no reshard")
    if kind == "ends apart":  # two groups more; backward begins with the second
        fully_shard(model.tokens, **options)
        fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    return fully_shard(model, **options)


def replicate(model, kind, group):
    """Return a model under DDP, and a list that gets the buckets it averages."""
    options = {"process_group": group, "gradient_as_bucket_view": "view" in kind}
    ddp, buckets = nn.parallel.DistributedDataParallel(model, **options), []

    def average(_, bucket):
        buckets.append(bucket.buffer())
        mean = buckets[-1].div_(group.size())
        done = dist.all_reduce(mean, group=group, async_op=True)
        return done.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, average)
    return ddp, buckets


def hold(kind, group, amp):
    """Take two steps; return the bytes of each kind that the second one needs."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, CONTEXT_LENGTH, WIDTH, DEPTH)
    if kind.startswith("DDP"):
        wrapped, buckets = replicate(model, kind, group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        wrapped, buckets = shard(model, kind, mesh, amp), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(VOCABULARY, (WINDOWS // group.size(), CONTEXT_LENGTH))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = wrapped(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return logits, loss

    with Kept() as kept:
        logits, loss = forward()
    # What autograd keeps from forward to backward: autocast's 16-bit copies of weights,
    # the logits and their log-softmax, and the activations of the blocks.
    activations = kept.activations(model)
    matrices = {weight.shape for weight in model.parameters() if weight.dim() == 2}
    matrices |= {shape[::-1] for shape in matrices}  # as a product uses them
    copies = [each for each in activations if each.shape in matrices]
    outputs = [logits, *(x for x in activations if x.numel() == logits.numel())]
    sizes = {"copies": size(copies), "logits": size(outputs)}
    sizes["activations"] = size([*activations, logits]) - sum(sizes.values())
    kept.tensors.clear(), activations.clear(), copies.clear(), outputs.clear()
    loss.backward()
    del logits, loss
    optimizer.step()
    optimizer.zero_grad()
    buckets.clear()
    weights = list(model.parameters())
    states = [each for state in optimizer.state.values() for each in state.values()]
    with Memory([*weights, *states]) as memory:
        logits, loss = forward()
        loss.backward()
    gradients = [weight.grad for weight in weights]
    sizes |= {"weights": size(weights), "AdamW": size(states)}
    sizes |= {"gradients": size(gradients)}
    # a view of a bucket has no memory of its own
    sizes["buckets"] = size([*gradients, *buckets]) - sizes["gradients"]
    return sizes | {"all": memory.most}


def print_kinds(kind, sizes, ranks):
    """Print a row of the table of DDP; return its bar, in MiB."""
    way = kind.removeprefix("DDP")
    bar = {name: sizes[name] / 2**20 for name in KINDS}
    cells = "".join(f"{mib:{len(name) + 2}.1f}" for name, mib in bar.items())
    print(f"{ranks:5}{cells}  {way.strip(', ')}".rstrip(), flush=True)
    return {f"{ranks} rank{'s' * (ranks > 1)}{way}": bar}


def print_moments(kind, sizes, in_16_bits, ranks):
    """Print a row of the table of DDP and FSDP; return its bar, if it has 4 ranks."""
    bar = {name: sizes[name] / 2**20 for name in AT_REST}
    most = sizes["all"] / 2**20, in_16_bits["all"] / 2**20
    row = "{:9.1f}{:11.1f}{:7.1f}{:12.1f}{:10.1f}".format(*bar.values(), *most)
    print(f"{kind:14}{ranks:5}{row}", flush=True)
    bar["added at the worst moment"] = most[0] - sum(bar.values())
    return {kind: bar} if ranks == 4 else {}


def main():
    rank, bars, way = dist.get_rank(), {}, sys.argv[1]
    if rank == 0 and way == "DDP":
        print("ranks", *KINDS, sep="  ")
    elif rank == 0:
        print(f"{'at rest':>45}{'most during a step':>25}")
        print(f"{'':14}ranks  weights  gradients  AdamW     float32  bfloat16")
    for ranks, precisions, kind in DDP if way == "DDP" else FSDP:
        group = dist.new_group(range(ranks))
        if rank < ranks:
            sizes = [hold(kind, group, amp) for amp in precisions]
            if rank == 0:
                show = print_kinds if way == "DDP" else print_moments
                bars |= show(kind, *sizes, ranks)
        dist.barrier()
    if rank == 0 and len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(bars))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()
    dist.destroy_process_group()
