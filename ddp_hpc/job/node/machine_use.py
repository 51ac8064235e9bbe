"""Starts what samples how busy a node is (`ddp_hpc.cluster.machine.node`), beside the node's workers, and ends it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ddp_hpc.cluster.machine.processes import step_parent
from ddp_hpc.run.run_dir.paths import RunDir

BEGIN_S = 5.0
"""How long after its workers an agent starts it: a training that is over sooner needs no figures."""
LEAVE_S = 1.0
"""How long it may take for its last line."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """Which node is sampled, in which attempt."""

    run: RunDir
    attempt: int
    node_rank: int
    num_nodes: int
    num_gpus: int
    """How many GPUs of this node the job has."""
    is_of_step: bool = False
    """Whether srun has started the workers, so that they are no children of the process that starts this."""


_APART = 'exec 3<&0; "$@" <&3 & exit 0'
"""Starts a command whose parent exits at once. A shell gives what it starts with `&` another standard input, hence the 3."""


class MachineSampler:
    """The process that samples, while it runs.

    Its parent is not the process that starts it: the children of an agent are workers, and a script's worker kills what its script has left.
    """

    def __init__(self, node: Node, environ: Mapping[str, str]) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        numbers = [f"--attempt={node.attempt}", f"--node-rank={node.node_rank}", f"--num-nodes={node.num_nodes}"]
        # Looked for here: the process that samples has left this one's ancestors behind.
        root = step_parent() if node.is_of_step else os.getpid()
        more = [f"--gpus={node.num_gpus}", f"--parent={os.getpid()}", *([] if root is None else [f"--root={root}"])]
        argv = [sys.executable, "-m", "ddp_hpc.cluster.machine.node", str(node.run.path), *numbers, *more]
        # It ends when this end of its standard input is closed, and nothing but its end closes its standard output.
        with suppress(OSError):  # no process can be made: then the workers need what there is
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _APART, "sh", *argv],
                env={**environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._shell.wait()

    def close(self) -> None:
        """Have it write its last line, and wait for that, but not for long: it may hang in a file system or a driver."""
        shell, self._shell = self._shell, None
        if shell is None or shell.stdin is None or shell.stdout is None:
            return
        with suppress(OSError):
            shell.stdin.close()
        with shell.stdout:
            select.select([shell.stdout], [], [], LEAVE_S)
