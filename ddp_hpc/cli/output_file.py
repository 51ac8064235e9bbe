"""The file that a user has a command write, by `-o`; `-` is standard output."""

from __future__ import annotations

import sys
from pathlib import Path

from ddp_hpc.base.durable import output_at

STDOUT = Path("-")


def write_output(output: Path, text: str) -> None:
    """Write a text, as UTF-8, to a file and print the file's path; or, for `-`, print the text and nothing else.

    Raises:
        ConfigError: if it cannot be a file.
        OSError: if it cannot be written; where it is a file, with its path as `filename`, and an older file there stays as it is.
    """
    if output != STDOUT:
        with output_at(output) as path:
            path.write_text(text, encoding="utf-8")
        print(output)
    elif sys.stdout.isatty():
        print(text)
    else:  # what reads it goes by the encoding that the text itself names
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
