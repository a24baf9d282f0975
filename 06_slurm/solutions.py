"""Solutions of the exercises in this stage's notebooks."""

# ---- exercise 1 ----------------------------------------------------------------------
# The batch script runs once, on the first node, where SLURM_PROCID is 0. It exports
# that 0 to all tasks. In a training, four processes would all try to be rank 0. Remedy:
# translate the names in each task, as setup() does, or inside the `bash -c` of srun.
predicted = [0, 0, 0, 0]


# ---- exercise 2 ----------------------------------------------------------------------
# Slurm counts per node: 4 nodes with 2 GPUs, 2 processes and 2 x 16 cores each.
# --batch-size is the global batch, so it stays.
command = (
    "sbatch --nodes=4 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=16"
    " 06_slurm/job.sbatch --batch-size 256"
)


# ---- two_machines.ipynb --------------------------------------------------------------
# The one of gloo, `Gloo connectFullMesh failed`: each rank still asks its machine what
# its name means. The other one is gone, because --node-rank=0 opens the port whatever
# the address is called.


# ---- when_it_hangs.ipynb -------------------------------------------------------------
# Rank 1 reports the error, because it is the one that waits. Rank 0 is killed without
# having printed one: the message comes from a rank that has done nothing wrong.
