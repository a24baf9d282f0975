#!/bin/bash
# My script reads RANK, WORLD_SIZE and LOCAL_RANK, and I cannot change it: how does srun
# start it?
#
# In the job file (06_slurm/job.sbatch), write `bash recipes/ranks_from_srun.sh python` in
# the place of `python`. Each task then has its numbers under torchrun's names, too:
#
#     srun ... bash recipes/ranks_from_srun.sh python "$script" "$@"
#
# The job file exports MASTER_ADDR and MASTER_PORT. The names have to be set here, in the
# task: the job file itself runs once, and has no rank.
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
exec "$@" # so that your script gets Slurm's signals, and not this bash
