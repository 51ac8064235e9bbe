#!/usr/bin/python3
"""Run the lab's command line: `python3 tests/slurm/lab COMMAND`."""

from __future__ import annotations

import sys
from pathlib import Path

# Python put this folder first; our modules are found from the checkout instead, whatever directory one calls from.
sys.path[0] = str(Path(__file__).resolve().parents[3])

from tests.slurm.lab.command_line import main  # noqa: E402  the path comes first

if __name__ == "__main__":
    main()
