"""A user's script that decodes a file which it names in its error; it saves a file where it is asked to."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(source: str) -> None:
    """Decode the file."""
    try:
        json.loads(Path(source).read_text())
    except ValueError as error:
        raise ValueError(f"cannot read the index '{source}'") from error


if __name__ == "__main__":
    main(sys.argv[1])
