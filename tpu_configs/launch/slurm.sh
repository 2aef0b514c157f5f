#!/bin/bash
#SBATCH --job-name=@@name
#SBATCH --nodes=@@hosts
#SBATCH --ntasks-per-node=@@chips_per_host
#SBATCH --gpus-per-node=@@chips_per_host
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=@@signal
@@directives
# @@title
# One process per GPU: xla_dtensor.init_distributed() and jax.distributed.initialize() find
# coordinator, count and number in Slurm. @@grace_seconds s before the time is up all get SIGUSR1;
# a program that saves then and exits with @@preempted is queued again.
set -euo pipefail
@@exports

command=(@@command)

status=0
srun --kill-on-bad-exit=1 @@image bash -c '
  @@partition
  exec "$@"
' bash "${command[@]}" || status=$?
if [ "$status" -eq @@preempted ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
