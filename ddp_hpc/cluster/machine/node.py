"""Samples how busy this node is, beside the workers of one attempt, and writes it into the run directory.

    python -m ddp_hpc.cluster.machine.node RUN_DIR --attempt 0 --node-rank 1 --num-nodes 4 --gpus 8 --parent 4711 --root 4711

It is started beside the workers (`job.node.machine_use`), which are processes below the one that `--root` names. It ends when its standard
input is closed, or the process that `--parent` names has ended, after a last line. A file system or a driver that does not answer delays it alone.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base import processes
from ddp_hpc.cluster.machine.cgroups import Cgroups
from ddp_hpc.cluster.machine.gpus import GpuReader, visible_gpus
from ddp_hpc.cluster.machine.processes import ProcessTree
from ddp_hpc.cluster.machine.sampler import Sampler, line_s, pause_s
from ddp_hpc.cluster.slurm.allocation import cpu_grant, node_name
from ddp_hpc.run.run_dir.machine_use import append_use
from ddp_hpc.run.run_dir.paths import RunDir

LEAST_LINE_S = 1.0
"""A last interval that is shorter says little, and is not written."""


class Parent:
    """The process beside which this one runs.

    Raises:
        ProcessLookupError: if it has ended.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = processes.end_descriptor(pid)
        self._started = processes.start_ticks(pid)
        if self._started is None and self._fd is None:
            raise ProcessLookupError(pid)

    def is_over(self, seconds: float) -> bool:
        """Wait; tell whether the standard input was closed meanwhile, or the parent has ended."""
        # The children of the parent may hold the other end of the pipe, so its end alone does not tell.
        if self._fd is not None:
            return bool(select.select([0, self._fd], [], [], seconds)[0])
        return bool(select.select([0], [], [], seconds)[0]) or processes.start_ticks(self._pid) != self._started


def main(argv: Sequence[str] | None = None) -> int:
    """Sample until the standard input is closed."""
    arguments = _parse(argv)
    try:
        parent = Parent(arguments.parent)
    except ProcessLookupError:  # it has ended
        return 0
    processes.ignore_stop_signals()
    grant = cpu_grant(os.environ)
    sampler = Sampler(
        node_rank=arguments.node_rank,
        node=node_name(os.environ),
        num_gpus=arguments.gpus,
        gpus=GpuReader(visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), arguments.gpus)),
        processes=None if arguments.root is None else ProcessTree(arguments.root),
        cgroups=Cgroups(),
        granted=grant.num_of_job if grant else None,
    )
    _sample(sampler, RunDir(arguments.run), arguments.attempt, arguments.num_nodes, parent)
    return 0


def _sample(sampler: Sampler, run: RunDir, attempt: int, num_nodes: int, parent: Parent) -> None:
    began = written = time.monotonic()
    is_over = False
    _look(sampler)
    while not is_over:
        is_over = parent.is_over(pause_s(sampler.cost_s))
        _look(sampler)
        now = time.monotonic()
        if now - written >= (LEAST_LINE_S if is_over else line_s(now - began, num_nodes)):
            use, written = sampler.line(), now
            if use is not None:
                with suppress(OSError):  # the next line tries again
                    append_use(run, attempt, use)


def _look(sampler: Sampler) -> None:
    if warning := sampler.sample():
        with suppress(OSError):
            sys.stderr.write(f"{warning}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ddp_hpc.cluster.machine.node", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="how many GPUs of this node the job has")
    parser.add_argument("--parent", type=int, required=True, help="the process beside which this one runs")
    parser.add_argument("--root", type=int, help="the process below which the workers are, where it is to be seen")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:  # noqa: BLE001  the way out is the same for all
        code = 1
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # a thread may be inside of a driver that does not answer
