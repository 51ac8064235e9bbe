"""Runs torchrun on one node, with the facts that it would guess wrong, and handles signals in its place.

    python -m ddp_hpc.job.node.torchrun_node --num-workers 4 --stop-signal USR2 --meet "ADDRESS PORT" -- OPTIONS ...

torchrun guesses from names by which address others reach this node. Where a node's own name means 127.0.1.1, as Debian's
installer has it, none would.

At SIGTERM, torchrun kills its workers after 30 s, perhaps during their last save; SIGUSR2 kills torchrun at once. And
Slurm's signals do not reach its workers, as each has a session of its own. So torchrun gets one, too, and this process
receives the signals in its place and passes them on to the workers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from ddp_hpc.base import processes
from ddp_hpc.cluster.rank_probe.folder import make_folder
from ddp_hpc.cluster.rendezvous.address import this_host
from ddp_hpc.cluster.rendezvous.choose_network import source_address
from ddp_hpc.cluster.rendezvous.worker_env import WorkerEnv, keep_users_values, node_variables, probe_variables
from ddp_hpc.cluster.slurm.allocation import step_task
from ddp_hpc.job.node.cpus import share_node_cpus
from ddp_hpc.job.node.python_environ import shorten_tmpdir
from ddp_hpc.job.node.start_sampler import end_sampling, start_sampling
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.run.run_dir.paths import RunDir

STOP_REPEAT_S = 1.0
"""How often a stop signal is repeated, for workers that were not started yet, or had no handlers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun to its end; return its exit code."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.node.torchrun_node", description=__doc__)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--cpus-per-worker", type=int)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--stop-signal", type=processes.signal_number, default="USR2", metavar="NAME")
    parser.add_argument("--meet", type=Endpoint.parse, required=True, metavar="'ADDRESS PORT'")
    parser.add_argument("options", nargs="+", help="torchrun's options, and the script that it starts")
    arguments = parser.parse_args(argv)
    processes.allow_open_files()  # torchrun holds a connection to each rank; each task compares the limit with its world
    processes.block_awaited_signals()
    interruptions = processes.block_interruptions()
    address = arguments.meet.address
    share = share_node_cpus(os.environ, arguments.num_workers, arguments.cpus_per_worker)
    made = node_variables(this_host().interface_towards(address), share.threads)
    node = WorkerEnv(process="torchrun's agent", variables=keep_users_values(made, os.environ))
    place = step_task(os.environ)
    rendezvous = [
        f"--rdzv-endpoint={arguments.meet.netloc}",
        f"--rdzv-conf=rank={place.node_rank}",
        f"--local-addr={source_address(address) or address}",
    ]
    probes = make_folder()
    shorten_tmpdir(probes, os.environ, says=place.node_rank == 0)
    environ = {**os.environ, **node.environ, **probe_variables(probes.path if probes else None, is_alone=True)}
    torchrun = start_torchrun([*rendezvous, *arguments.options], environ)
    sampler = start_sampling(
        RunDir(arguments.run), os.environ, attempt=arguments.attempt, node_rank=place.node_rank, num_gpus=arguments.gpus
    )
    try:
        return wait_for_torchrun(torchrun, arguments.stop_signal, interruptions)
    finally:
        if probes:
            probes.close()
        end_sampling(sampler)


def start_torchrun(options: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start torchrun in a session of its own, which ends with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_hpc.train.torchrun", *options],
        env=environ,
        start_new_session=True,
        preexec_fn=partial(processes.become_bound_child, os.getpid()),  # noqa: PLW1509  there are no threads here
    )


def wait_for_torchrun(
    torchrun: subprocess.Popen[bytes], stop_signal: int, interruptions: Collection[int], *, has_terminal: bool = False
) -> int:
    """Wait for torchrun; send the workload's stop signal to the workers it has started, once they have handlers.

    `interruptions` are blocked signals that mean the same as stop signals here. At a terminal, a second Ctrl-C kills torchrun, and
    the workers with it: where torchrun waits for another node, there is no worker that would stop.

    A worker whose Python has just started would be killed by the signal, and torchrun would report a failure.
    """
    is_stopping = is_interrupted = False
    while (code := torchrun.poll()) is None:
        number = processes.await_signal(STOP_REPEAT_S if is_stopping else 3600.0, interruptions)
        is_ctrl_c = has_terminal and number == processes.CTRL_C_SIGNAL
        if is_ctrl_c and is_interrupted:
            torchrun.kill()
        elif is_ctrl_c:
            is_interrupted = True
            with suppress(OSError):  # the terminal is gone
                sys.stderr.write("note: the workers save and exit now; Ctrl-C once more ends them at once\n")
        is_stopping = is_stopping or number in {*processes.STOP_SIGNALS, *interruptions}
        if is_stopping:
            children: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(torchrun.pid).children()
            processes.send_signal(
                (one.pid for one in children if processes.handles_stop_signal(one.pid, stop_signal)), stop_signal
            )
    return code


if __name__ == "__main__":
    sys.exit(main())
