#!/bin/bash
# Like three_runs_on_slurm.sh, but on this machine, which has no queue: one after another, while the shell waits.
#
#   cd examples && ./three_runs_on_one_machine.sh

set -euo pipefail

runs=$PWD/runs
submit() {
  ddp-hpc submit --cluster local --wait --runs-dir "$runs" "$@"
}

submit digits.yaml name=digits-train &&
  submit name=digits-evaluate resources.workers_per_node=1 \
    -- python evaluate.py "$runs/digits-train" --at-least accuracy=0.9 &&
  submit name=digits-export resources.workers_per_node=1 \
    -- python -m ddp_hpc export "$runs/digits-train" -o "$runs/digits-export/model.safetensors"
