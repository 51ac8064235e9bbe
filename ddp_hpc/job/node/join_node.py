"""Starts the workers of one node, where another program has started one process for each node, by torchrun.

    python -m ddp_hpc.job.node.join_node RUN_DIR --stop-signal USR2 -- OPTIONS OF TORCHRUN ...

torchrun, in turn, starts `ddp_hpc.job.node.join` for each worker.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.patience import ask_once
from ddp_hpc.job.node.torchrun_node import start_torchrun, wait_for_torchrun
from ddp_hpc.run.run_dir.ledger import Cause, Ledger
from ddp_hpc.run.run_dir.paths import RunDir

RECORD_PATIENCE_S = 15.0
"""How long to wait for rank zero's record of the attempt's end."""
_TORCHRUN_VARIABLE_PREFIX = "PET_"
"""Beginning of the variables that torchrun takes for its options; here, all of them stand on its command line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun to its end; return the exit code that the program which started this node's process is to see."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.node.join_node", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--stop-signal", type=processes.signal_number, default="USR2", metavar="NAME")
    parser.add_argument("options", nargs="+", help="torchrun's options, and the module that it starts")
    arguments = parser.parse_args(argv)
    processes.block_awaited_signals()
    interruptions = processes.block_interruptions()  # a terminal may have started this process
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUN_VARIABLE_PREFIX)}
    torchrun = start_torchrun(arguments.options, environ)
    code = wait_for_torchrun(torchrun, arguments.stop_signal, interruptions, has_terminal=True)
    if code != exit_codes.FINISHED:
        return exit_codes.FAILED if code < 0 else code
    return _exit_code_of_end(RunDir(arguments.run))


def _exit_code_of_end(run: RunDir) -> int:
    """Return what it means that all workers have ended well: the run has finished, its user has stopped it, or there is more to do.

    The signal to stop may have come to another node; rank zero's node may be another one, too, so its record may be late.
    """
    deadline = time.monotonic() + RECORD_PATIENCE_S
    while time.monotonic() < deadline:
        if ask_once(run.done, run.done.exists, unknown=False):
            return exit_codes.FINISHED
        newest = ask_once(run.attempts, lambda: Ledger.read(run).newest, unknown=None)
        if newest is not None and newest.ending is not None:
            return exit_codes.FINISHED if newest.cause in {Cause.FINISHED, Cause.STOP_ASKED} else exit_codes.STOPPED
        time.sleep(0.2)
    return exit_codes.STOPPED  # to start a run that has finished once more does no harm


if __name__ == "__main__":
    sys.exit(main())
