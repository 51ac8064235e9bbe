"""Stands in for srun and the agents of a job step: does as its plan says, in JSON on the command line. No import of ours."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(plan: dict[str, Any]) -> None:
    """Obey orders as planned.

    `note`: a file that gets a line for each start, order and signal. `prints`: noise before anything else. `start`,
    `stop`, `end`: reports (node rank, code) that answer such an order. `late`: the same, of the attempt before.
    `leaves_at`: the order after which the process is gone, and `code`, how it ends then. `stays`: whether it goes on when the line is closed.
    `is_deaf`: whether SIGTERM does nothing.
    """

    def note(text: str) -> None:
        with Path(plan["note"]).open("a") as file:
            file.write(text + "\n")

    def on_signal(number: int, _frame: object) -> None:
        note(signal.Signals(number).name)
        if not plan.get("is_deaf"):
            os._exit(1)

    signal.signal(signal.SIGTERM, on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    note(f"begun {os.getpid()}")
    sys.stdout.write(plan.get("prints", ""))
    attempt = -1
    for line in sys.stdin:
        order = json.loads(line)
        note(line.strip())
        if order["do"] == "start":
            attempt = order["attempt"]
            _report(plan.get("late", []), attempt - 1)
        _report(plan.get(order["do"], []), attempt)
        if order["do"] == plan.get("leaves_at"):
            sys.exit(plan.get("code", 0))
    while plan.get("stays"):
        time.sleep(0.05)


def _report(reports: list[tuple[int, int]], attempt: int) -> None:
    for node_rank, code in reports:
        sys.stdout.write(json.dumps({"node_rank": node_rank, "attempt": attempt, "code": code}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
