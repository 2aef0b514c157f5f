#!/bin/bash
# {{ work.title }}
set -euo pipefail
{{ settings(work.options, {"CLUSTER": "your GKE cluster", "PROJECT": "your project", "ZONE": "its zone"}) }}

arguments=(
  --workload={{ work.name }}
  --cluster="$CLUSTER"
  --project="$PROJECT"
  --zone="$ZONE"
  --device-type={{ device_type | sh }}
  {{ count }}
  --priority={{ work.options.get("priority", "medium") | sh }}
  --max-restarts={{ work.count("max_restarts") }}
  --restart-on-exit-codes={{ PREEMPTED }}
  --termination-grace-period-seconds={{ work.grace_seconds }}
{% if work.image is not none %}
  {{ ("--docker-image=" ~ work.image) | sh }}
{% endif %}
{% for name, value in work.env.items() %}
  {{ ("--env=" ~ name ~ "=" ~ value) | sh }}
{% endfor %}
  {{ ("--command=" ~ command) | sh }}
)
xpk workload create "${arguments[@]}"
