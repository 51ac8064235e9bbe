"""Nodes whose language is not English."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("encoding", ["iso8859-9", "ascii"])
def test_what_a_recipe_prints_is_logged_in_utf_8_whatever_the_locale_can_write(encoding: str, tmp_path: Path) -> None:
    """Python takes the encoding of its output from the locale; this variable stands for one that is not installed here."""
    script = """
import sys
from pathlib import Path
from ddp_hpc.train.recording.rank_log import redirect_output
redirect_output(Path(sys.argv[1]), is_rank_zero=False)
print("e\\u011fitim \\u20ac", "\\ud800", flush=True)
"""
    log = tmp_path / "rank-0.log"
    environ = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}

    done = subprocess.run([sys.executable, "-c", script, log], env=environ, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert log.read_text(encoding="utf-8") == "e\u011fitim \u20ac \\ud800\n"
