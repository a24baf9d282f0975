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
import mmap
import os
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
    """Save on all ranks; give the folder its name afterwards."""
    dcp.save(state, checkpoint_id=folder)
    names = [sorted(path.name for path in folder.iterdir())]
    dist.broadcast_object_list(names)  # rank 0's
    checksums = compute(folder, names[0])
    if dist.get_rank() == 0:
        (folder / "checksums.json").write_text(json.dumps(checksums))
    dist.barrier()


def load(state, folder):
    """Load on all ranks, unless a file is not what it was when it was saved."""
    checksums = json.loads((folder / "checksums.json").read_text())
    found = compute(folder, sorted(checksums))
    damaged = [name for name in found if found[name] != checksums[name]]
    if damaged:
        error = ValueError(f"damaged: {' '.join(damaged)}")
        raise dcp.CheckpointException("checksums", {0: (error, None)})
    dcp.load(state, checkpoint_id=folder)


def compute(folder, names):
    """Return {name: its CRC-32, or why it cannot be read}; the ranks share them out."""
    mine, every = {}, [None] * dist.get_world_size()
    for name in names[dist.get_rank() :: dist.get_world_size()]:
        try:
            with (folder / name).open("rb") as file:
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                mine[name] = zlib.crc32(whole)
        except (OSError, ValueError) as error:  # not raised here: the others would wait
            mine[name] = str(error)
    dist.all_gather_object(every, mine)
    return {name: value for each in every for name, value in each.items()}


# ---- the proof -----------------------------------------------------------------------
def make_state(value, device):
    """Return the state of a step: 12 rows of one number, sharded over the ranks."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    rows = torch.full((12, 4), value, device=device)
    return {"weight": distribute_tensor(rows, mesh, [Shard(0)])}


def load_damaged(file, content, device):
    """Have rank 0 write a file; assert that all ranks refuse it by its checksum.

    Returns what dcp.load loads.
    """
    if dist.get_rank() == 0:
        file.write_bytes(content)
    dist.barrier()
    state, refused = make_state(0.0, device), False
    dcp.load(state, checkpoint_id=file.parent)
    try:
        load(make_state(0.0, device), file.parent)
    except dcp.CheckpointException as error:
        refused = str(error.failures[0][0]) == f"damaged: {file.name}"
    assert refused
    return state["weight"].full_tensor()[:, 0].tolist()


def main(folder, device):
    for step in (18, 20):
        save(make_state(float(step), device), folder / f"step-{step}")
    state = make_state(0.0, device)
    load(state, folder / "step-20")
    assert state["weight"].full_tensor().unique().tolist() == [20]

    file = folder / "step-20" / f"__{dist.get_world_size() - 1}_0.distcp"
    flipped = bytearray(file.read_bytes())
    flipped[flipped.index(struct.pack("<f", 20.0)) + 3] ^= 0x40
    older = (folder / "step-18" / file.name).read_bytes()
    dist.barrier()
    first, *_, last = load_damaged(file, older, device)
    assert (first, last) == (20, 18)
    wrong = min(load_damaged(file, flipped, device))
    assert wrong < 1e-30
    if dist.get_rank() == 0:
        for what, gives in (
            ("file of another step", f"{first} and {last}"),
            ("flipped bit", f"{wrong:.1e} for 20.0"),
        ):
            print(f"a {what}: dcp.load gives {gives}, and no error")
            print(f"  with checksums: damaged: {file.name}", flush=True)
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
