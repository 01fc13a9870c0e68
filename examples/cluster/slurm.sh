#!/bin/bash
# Two hosts of eight GPUs under Slurm, one torchrun agent on each; if one is lost, the job goes on with the
# other.  Run it from a folder that all hosts see, with FlatFSDP installed:
#
#     sbatch examples/cluster/slurm.sh
#
#SBATCH --job-name=pretrain-llama
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
# The job outlives a host.
#SBATCH --no-kill
# Two minutes before the time is up each rank is asked to save and end.
#SBATCH --signal=TERM@120
set -euo pipefail

# The batch script runs on the first host, which holds the rendezvous.
first=$(hostname)
# Ranks that start again need a store without the addresses of those that have ended.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun --no-kill --kill-on-bad-exit=0 --wait=0 \
    torchrun \
    --nnodes "1:$SLURM_NNODES" \
    --nproc-per-node 8 \
    --max-restarts 100 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:29400" \
    --rdzv-id "$SLURM_JOB_ID" \
    examples/pretrain_llama.py \
    --preset 1b \
    --dp-shard 8 --dp-replicate -1 \
    --lanes 16 --lane-block 8 --microbatches 16 \
    --deterministic \
    --out "out/$SLURM_JOB_NAME"
