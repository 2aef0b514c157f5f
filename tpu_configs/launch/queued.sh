#!/bin/bash
# @@title
# The VMs know their slice from their metadata: TPU_WORKER_ID and MEGASCALE_* are not set here.
# Nothing starts the command again: run this script's last call once more, or all of it after
# deleting the queued resource.
set -euo pipefail
@@settings

name=@@name
where=(--project="$PROJECT" --zone="$ZONE")
queued=(gcloud compute tpus queued-resources)

"${queued[@]}" create "$name" "${where[@]}" \
  @@slice_type \
  --runtime-version=@@runtime_version \
  @@nodes

while true; do
  state="$("${queued[@]}" describe "$name" "${where[@]}" --format='value(state.state)')"
  case "$state" in
    ACTIVE) break ;;
    FAILED | SUSPENDING | SUSPENDED) echo "$name is $state" >&2; exit 1 ;;
  esac
  sleep "${WAIT_SECONDS:-30}"
done

# All @@hosts hosts at once: by default gcloud starts 64 and waits for them to end.
"${queued[@]}" ssh "$name" "${where[@]}" --worker=all --node=all --batch-size=@@hosts \
  @@command

echo "When done: ${queued[*]} delete $name ${where[*]} --force"
