"""Count what dcp.load notices when one bit of a checkpoint is flipped.

python 13_sharded_checkpoints/demos/flipped_bits.py FOLDER

Saves a small sharded model with its AdamW state in FOLDER, from one process, and loads
it 120 times, each time with another bit of the file flipped, which is drawn at random.
"""

import gc
import io
import random
import sys
import warnings
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT

FLIPS = 120


def get_state():
    """Return the state of a model that has taken one step."""
    torch.manual_seed(0)
    model = GPT(256, 8, width=16, depth=1, heads=2)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randint(256, (4, 8))).square().mean().backward()
    optimizer.step()
    model, optimizer = get_state_dict(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def tensors(state):
    """Return the tensors of a state, of DTensors the shards."""
    found = list(state["model"].values())
    for moments in state["optimizer"]["state"].values():
        found += moments.values()
    return [getattr(each, "_local_tensor", each) for each in found]


def numbers(state):
    """Return a copy of all the numbers of a state."""
    return torch.cat([tensor.flatten() for tensor in tensors(state)])


def archives_notice(content, places):
    """Return whether a CRC-32 in one of the zip archives in a file does not match."""
    for place in places:
        part = io.BytesIO(content[place.offset : place.offset + place.length])
        try:
            with zipfile.ZipFile(part) as archive:
                if archive.testzip() is not None:
                    return True
        except zipfile.BadZipFile:
            return True
    return False


def main(folder):
    state = get_state()
    dcp.save(state, checkpoint_id=folder)
    places = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
    file = folder / "__0_0.distcp"
    intact, right = file.read_bytes(), numbers(state)
    errors = unchanged = noticed = 0
    wrong = []  # (a number, what was loaded) of each flip that loads without an error
    draw = random.Random(0)
    for _ in range(FLIPS):
        flipped = bytearray(intact)
        flipped[draw.randrange(len(intact))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        for tensor in tensors(state):
            tensor.zero_()
        try:
            dcp.load(state, checkpoint_id=folder)
        except dcp.CheckpointException:
            errors += 1
            continue
        loaded = numbers(state)
        differs = loaded.view(torch.int32) != right.view(torch.int32)
        if not differs.any():
            unchanged += 1
            continue
        wrong.append((right[differs][0].item(), loaded[differs][0].item()))
        noticed += archives_notice(flipped, places)
    print(f"of {FLIPS} flipped bits, one at a time:")
    print(f"{len(wrong):4} loaded a wrong number, without an error")
    print(f"{errors:4} stopped the load with an error")
    print(f"{unchanged:4} made no difference")
    before, after = max(wrong, key=lambda pair: abs(pair[1]))
    print(f"the largest wrong number: {after:.1e} instead of {before:.1e}")
    print(f"noticed by the CRC-32 in the file: {noticed} of the {len(wrong)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    main(Path(sys.argv[1]))
    gc.collect()
    dist.destroy_process_group()
