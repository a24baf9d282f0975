#!/bin/bash
# Under Slurm: how do I start one torchrun on each node?
#
# In the job file (06_slurm/job.sbatch or 10_preemption/job.sbatch), ask for one task per
# node, with the CPUs of all its processes. Then write `bash recipes/torchrun_per_node.sh`
# in the place of `python`:
#
#     #SBATCH --ntasks-per-node=1
#     #SBATCH --cpus-per-task=32
#     srun ... bash recipes/torchrun_per_node.sh "$script" "$@"
#
# Each task becomes a torchrun, which starts a process for each GPU of its node, or where
# there are none for each CPU. If one of them fails, torchrun prints a summary of the
# errors, and the torchruns restart all processes, up to three times: the script has to
# resume (stage 09). If you need neither, srun alone is simpler.
gpus=${SLURM_GPUS_ON_NODE:-0}
processes=$((gpus > 0 ? gpus : SLURM_CPUS_PER_TASK))
export OMP_NUM_THREADS=$(((SLURM_CPUS_PER_TASK + processes - 1) / processes))

# Otherwise about half of the restarts fail: the new processes use the old ones' store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# The seconds from SIGTERM until torchrun kills its processes. Keep them below those of
# --signal. Versions of torch before March 2026 do not know it: there they are 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240

# The other nodes may not know this node's name.
address=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
# exec: otherwise this bash gets Slurm's signals, and not torchrun.
exec python -m torch.distributed.run \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$processes" --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
  --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --local-addr="$address" "$@"
