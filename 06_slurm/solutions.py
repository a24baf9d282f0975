"""Solutions of the exercises in 06_slurm.ipynb."""


# ---- exercise 1 ----------------------------------------------------------------------
def read_ranks(environ):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    if "RANK" not in environ:
        names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]
    return tuple(int(environ[name]) for name in names)


# ---- exercise 2 ----------------------------------------------------------------------
def options(nodes, gpus, cores):
    per_node = [f"--gpus-per-node={gpus}", f"--ntasks-per-node={gpus}"]
    return [f"--nodes={nodes}", *per_node, f"--cpus-per-task={cores}"]
