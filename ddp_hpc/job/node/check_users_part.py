"""Checks the user's part of runs before they are queued: `python -m ddp_hpc.job.node.check_users_part WORKER ANSWER CONFIG ...`.

It is a process of its own, because it imports the user's code, which may print, wait, crash or take memory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ddp_hpc.base.errors import ConfigError, text_of
from ddp_hpc.job.node.python_environ import exit_at_once, make_users_code_importable
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.workload.protocol import load_worker


def main(worker: str, answer: str, *configs: str) -> None:
    """Write to the file `answer` what is refused, and what this host cannot say."""
    make_users_code_importable(os.environ)
    refused, unchecked = "", list[str]()
    try:
        for config in configs:
            unchecked += load_worker(worker).check(load_resolved(Path(config)), os.environ)
    except ConfigError as error:
        refused = str(error)
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything, and the job will say more
        unchecked.append(f"{type(error).__name__}: {text_of(error)}")
    Path(answer).write_text(json.dumps([refused, list(dict.fromkeys(unchecked))]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    exit_at_once(0)
