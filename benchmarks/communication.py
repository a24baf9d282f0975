"""What does a step of several processes wait for: the bytes, or one another?

torchrun --standalone --nproc-per-node=2 -m benchmarks.communication [FLAGS of a stage]

Windows of ten steps on one batch, in turns: the bare model in every process, the same
with one number averaged over the processes after each step, and DDP, which averages the
gradient. The second costs what it costs to keep in step: each process waits for the
slowest. --epochs is the number of windows of each kind (20 by default); the first one
warms up.
"""

import os
import statistics

import torch
from torch import distributed as dist

from benchmarks import limit
from benchmarks.report import table
from common.args import ArgumentParser
from common.launch import get_device

STEPS = 10
KINDS = {"bare": "nothing", "in_step": "one number", "ddp": "the gradient"}


def main():
    parser = ArgumentParser(__doc__)
    parser.set_defaults(data="fake", image_size=32, images=600, epochs=20)
    args = parser.parse_args()
    args.device = get_device(args.device, int(os.environ["LOCAL_RANK"]))
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    train_set = limit.load_train_set(args)
    local_batch_size = args.batch_size // dist.get_world_size()
    steps = limit.make_steps(args, train_set, local_batch_size, KINDS)
    seconds = {name: [] for name in KINDS.values()}
    for _ in range(args.epochs):
        for kind, step in steps.items():
            taken = limit.seconds(args.device, step, STEPS)
            seconds[KINDS[kind]].append(taken / STEPS)
    rows = []
    for name, taken in seconds.items():
        taken = taken[1:]  # the first window warms up
        pairs = zip(taken, seconds["nothing"][1:], strict=True)
        ratios = sorted(one / bare for one, bare in pairs)
        low, high = (1e3 * one for one in (min(taken), max(taken)))
        row = [name, f"{1e3 * statistics.median(taken):.1f}", f"{low:.1f}-{high:.1f}"]
        rows.append([*row, f"{statistics.median(ratios):.2f}"])
    if dist.get_rank() == 0:
        titles = ["averaged in each step", "ms per step", "least-most", "vs nothing"]
        print("\n".join(table(titles, rows)))
    steps.clear()  # a DDP object must not outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
