"""Writes down what it finds around itself, so that a test can compare it with what a plain Python shows."""

import atexit
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

NAMES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGIO, signal.SIGPIPE, signal.SIGINT)
OUT = Path(os.environ.get("OUT", ".")) / f"found-{os.environ.get('RANK', 'plain')}.json"


def of_child(queue: "multiprocessing.Queue[list[str]]") -> None:
    queue.put([__name__, os.path.basename(__file__)])


def found() -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "file": __file__,
        "name": __name__,
        "spec": None if __spec__ is None else __spec__.name,
        "package": __package__,
        "loader": type(__loader__).__name__,
        "cwd": os.getcwd(),
        "path": sys.path,
        "python_path": os.environ.get("PYTHONPATH"),
        "is_main": main.__dict__ is globals(),
        "flags": [sys.flags.optimize, sys.flags.isolated],
        "handlers": [str(signal.getsignal(number)) for number in NAMES],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": threading.active_count(),
        "stdin": sys.stdin.read(),
    }


def late() -> None:
    """End after the script's last line, as a thread of its own."""
    time.sleep(0.2)
    print("the thread has ended", flush=True)


if __name__ == "__main__":
    atexit.register(print, "the exit function was called")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=of_child, args=(queue,))
    child.start()
    answer = queue.get()
    child.join()
    OUT.write_text(json.dumps({**found(), "child": [*answer, child.exitcode]}))
    threading.Thread(target=late).start()
