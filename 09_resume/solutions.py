"""Solutions of the exercises in 09_resume.ipynb."""

import torch


# ---- exercise 1 ----------------------------------------------------------------------
# All that changes from step to step is saved, also the state of the random generator.
# The file gets its name when it is complete, so a save that is killed leaves the last
# checkpoint as it was.
def save(run, path):
    state = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "step": run.step,
        "random_state": torch.get_rng_state(),
    }
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def resume(run, path):
    state = torch.load(path, weights_only=True)
    for name in ("model", "optimizer", "scheduler"):
        getattr(run, name).load_state_dict(state[name])
    run.step = state["step"]
    torch.set_rng_state(state["random_state"])


# ---- exercise 2 ----------------------------------------------------------------------
# A run repeats its bits if it makes the same sums of the same numbers. Other shards, or
# micro-batches, add up in another order.
predictions = {
    # One process adds up the gradients of 48 images in another order than two.
    "1 process": "the same up to rounding",
    "2 processes": "the same bits",
    "3 processes": "the same up to rounding",
    # 48 images cannot be divided by 5.
    "5 processes": "refused",
    # This flag does not change what a step computes.
    "2 processes, --checkpoint-every 10": "the same bits",
    # A gradient is then the sum of two micro-batches' gradients.
    "2 processes, --grad-accum-steps 2": "the same up to rounding",
    "2 processes, --seed 1": "refused",
    # The random numbers follow from seed, step and rank.
    "2 processes, the network has dropout": "the same bits",
    "3 processes, the network has dropout": "different",
}
