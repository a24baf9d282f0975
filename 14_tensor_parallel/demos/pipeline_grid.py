"""Two pipelines of two processes each, with FSDP2 across the pipelines.

torchrun --standalone --nproc-per-node=4 14_tensor_parallel/demos/pipeline_grid.py
"""

import itertools

import pipeline
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import Schedule1F1B
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler

from common import launch
from common import text
from common.loader import collate

CPU = torch.device("cpu")
STEPS = 3


# ---- to copy -------------------------------------------------------------------------
def make_grid(model, micro_batches):
    """Return the mesh, this process's part, and the schedule of its pipeline."""
    # on GPUs: "cuda", and the device of this process
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, ranks = mesh["pp"].get_local_rank(), mesh["pp"].size()
    part = pipeline.Part(model, rank, ranks)
    # False: otherwise each micro-batch gathers the weights again
    for module in (*part.blocks.values(), part):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    # group: otherwise all ranks of the world would be one pipeline
    stage = PipelineStage(part, rank, ranks, CPU, group=mesh["pp"].get_group())
    return mesh, part, Schedule1F1B(stage, micro_batches, loss_fn=pipeline.loss_fn)


def make_loader(windows, batch_size, rank, ranks):
    """Return the batches of one pipeline; rank, ranks: of "dp", not of the world."""
    return DataLoader(
        windows,
        batch_size // ranks,
        sampler=DistributedSampler(windows, num_replicas=ranks, rank=rank),
        drop_last=True,  # all micro-batches of a pipeline need one shape
        collate_fn=collate,
    )


def clip_gradients(part, mesh, max_norm):
    """Scale the gradients of all parts, so that their norm is at most `max_norm`."""
    norm = nn.utils.get_total_norm([weight.grad for weight in part.parameters()])
    square = norm.full_tensor().square()  # of all shards of this part
    dist.all_reduce(square, group=mesh["pp"].get_group())  # of all parts
    nn.utils.clip_grads_with_norm_(part.parameters(), max_norm, square.sqrt())


# ---- the proof -----------------------------------------------------------------------
def train_alone(args, loaders):
    """Return the whole model, trained by one process on what all pipelines get."""
    model = pipeline.make_model(args)
    optimizer = pipeline.make_optimizer(model)
    for batches in itertools.islice(zip(*loaders, strict=True), STEPS):
        inputs, targets = map(torch.cat, zip(*batches, strict=True))
        optimizer.zero_grad()
        pipeline.loss_fn(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), pipeline.MAX_NORM)
        optimizer.step()
    return model


def main():
    args = pipeline.parse_args(["--dtype", "float64"])
    windows, _ = text.load(None, context_length=32)
    mesh, part, schedule = make_grid(pipeline.make_model(args), args.micro_batches)
    optimizer = pipeline.make_optimizer(part)
    ranks = mesh["dp"].size()
    loaders = [make_loader(windows, args.batch_size, n, ranks) for n in range(ranks)]
    loader = loaders[mesh["dp"].get_local_rank()]
    for inputs, targets in itertools.islice(loader, STEPS):
        optimizer.zero_grad()
        if part.is_first:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, return_outputs=False)
        clip_gradients(part, mesh, pipeline.MAX_NORM)
        optimizer.step()

    expected = train_alone(args, loaders).state_dict()
    found = part.state_dict().items()
    pairs = [(weight.full_tensor(), expected[name]) for name, weight in found]
    largest = max((one - other).abs().max().item() for one, other in pairs)
    assert largest <= pipeline.TOLERANCE
    held = sum(weight.to_local().numel() for weight in part.parameters())
    held /= sum(weight.numel() for weight in expected.values())
    pp, dp = mesh.get_coordinate()
    lines = [None] * dist.get_world_size()
    line = f"pp {pp}, dp {dp}, {held:.1%} of the weights, within {largest:.1e}"
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        for rank, each in enumerate(lines):
            print(f"rank {rank}: {each}", flush=True)


if __name__ == "__main__":
    launch.ignore_mesh_warnings()
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
