"""Save in the group in which training computes, which ends in an error.

torchrun --standalone --nproc-per-node=2 13_sharded_checkpoints/demos/one_group.py
"""

import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def main(folder):
    shard = torch.zeros(2**16)
    whole = torch.zeros(2**16 * dist.get_world_size())
    for n in range(5):
        # the mistake: no process_group=dist.new_group(backend="gloo")
        pending = dcp.async_save({"weight": whole}, checkpoint_id=f"{folder}/{n}")
        while whole.sum() < dist.get_world_size():  # until no rank is saving
            shard[0] = pending.done()
            dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)  # as FSDP
        whole.zero_()
        pending.result()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # rank 0's
        main(folders[0])
    dist.destroy_process_group()
