"""Solutions of the exercises in 04_ddp_spawn.ipynb."""

# ---- exercise 1 ----------------------------------------------------------------------
tensor = [1, 1]  # shared memory: every process, the parent too, sees what each writes
numbers = [0, 0]  # pickled: each process wrote into a copy of its own
# A model's weights on a CPU are shared like the tensor. If you pass a model instead of
# making it in `worker`, all ranks update the same weights: each step is taken once per
# rank.


# ---- exercise 2 ----------------------------------------------------------------------
def environment(rank, nproc, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),  # all processes are on this machine
        "WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
