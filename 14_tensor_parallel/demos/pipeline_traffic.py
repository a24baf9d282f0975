"""Count what a process sends in one step: FSDP, tensor parallelism, and a pipeline.

torchrun --standalone --nproc-per-node=2 14_tensor_parallel/demos/pipeline_traffic.py
"""

import pipeline
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

from common import text
from nbtools.counting import Collectives

CPU = torch.device("cpu")
# around a ring, a process sends (n - 1) / n of the whole so many times
TIMES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def sent(collectives, ranks):
    """Return how many calls there were, and the bytes that this process sent."""
    count, total = 0, 0
    for name, _, given, whole in collectives.seen:
        if name == "send":
            count, total = count + 1, total + given
        elif name in TIMES:
            count += 1
            total += TIMES[name] * whole * (ranks - 1) // ranks
    return count, total


def whole_batch(model, inputs, targets):
    """Go forward and backward on the whole batch."""
    pipeline.loss_fn(model(inputs), targets).backward()


def with_fsdp(model, inputs, targets, mesh):
    """Shard blocks and model; return what goes forward and backward on half a batch."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    half = slice(mesh.get_local_rank(), None, mesh.size())
    return lambda: whole_batch(model, inputs[half], targets[half])


def with_tensor_parallelism(model, inputs, targets, mesh):
    """Split the layers of each block; embeddings, norms and head stay whole."""
    plan = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel()}
    plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return lambda: whole_batch(model, inputs, targets)


def with_pipeline(model, inputs, targets, mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    part = pipeline.Part(model, rank, ranks)
    stage = PipelineStage(part, rank, ranks, CPU)
    schedule = Schedule1F1B(stage, 4, loss_fn=pipeline.loss_fn)
    read = [inputs] if rank == 0 else []  # torch 2.11 wants none on the others
    return lambda: schedule.step(*read, target=targets)


WAYS = {
    "FSDP": with_fsdp,
    "tensor parallel": with_tensor_parallelism,
    "pipeline": with_pipeline,
}


def main():
    args = pipeline.parse_args([])
    windows, _ = text.load(None, context_length=32)
    inputs, targets = pipeline.get_batch(args, windows, 0, CPU)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for name, prepare in WAYS.items():
        step = prepare(pipeline.make_model(args), inputs, targets, mesh)
        step()  # the first step of a pipeline also sends the shapes
        with Collectives() as collectives:
            step()
        count, total = sent(collectives, mesh.size())
        if dist.get_rank() == 0:
            print(f"{name:16}{count:3} calls {total:12,} bytes", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
