#!/bin/bash
# @@title
set -euo pipefail
@@settings

arguments=(
  --workload=@@name
  --cluster="$CLUSTER"
  --project="$PROJECT"
  --zone="$ZONE"
  --device-type=@@device_type
  @@count
  --priority=@@priority
  --max-restarts=@@max_restarts
  --restart-on-exit-codes=@@preempted
  --termination-grace-period-seconds=@@grace_seconds
  @@image
  @@env
  @@command
)
xpk workload create "${arguments[@]}"
