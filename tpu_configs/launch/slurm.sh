#!/bin/bash
#SBATCH --job-name=@@name
#SBATCH --nodes=@@hosts
#SBATCH --ntasks-per-node=@@chips_per_host
#SBATCH --gpus-per-node=@@chips_per_host
#SBATCH --exclusive
@@directives
# @@title
# One process per GPU: jax.distributed.initialize() finds coordinator, count and number in Slurm.
set -euo pipefail
@@exports

command=(@@command)

srun --kill-on-bad-exit=1 @@image bash -c '
  @@partition
  exec "$@"
' bash "${command[@]}"
