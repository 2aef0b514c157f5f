#!/bin/bash
# {{ work.title }}
# Run it on each of the {{ work.hosts }} nodes, with NODE_RANK from 0 to {{ work.hosts - 1 }}. One process per GPU, which
# begins with xla_dtensor.init_distributed() or with jax.distributed.initialize(num_processes=
# int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"])).
set -euo pipefail
: "${MASTER_ADDR:?Set MASTER_ADDR to the host name of node 0}"
: "${NODE_RANK:?Set NODE_RANK to the number of this node}"
{% for name, value in work.env.items() %}
export {{ name }}={{ value | sh }}
{% endfor %}

command=({{ work.command | map("sh") | join("\n  ") }})

torchrun --nnodes={{ work.hosts }} --nproc-per-node={{ work.chips_per_host }} --node-rank="$NODE_RANK" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" --no-python \
  --max-restarts={{ work.count("max_restarts") }} \
  bash -c '
    export JAX_COORDINATOR_ADDRESS="$MASTER_ADDR:$((MASTER_PORT + 1))"
    export JAX_NUM_PROCESSES="$WORLD_SIZE" JAX_PROCESS_ID="$RANK" JAX_LOCAL_DEVICE_IDS="$LOCAL_RANK"
{% if work.partition %}
    {{ work.partition | replace("NODE", "GROUP_RANK") }}
{% endif %}
    exec "$@"
  ' bash "${command[@]}"
