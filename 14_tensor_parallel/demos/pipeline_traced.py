"""Have torch cut the GPT of common/ in two, instead of writing the parts by hand.

torchrun --standalone --nproc-per-node=2 14_tensor_parallel/demos/pipeline_traced.py
"""

import pipeline
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining import pipeline as trace

from common import text

CPU = torch.device("cpu")


# ---- to copy -------------------------------------------------------------------------
def make_stage(model, micro_batch, rank, device):
    """Return this process's stage of a model that is cut in front of its block 2.

    micro_batch: input tokens [B / m, T], as an example of what the model is called with
    """
    cut = {"blocks.2": SplitPoint.BEGINNING}
    pipe = trace(model, mb_args=(micro_batch,), split_spec=cut)
    return pipe.build_stage(rank, device)


# ---- the proof -----------------------------------------------------------------------
def main():
    args = pipeline.parse_args(["--dtype", "float64"])
    windows, _ = text.load(None, context_length=32)
    inputs, targets = pipeline.get_batch(args, windows, 0, CPU)
    model, rank = pipeline.make_model(args), dist.get_rank()
    micro_batch = inputs[: args.batch_size // args.micro_batches]
    stage = make_stage(model, micro_batch, rank, CPU)
    schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=pipeline.loss_fn)
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets)

    one = pipeline.make_model(args)
    pipeline.loss_fn(one(inputs), targets).backward()
    expected = {name: weight.grad for name, weight in one.named_parameters()}
    found = {name: weight.grad for name, weight in stage.submod.named_parameters()}
    largest = max((found[name] - expected[name]).abs().max().item() for name in found)
    assert largest < 1e-12
    lines = [None, None]
    line = f"{len(found)} of {len(expected)} weights, {next(iter(found))} is the first"
    dist.all_gather_object(lines, f"{line}, gradients within {largest:.1e}")
    if rank == 0:
        print(f"rank 0: {lines[0]}\nrank 1: {lines[1]}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
