"""Checkpoints of several ranks: a kill at any moment leaves the last complete one.

A checkpoint is a folder, because several ranks write to it at once. While they write,
the folder has a name for which load() does not look. It gets its real name when all
have finished, in one step of the file system: at every moment, a folder with that name
is complete. Nothing of an earlier checkpoint is touched before.

torch.distributed.checkpoint lets all ranks write their parts of one tensor, and can
load them on another number of ranks. Which folder is the latest complete one is left to
you there, too: it writes the file .metadata last.
"""

import torch
import torch.distributed as dist


def save(folder, step, model, optimizer, scheduler):
    unfinished = folder / f"unfinished-{step}"  # left over from a kill: overwritten
    unfinished.mkdir(parents=True, exist_ok=True)
    torch.save(torch.get_rng_state(), unfinished / f"random-{dist.get_rank()}.pt")
    if dist.get_rank() == 0:  # the rest is the same on all ranks: one copy is enough
        state = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(state, unfinished / "shared.pt")
    dist.barrier()  # otherwise rank 0 publishes a folder to which others still write
    if dist.get_rank() == 0:
        # nine digits: then the order of the names is the order of the steps
        unfinished.rename(folder / f"step-{step:09}")


def load(folder, model, optimizer, scheduler):
    # Rank 0 chooses for all: another node may see a new folder a moment later, and
    # would resume from an older one.
    latest = [max(folder.glob("step-*"), default=None)]
    dist.broadcast_object_list(latest, src=0)
    if latest[0] is None:
        return 0
    state = torch.load(latest[0] / "shared.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    random = torch.load(latest[0] / f"random-{dist.get_rank()}.pt", weights_only=True)
    torch.set_rng_state(random)
    return state["step"]
