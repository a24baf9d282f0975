"""Does dcp.load notice a damaged checkpoint? How do I add checksums to one?

Only damage that keeps it from reading. A bit that is flipped in the numbers, or a file
that belongs to another step, is loaded without an error: DCP compares no checksums. So
write those of all files beside them when all ranks have saved, and compare them before
loading. All ranks then raise the CheckpointException that dcp.load raises, and can fall
back to an older checkpoint together. Each byte is read once more after a save, and once
more before a load. This does not protect against tampering: whoever changes a file can
change its checksum.

$ torchrun --standalone --nproc-per-node=2 recipes/checkpoint_checksums.py
a file of another step: dcp.load gives 20.0 and 18.0, and no error
  with checksums: damaged: __1_0.distcp
a flipped bit: dcp.load gives 5.9e-38 for 20.0, and no error
  with checksums: damaged: __1_0.distcp
"""

import json
import os
import shutil
import struct
import tempfile
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor


# ---- the lines to copy ---------------------------------------------------------------
def save(state, folder):
    """Do what dcp.save does, and write the checksums of its files beside them.

    All ranks call it, and load, too. Give the folder its name afterwards.
    """
    dcp.save(state, checkpoint_id=folder)
    names = on_rank0(lambda: sorted(path.name for path in folder.iterdir()))
    checksums = compute(folder, [name for name in names if name != "checksums.json"])
    on_rank0(lambda: (folder / "checksums.json").write_text(json.dumps(checksums)))


def load(state, folder):
    """Do what dcp.load does, unless a file is not what it was when it was saved."""
    if on_rank0((folder / "checksums.json").exists):  # an older one may be without
        text = on_rank0((folder / "checksums.json").read_text)
        checksums = json.loads(text)
        found = compute(folder, sorted(checksums))
        damaged = [name for name in found if found[name] != checksums[name]]
        if damaged:
            error = ValueError(f"damaged: {' '.join(damaged)}")
            raise dcp.CheckpointException("checksums", {0: (error, None)})
    dcp.load(state, checkpoint_id=folder)


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


def checksum(path):
    """Return the CRC-32 of a file, of which 16 MiB at a time are in memory."""
    value = 0
    with path.open("rb") as file:
        while part := file.read(2**24):
            value = zlib.crc32(part, value)
    return value


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
        raise dcp.CheckpointException("checksums", {0: (answer[1], None)})
    return answer[0]


# ---- the proof -----------------------------------------------------------------------
def log(text):
    """Print a line, once for the whole run."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def make_state(value, device):
    """Return the state of a step: 12 rows of one number, sharded over the ranks."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    rows = torch.full((12, 4), value, device=device)
    return {"weight": distribute_tensor(rows, mesh, [Shard(0)])}


def damage(function):
    """Have rank 0 change a file, while the others wait."""
    if dist.get_rank() == 0:
        function()
    dist.barrier()


def load_both(folder, file, device):
    """Return what dcp.load loads; assert that all ranks refuse it by its checksums."""
    state = make_state(0.0, device)
    dcp.load(state, checkpoint_id=folder)
    refused = False
    try:
        load(make_state(0.0, device), folder)
    except dcp.CheckpointException as error:
        refused = str(error.failures[0][0]) == f"damaged: {file.name}"
    assert refused
    return state["weight"].full_tensor()


def main(folder, device):
    for step in (18, 20):
        save(make_state(float(step), device), folder / f"step-{step}")
    latest, older = folder / "step-20", folder / "step-18"
    state = make_state(0.0, device)
    load(state, latest)
    assert state["weight"].full_tensor().unique().tolist() == [20]

    file = latest / f"__{dist.get_world_size() - 1}_0.distcp"
    intact = file.read_bytes()
    dist.barrier()
    damage(lambda: shutil.copy(older / file.name, file))
    first, *_, last = load_both(latest, file, device)[:, 0].tolist()
    assert (first, last) == (20, 18)
    log(f"a file of another step: dcp.load gives {first} and {last}, and no error")
    log(f"  with checksums: damaged: {file.name}")

    flipped = bytearray(intact)
    flipped[intact.index(struct.pack("<f", 20.0)) + 3] ^= 0x40
    damage(lambda: file.write_bytes(flipped))
    wrong = load_both(latest, file, device).min().item()
    assert wrong < 1e-30
    log(f"a flipped bit: dcp.load gives {wrong:.1e} for 20.0, and no error")
    log(f"  with checksums: damaged: {file.name}")
    dist.barrier()


if __name__ == "__main__":
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names)  # rank 0's
        main(Path(names[0]), device)
    dist.destroy_process_group()
