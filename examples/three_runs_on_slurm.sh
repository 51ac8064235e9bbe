#!/bin/bash
# Train on handwritten digits, evaluate the newest checkpoint, and export its weights if they are good enough: three jobs of Slurm.
# Each starts when the one before has finished, however often that was preempted.
#
#   cd examples && ./three_runs_on_slurm.sh
#
# After a failure, correct what was wrong, and start it again: runs that have finished, run or wait stay as they are.

set -euo pipefail

runs=$PWD/runs
submit() {
  ddp-hpc submit --runs-dir "$runs" "$@"
}
small=(
  resources.workers_per_node=1
  slurm.extra.kill_on_invalid_dep=yes # once the run before it has failed, Slurm cancels it; else it stays in the queue
)

submit digits.yaml name=digits-train
submit name=digits-evaluate --after digits-train "${small[@]}" \
  -- python evaluate.py "$runs/digits-train" --at-least accuracy=0.9
submit name=digits-export --after digits-evaluate "${small[@]}" \
  -- python -m ddp_hpc export "$runs/digits-train" -o "$runs/digits-export/model.safetensors"
