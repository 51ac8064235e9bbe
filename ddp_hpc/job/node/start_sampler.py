"""Starts what samples how busy a node is (`ddp_hpc.cluster.machine.sampler`), beside the node's workers, and ends it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from ddp_hpc.run.run_dir.paths import RunDir

START_DELAY_S = 5.0
"""How long after its workers an agent starts it: a training that is over sooner needs no figures."""
EXIT_TIMEOUT_S = 1.0
"""How long it may take for its last record."""
_DETACH_COMMAND = 'exec 3<&0; "$@" <&3 & exit 0'
"""Starts a command whose parent exits at once. A shell gives what it starts with `&` another standard input, hence the 3."""

SamplerProcess = subprocess.Popen[bytes]
"""The shell that has started the process that samples; its pipes are that one's."""


def start_sampling(  # noqa: PLR0913  which node of which attempt
    run: RunDir, environ: Mapping[str, str], *, attempt: int, node_rank: int, num_gpus: int, is_of_step: bool = False
) -> SamplerProcess | None:
    """Start the process that samples until `end_sampling`; None where no process can be made.

    `num_gpus` is how many GPUs of this node the job has; with `is_of_step`, srun has started the workers, so that they are no
    children of this process. Its parent is not this process: the children of an agent are workers, and a script's worker kills what
    its script has left.
    """
    # Looked for here: the process that samples has left this one's ancestors behind.
    root = _find_slurmstepd_pid() if is_of_step else os.getpid()
    numbers = [f"--attempt={attempt}", f"--node-rank={node_rank}", f"--gpus={num_gpus}"]
    more = [f"--parent={os.getpid()}", *([] if root is None else [f"--root={root}"])]
    argv = [sys.executable, "-m", "ddp_hpc.cluster.machine.sampler", str(run.path), *numbers, *more]
    # It ends when this end of its standard input is closed, and nothing but its end closes its standard output.
    shell = None
    with suppress(OSError):  # the workers need what there is
        command = ["/bin/sh", "-c", _DETACH_COMMAND, "sh", *argv]
        shell = subprocess.Popen(command, env={**environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        shell.wait()
    return shell


def end_sampling(shell: SamplerProcess | None) -> None:
    """Have it write its last record, and wait for that, but not for long: it may hang in a file system or a driver."""
    if shell is None or shell.stdin is None or shell.stdout is None:
        return
    with suppress(OSError):
        shell.stdin.close()
    with shell.stdout:
        select.select([shell.stdout], [], [], EXIT_TIMEOUT_S)


def _find_slurmstepd_pid() -> int | None:
    """Return the process of Slurm that has started all tasks of this node's step; None where it is not to be seen."""
    import psutil  # late: only where srun has started several tasks

    with suppress(psutil.Error):
        return next((one.pid for one in psutil.Process().parents() if one.name() == "slurmstepd"), None)
    return None
