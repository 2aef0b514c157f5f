#!/bin/bash
# @@title
# Run it on each of the @@hosts nodes, with NODE_RANK from 0 to @@last_node. One process per GPU, which
# begins with xla_dtensor.init_distributed() or with jax.distributed.initialize(num_processes=
# int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"])).
set -euo pipefail
: "${MASTER_ADDR:?Set MASTER_ADDR to the host name of node 0}"
: "${NODE_RANK:?Set NODE_RANK to the number of this node}"
@@exports

command=(@@command)

torchrun --nnodes=@@hosts --nproc-per-node=@@chips_per_host --node-rank="$NODE_RANK" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" --no-python \
  --max-restarts=@@max_restarts \
  bash -c '
    export JAX_COORDINATOR_ADDRESS="$MASTER_ADDR:$((MASTER_PORT + 1))"
    export JAX_NUM_PROCESSES="$WORLD_SIZE" JAX_PROCESS_ID="$RANK" JAX_LOCAL_DEVICE_IDS="$LOCAL_RANK"
    @@partition
    exec "$@"
  ' bash "${command[@]}"
