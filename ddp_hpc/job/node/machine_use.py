"""Starts what samples how busy a node is (`ddp_hpc.cluster.machine.node`), beside the node's workers, and ends it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ddp_hpc.run.run_dir.paths import RunDir

BEGIN_S = 5.0
"""How long after its workers an agent starts it: a training that is over sooner needs no figures."""
LEAVE_S = 1.0
"""How long it may take for its last record."""
_APART = 'exec 3<&0; "$@" <&3 & exit 0'
"""Starts a command whose parent exits at once. A shell gives what it starts with `&` another standard input, hence the 3."""


@dataclass(kw_only=True)
class MachineSampler:
    """The process that samples, while it runs.

    Its parent is not the process that starts it: the children of an agent are workers, and a script's worker kills what its script has left.
    """

    run: RunDir
    environ: Mapping[str, str]
    attempt: int
    node_rank: int
    num_gpus: int
    """How many GPUs of this node the job has."""
    is_of_step: bool = False
    """Whether srun has started the workers, so that they are no children of the process that starts this."""
    _shell: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        """Start it."""
        # Looked for here: the process that samples has left this one's ancestors behind.
        root = _step_process() if self.is_of_step else os.getpid()
        numbers = [f"--attempt={self.attempt}", f"--node-rank={self.node_rank}", f"--gpus={self.num_gpus}"]
        more = [f"--parent={os.getpid()}", *([] if root is None else [f"--root={root}"])]
        argv = [sys.executable, "-m", "ddp_hpc.cluster.machine.node", str(self.run.path), *numbers, *more]
        # It ends when this end of its standard input is closed, and nothing but its end closes its standard output.
        with suppress(OSError):  # no process can be made: then the workers need what there is
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _APART, "sh", *argv],
                env={**self.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._shell.wait()

    def close(self) -> None:
        """Have it write its last record, and wait for that, but not for long: it may hang in a file system or a driver."""
        shell, self._shell = self._shell, None
        if shell is None or shell.stdin is None or shell.stdout is None:
            return
        with suppress(OSError):
            shell.stdin.close()
        with shell.stdout:
            select.select([shell.stdout], [], [], LEAVE_S)


def _step_process() -> int | None:
    """Return the process of Slurm that has started all tasks of this node's step; None where it is not to be seen."""
    import psutil  # late: only where srun has started several tasks

    with suppress(psutil.Error):
        return next((one.pid for one in psutil.Process().parents() if one.name() == "slurmstepd"), None)
    return None
