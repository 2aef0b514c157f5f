#!/bin/bash
#SBATCH --job-name={{ work.name }}
#SBATCH --nodes={{ work.hosts }}
#SBATCH --ntasks-per-node={{ work.chips_per_host }}
#SBATCH --gpus-per-node={{ work.chips_per_host }}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=USR1@{{ work.grace_seconds }}
{% for name in ["partition", "account", "time"] if name in work.options %}
#SBATCH --{{ name }}={{ work.options[name] }}
{% endfor %}
{% if work.hosts_per_slice > 1 %}
{# Of topology/block: so many nodes of each block, and a block is an NVLink domain. #}
#SBATCH --segment={{ work.hosts_per_slice }}
{% endif %}
# {{ work.title }}
# One process per GPU: xla_dtensor.init_distributed() and jax.distributed.initialize() find
# coordinator, count and number in Slurm. {{ work.grace_seconds }} s before the time is up all get SIGUSR1;
# a program that saves then and exits with {{ PREEMPTED }} is queued again.
set -euo pipefail
{% for name, value in work.env.items() %}
export {{ name }}={{ value | sh }}
{% endfor %}

command=({{ work.command | map("sh") | join("\n  ") }})

status=0
srun --kill-on-bad-exit=1 {% if work.image is not none %}{{ ("--container-image=" ~ work.image) | sh }}{% endif %} bash -c '
{% if work.partition %}
  {{ work.partition | replace("NODE", "SLURM_NODEID") }}
{% endif %}
  exec "$@"
' bash "${command[@]}" || status=$?
if [ "$status" -eq {{ PREEMPTED }} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
