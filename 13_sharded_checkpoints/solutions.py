"""Solutions of the exercises in 13_sharded_checkpoints.ipynb."""

import math

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict


# ---- exercise 1 ----------------------------------------------------------------------
# A rank reads every file that has one of its rows, also those between the first and the
# last. torch.chunk rounds the rows of a shard up.
def files_to_read(rows, writers, readers, rank):
    written, read = math.ceil(rows / writers), math.ceil(rows / readers)
    mine = range(rank * read, min((rank + 1) * read, rows))
    return {row // written for row in mine}


# ---- exercise 2 ----------------------------------------------------------------------
# DCP loads tensors in place, and set_state_dict gives the optimizer the rest, such as
# its learning rate. Only a complete folder gets its name.
def save(model, optimizer, folder):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    temporary = folder.with_name(f".{folder.name}.tmp")
    dcp.save(state, checkpoint_id=temporary)  # returns when all ranks have written
    temporary.rename(folder)  # with several ranks, only on rank 0


def load(model, optimizer, folder):
    # this also makes the state of a fresh optimizer, into which torch loads
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
