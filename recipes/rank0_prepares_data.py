"""Rank 0 prepares the data, longer than the timeout: why do the other ranks fail?

They wait in `dist.barrier()`, and a barrier waits no longer than the timeout of its
process group: gloo then raises "Timed out waiting", and nccl's watchdog ends the
process. Do not raise the timeout of the whole run, which is what notices a rank that
hangs. Make a second group with a long timeout, and wait in its barrier. It is a gloo
group, also on GPUs: its barrier waits on the CPU. Or prepare the data before torchrun
starts, with a command of its own, which keeps the GPUs from waiting as well.

$ torchrun --standalone --nproc-per-node=2 recipes/rank0_prepares_data.py
barrier of a group with the usual timeout: timed out
barrier of a group with a long timeout: all ranks read what rank 0 wrote
"""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


# ---- the lines to copy ---------------------------------------------------------------
def make_patient_group():
    """Return a group that waits for hours; all ranks call this, before they wait."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=12))


def on_rank_0_first(prepare, patient_group):
    if dist.get_rank() == 0:
        prepare()
    dist.barrier(patient_group)


# ---- the proof -----------------------------------------------------------------------
TIMEOUT = 5  # seconds, instead of the usual 10 or 30 minutes


def wait_as_usual(folder):
    """Return whether this rank waited in vain; rank 0 prepares until all others did."""
    dist.barrier()  # so that all ranks begin at once
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    if dist.get_rank() == 0:
        while len(list(folder.glob("timed_out_*"))) < dist.get_world_size() - 1:
            time.sleep(0.1)
        return False
    try:
        dist.barrier(group)
    except RuntimeError as error:
        words = ("timed out", "timeout", "by peer")  # closed by one that timed out
        assert any(word in str(error).lower() for word in words)
        (folder / f"timed_out_{dist.get_rank()}").touch()
        return True
    return False


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # otherwise every rank also uses GPU 0
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    patient_group = make_patient_group()
    temporary = tempfile.TemporaryDirectory()
    folder = [temporary.name]  # rank 0's on all ranks
    dist.broadcast_object_list(folder, src=0)
    folder = Path(folder[0])

    everybody = [None] * world_size
    dist.all_gather_object(everybody, wait_as_usual(folder))
    assert everybody == [False] + [True] * (world_size - 1)

    def prepare():
        time.sleep(TIMEOUT + 1)
        (folder / "data").write_text("prepared")

    on_rank_0_first(prepare, patient_group)
    dist.all_gather_object(everybody, (folder / "data").read_text())
    assert everybody == ["prepared"] * world_size
    if rank == 0:
        print("barrier of a group with the usual timeout: timed out")
        text = "all ranks read what rank 0 wrote"
        print(f"barrier of a group with a long timeout: {text}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
