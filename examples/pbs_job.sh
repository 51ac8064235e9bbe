#!/bin/bash
#PBS -N my_run
#PBS -l select=2:ncpus=32:mpiprocs=1:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=04:00:00
#PBS -r y
#PBS -j oe

# Train on two whole nodes of PBS Professional. Copy this file beside your configuration, change the lines above and the next four,
# and start the run there with `qsub -q QUEUE -A ACCOUNT pbs_job.sh`; the same command resumes it. Never run on PBS itself: a test runs
# it with a stand-in for pbsdsh.

cd "$PBS_O_WORKDIR" || exit 2 # where you called qsub, on a file system that all nodes share
run=my_run config=my_run.yaml
python=$PWD/.venv/bin/python
stop_after_s=$((4 * 3600 - 120)) # two minutes before the walltime ends

nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
read -r first_node < "$PBS_NODEFILE"
port=$((10000 + ${PBS_JOBID%%[^0-9]*} % 20000)) # another one for each job

# PBS gives what it starts on a node next to no environment: load modules and set variables in these quotes.
# shellcheck disable=SC2016 # the node's shell fills in the variables
pbsdsh -- /bin/bash -c 'cd "$0" && exec "$@" --node-rank="$PBS_NODENUM"' "$PWD" \
  "$python" -m ddp_hpc join "$config" --nnodes="$nodes" --master-addr="$first_node" --master-port="$port" &
started=$!

trap 'stop_after_s=0' TERM # qdel
while kill -0 "$started" 2> /dev/null && ((SECONDS < stop_after_s)); do sleep 2; done
if kill -0 "$started" 2> /dev/null; then
  "$python" -m ddp_hpc stop "$run" # all ranks commit a checkpoint and exit
fi
wait "$started"
code=$?
echo "If $run has not finished (ddp-hpc status $run), continue it with qsub."
exit "$code"
