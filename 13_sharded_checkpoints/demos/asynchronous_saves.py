"""Train as stage 13 does, but save in a thread, while training continues.

torchrun --standalone --nproc-per-node=2 \
13_sharded_checkpoints/demos/asynchronous_saves.py --checkpoint-dir checkpoints ...
"""

import functools
import gc
import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "13_sharded_checkpoints")]

import train

from common import checkpoint


# ---- to copy -------------------------------------------------------------------------
class PublishingWriter(dcp.FileSystemWriter):
    """Writes to a folder whose name begins with a dot, and renames it at the end."""

    def __init__(self, path, identity, keep):
        self.published, self.identity, self.keep = path, identity, keep
        super().__init__(path.with_name(f".{path.name}.tmp"))

    def finish(self, metadata, results):
        """Write .metadata and rename the folder.

        torch calls this on rank 0, in the thread, when all ranks have written.
        """
        super().finish(metadata, results)
        checkpoint.publish(self.path, self.published, self.identity, self.keep)


class AsynchronousSaves:
    """Saves one checkpoint at a time, each in a thread; all ranks call its methods."""

    def __init__(self, timeout, make_writer=PublishingWriter):
        # otherwise the collectives of saving and of training get mixed up
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.make_writer = make_writer
        self.pending = None

    def begin(self, state, path, identity, keep):
        """Copy the state to CPU memory, and start the thread that writes the copy."""
        self.wait()  # otherwise there are two copies, and two threads in one group
        self.writer = self.make_writer(path, identity, keep)
        if dist.get_rank() == 0:
            # otherwise shards that a killed save has left become a part of this one
            checkpoint.remove(self.writer.path)
        dist.barrier()  # otherwise rank 0 can remove the new folder, too
        self.pending = dcp.async_save(
            {"app": state}, storage_writer=self.writer, process_group=self.group
        )

    def wait(self):
        """Wait for the save that is not finished, if there is one."""
        if self.pending is None:
            return
        try:
            self.pending.result()  # otherwise nobody sees the thread's error
        except dcp.CheckpointException as error:  # on all ranks, if one cannot write
            train.log(f"checkpoint not written ({checkpoint.reason(error)})")
            if dist.get_rank() == 0:
                checkpoint.remove(self.writer.path)
        self.pending = None  # otherwise the copy of the state stays in memory


# ---- stage 13 with it ----------------------------------------------------------------
def save_checkpoint(saves, args, state):
    """Begin to write a checkpoint; what comes before is as in the script."""
    if args.checkpoint_dir is None:
        return
    if train.has_diverged(state.model, state.scaler):
        train.log(f"step {state.step}: not saved, since training has diverged")
        return
    path = args.checkpoint_dir / checkpoint.name(state.step)
    saves.begin(state, path, state.identity, args.keep_checkpoints)


def main(make_writer=PublishingWriter):
    args = train.parse_args()
    args.device = train.setup(args)
    saves = AsynchronousSaves(args.timeout, make_writer)
    train.save_checkpoint = functools.partial(save_checkpoint, saves)
    exit_code = train.run(args)
    saves.wait()  # otherwise its group is destroyed before the last save is complete
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
