"""Train as stage 13 does, with checkpoints whose damage is noticed.

torchrun --standalone --nproc-per-node=2 13_sharded_checkpoints/demos/checksums.py \
--checkpoint-dir checkpoints ...
"""

import gc
import json
import sys
import types
import zlib
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "13_sharded_checkpoints")]

import train

NAME = "checksums.json"


# ---- to copy -------------------------------------------------------------------------
def checksum(path):
    """Return the CRC-32 of a file, of which 16 MiB at a time are in memory."""
    value = 0
    with path.open("rb") as file:
        while part := file.read(2**24):
            value = zlib.crc32(part, value)
    return value


def compute(folder, names):
    """Return {name: checksum} of files in a folder; the ranks share them out.

    In place of the checksum of a file that cannot be read is the error's text.
    """
    mine, every = {}, [None] * dist.get_world_size()
    for name in names[dist.get_rank() :: dist.get_world_size()]:
        try:
            mine[name] = checksum(folder / name)
        except OSError as error:  # not raised here: the other ranks would wait
            mine[name] = str(error)
    dist.all_gather_object(every, mine)
    return {name: value for each in every for name, value in each.items()}


def on_rank0(function):
    """Return what a function returns on rank 0; if it fails, raise as dcp.save does."""
    answer = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except (OSError, ValueError) as error:
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise dcp.CheckpointException(NAME, {0: (answer[1], None)})
    return answer[0]


def save(state, checkpoint_id):
    """Do what dcp.save does, and write the checksums of its files beside them.

    All ranks call it, and load, too.
    """
    folder = Path(checkpoint_id)
    dcp.save(state, checkpoint_id=folder)
    names = on_rank0(lambda: sorted(path.name for path in folder.iterdir()))
    # NAME is there if a run was killed here before: it saves this step a second time
    checksums = compute(folder, [name for name in names if name != NAME])
    on_rank0(lambda: (folder / NAME).write_text(json.dumps(checksums, indent=1)))


def load(state, checkpoint_id):
    """Do what dcp.load does, unless a file is not what it was when it was saved."""
    folder = Path(checkpoint_id)
    if on_rank0((folder / NAME).exists):  # an older one may have been saved without
        checksums = on_rank0(lambda: json.loads((folder / NAME).read_text()))
        found = compute(folder, sorted(checksums))
        damaged = [name for name, value in found.items() if value != checksums[name]]
        if damaged:
            error = ValueError(f"damaged: {' '.join(sorted(damaged))}")
            raise dcp.CheckpointException(NAME, {0: (error, None)})
    dcp.load(state, checkpoint_id=folder)


# ---- stage 13 with them --------------------------------------------------------------
def main():
    train.dcp = types.SimpleNamespace(
        save=save, load=load, CheckpointException=dcp.CheckpointException
    )
    args = train.parse_args()
    args.device = train.setup(args)
    exit_code = train.run(args)
    gc.collect()
    dist.destroy_process_group()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
