"""Write checkpoints of a training of several ranks, and resume from the latest one.

All ranks call both functions. The model's weights and buffers, and the states of the
optimizer and of the scheduler, are the same on all ranks; the random numbers of torch
are each rank's own.

A process may be killed at any moment, also in the middle of save(). Then the ranks are
started again and call load(). They wait for each other in collectives alone, such as
dist.barrier().
"""


def save(folder, step, model, optimizer, scheduler):
    """Write everything that is needed to resume after this step.

    folder: a pathlib.Path on a disk that all ranks see; it need not be there yet
    step: how many optimizer steps have been taken; only after a kill is one saved again

    Once the first checkpoint is written, load() finds a complete one at every moment,
    also between any two calls that change the folder. The one before may be removed
    when this one is complete and load() would find it.
    """
    raise NotImplementedError


def load(folder, model, optimizer, scheduler):
    """Load the latest complete checkpoint, and return its step; 0 if there is none.

    All ranks load the same checkpoint. Afterwards the training continues to the last
    bit as if it had not been interrupted, random numbers included.
    """
    raise NotImplementedError
