"""Debian's Chromium without a window: what it says of a page, what it asks the network for, and pictures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",  # it runs as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",  # a page's console, as lines with CONSOLE
)
_OF_CHROMIUM = re.compile(r"https?://[^/]*\.(?:google|googleapis|gvt1|gstatic)\.com/")
"""What Chromium asks for itself, whatever page is open."""


@dataclass(frozen=True)
class Visit:
    """What a browser did with a page."""

    console: list[str]
    """Lines that the page wrote, errors among them."""
    addresses: list[str]
    """All that was asked for, of this machine or of others."""
    document: str
    """The page after its scripts have run."""


def chromium() -> str:
    """Return the program; skip the test where it is missing, unless `DDP_HPC_REQUIRE_CHROMIUM` is set."""
    found = shutil.which("chromium")
    if found is None and not os.environ.get("DDP_HPC_REQUIRE_CHROMIUM"):
        pytest.skip("chromium is not installed (`apt-get install chromium`)")
    assert found is not None, "chromium is not installed, and DDP_HPC_REQUIRE_CHROMIUM is set"
    return found


def visit(page: Path, *flags: str) -> Visit:
    """Open a page, and return what happened."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "net.json")
        done = _run([*flags, f"--log-net-log={log}", "--dump-dom", page.as_uri()], folder)
        events = json.loads(log.read_text())["events"]
    asked = [event["params"]["url"] for event in events if "url" in event.get("params", {})]
    own = [one for one in dict.fromkeys(asked) if not _OF_CHROMIUM.match(one)]
    return Visit([line for line in done.stderr.splitlines() if "CONSOLE" in line], own, done.stdout)


def picture(page: Path, output: Path, *flags: str, width: int, height: int) -> None:
    """Draw the top of a page."""
    with tempfile.TemporaryDirectory() as folder:
        _run([*flags, f"--window-size={width},{height}", f"--screenshot={output}", page.as_uri()], folder)


def _run(words: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
    argv = [chromium(), *FLAGS, f"--user-data-dir={folder}/profile", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)


def framed(page: Path, width: int, height: int) -> Path:
    """Return a page that shows another one in a frame: a window of Chromium is at least 500 pixels wide."""
    path = page.with_name(f"frame-{width}-{page.name}")
    path.write_text(
        f'<!doctype html><title>empty</title><body style="margin:0"><iframe src="{page.name}" style="border:0;width:{width}px;height:{height}px"></iframe>'
        "<script>onmessage = (event) => { document.title = event.data; };</script>"
    )
    return path
