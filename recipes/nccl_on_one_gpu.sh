#!/bin/bash
# I have one GPU: how do I run my script with nccl and several ranks?
#
# By default nccl refuses: "Duplicate GPU detected". It compares only GPUs of the same
# machine, and NCCL_HOSTID names a rank's machine. So let each rank be a machine of its
# own: one torchrun for each, as on several machines, and a different name for each.
#
#     $ bash recipes/nccl_on_one_gpu.sh 2 03_ddp_launch/train.py --epochs 1
#
# It shows that a script works with nccl: its collectives, its groups, its order of calls,
# and the same weights as one process. It shows nothing of speed, since the ranks take
# turns on the GPU and send over TCP (4 ms for an all-reduce of one number), nothing of
# NVLink or InfiniBand, and not that each local rank takes its own GPU: here, each is 0.
# NCCL does not promise that this works. Seen with two to four ranks on an H200, torch
# 2.11, NCCL 2.28.9. NCCL 2.30 and later, as in torch 2.14, also allow two ranks on one
# GPU themselves, by NCCL_MULTI_RANK_GPU_ENABLE=1 (seen with 2.31.2).
# Without a GPU, the ranks use gloo. PORT=29501 takes another port.
ranks=$1
if [[ ! $ranks =~ ^[1-9][0-9]*$ || $# -lt 2 ]]; then
  echo "nccl_on_one_gpu.sh: error: not a number of ranks and a script: $*" >&2
  exit 2
fi
shift
for ((i = 0; i < ranks; i++)); do
  NCCL_HOSTID=machine$i NCCL_SOCKET_IFNAME=lo torchrun \
    --nnodes="$ranks" --node-rank=$i --nproc-per-node=1 \
    --master-addr=127.0.0.1 --master-port="${PORT:-29500}" "$@" &
done
trap 'kill $(jobs -p)' INT TERM
for ((i = 0; i < ranks; i++)); do
  wait -n || { code=$?; kill $(jobs -p); wait; exit $code; }
done 2>/dev/null
