#!/bin/bash
# {{ work.title }}
# The VMs know their slice from their metadata: TPU_WORKER_ID and MEGASCALE_* are not set here.
# Nothing starts the command again: run this script's last call once more, or all of it after
# deleting the queued resource.
set -euo pipefail
{{ settings(work.options, {"PROJECT": "your project", "ZONE": "a zone with that accelerator"}) }}

name={{ work.name }}
where=(--project="$PROJECT" --zone="$ZONE")
queued=(gcloud compute tpus queued-resources)

"${queued[@]}" create "$name" "${where[@]}" \
{% if topology.cloud_name %}
  {{ ("--accelerator-type=" ~ topology.cloud_name) | sh }} \
{% else %}
  {{ ("--type=" ~ work.job.chip.cloud_names[0]) | sh }} {{ ("--topology=" ~ work.shape) | sh }} \
{% endif %}
  --runtime-version={{ runtime_version | sh }} \
{% if work.job.num_slices == 1 %}
  --node-id={{ work.name }}
{%- else %}
  --node-count={{ work.job.num_slices }} --node-prefix={{ work.name }}
{%- endif %}
{% if "capacity" in work.options %} --{{ work.options.capacity }}{% endif +%}

while true; do
  state="$("${queued[@]}" describe "$name" "${where[@]}" --format='value(state.state)')"
  case "$state" in
    ACTIVE) break ;;
    FAILED | SUSPENDING | SUSPENDED) echo "$name is $state" >&2; exit 1 ;;
  esac
  sleep "${WAIT_SECONDS:-30}"
done

# All {{ work.hosts }} hosts at once: by default gcloud starts 64 and waits for them to end.
"${queued[@]}" ssh "$name" "${where[@]}" --worker=all --node=all --batch-size={{ work.hosts }} \
  {{ ("--command=" ~ command) | sh }}

echo "When done: ${queued[*]} delete $name ${where[*]} --force"
