"""Solutions of the exercises in 04_ddp_spawn.ipynb."""

# ---- exercise 1 ----------------------------------------------------------------------
# torch passes a CPU tensor in shared memory, where the parent sees what each process
# writes. The list is pickled, and each process writes into a copy.
tensor = [1, 1]
numbers = [0, 0]
# A model's weights on a CPU are shared like the tensor. If you pass a model instead of
# making it in `worker`, all ranks update the same weights: each step is taken once per
# rank.


# ---- exercise 2 ----------------------------------------------------------------------
# torchrun sets these for each process, and init_process_group reads four of them. A
# machine with all processes has equal ranks and local ranks.
def environment(rank, nproc, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
