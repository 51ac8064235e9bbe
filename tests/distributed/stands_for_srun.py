"""Stands in for srun: runs a command once for each node, passes standard input on to all, and exits after the last. No import of ours.

    python stands_for_srun.py '{"node1": "NETWORK NAMESPACE", "node2": ""}' COMMAND ...

A node without a namespace gets this machine's network. One whose value is null is not reached: its command does not start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress


def main(plan: dict[str, str | None], command: list[str]) -> None:
    tasks = []
    for node, namespace in plan.items():
        if namespace is not None:
            within = ["ip", "netns", "exec", namespace] if namespace else []
            tasks.append(subprocess.Popen([*within, *command, f"--name={node}"], stdin=subprocess.PIPE))
    pipes = [task.stdin for task in tasks if task.stdin]
    while line := sys.stdin.buffer.readline():
        for pipe in pipes:
            with suppress(BrokenPipeError):
                pipe.write(line)
                pipe.flush()
    for pipe in pipes:
        with suppress(BrokenPipeError):
            pipe.close()
    for task in tasks:
        task.wait()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
