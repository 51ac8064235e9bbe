"""Build containers/Dockerfile for real, by Debian's buildah and without a registry: on a Debian that is made here.

    python -m tests.campaigns.dockerfile

As root; it takes about 20 GB of disk while it runs. The build itself runs the image's self-test.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.debian import make_debian
from tests.campaigns.written import RESULTS, ROOT, add_row, stamp
from tests.slurm.lab.packages import apt_install

BASE = "localhost/debian-with-python"
IMAGE = "localhost/ddp_hpc"
NEEDED_GB = 25


class BuildError(Exception):
    """A command of buildah's failed; the text is its output."""


@dataclass(frozen=True)
class Buildah:
    """Buildah with a storage of its own, which needs neither overlayfs nor a daemon."""

    storage: Path

    def __call__(self, *words: str) -> str:
        """Run a command; return its output.

        Raises:
            BuildError: where it fails.
        """
        where = ["--root", str(self.storage / "root"), "--runroot", str(self.storage / "run")]
        argv = ["buildah", *where, "--storage-driver", "vfs", *words]
        done = subprocess.run(
            argv, cwd=ROOT, env=surroundings(self.storage), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BuildError(f"`{' '.join(argv)}` ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
        return done.stdout + done.stderr


def surroundings(storage: Path) -> dict[str, str]:
    """Return the environment of buildah: what it unpacks needs a large disk."""
    return {**os.environ, "TMPDIR": str(storage), "BUILDAH_ISOLATION": "chroot"}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 where it cannot be built, 2 where that cannot be tried here."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.dockerfile", description=__doc__)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where to put what it needs meanwhile")
    arguments = parser.parse_args(argv)
    free_gb = shutil.disk_usage(arguments.disk).free / 2**30
    if os.geteuid() or free_gb < NEEDED_GB or not shutil.which("apt-get"):
        say(f"error: it takes root, apt-get and {NEEDED_GB} GB of disk ({free_gb:.0f} are free in {arguments.disk})")
        return 2
    if shutil.which("buildah") is None:
        apt_install(["buildah"])
    place, began = Path(tempfile.mkdtemp(prefix="ddp_hpc-dockerfile-", dir=arguments.disk)), time.monotonic()
    row: dict[str, Any] = {"engine": "buildah", "verdict": "FAIL", **stamp()}
    try:
        row |= build(Buildah(place), place)
        row["verdict"] = "PASS"
    except BuildError as error:
        row["problem"] = str(error)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    row["seconds"] = round(time.monotonic() - began)
    add_row(RESULTS / "dockerfile.json", row, key="engine")
    say(json.dumps(row, indent=1))
    return int(row["verdict"] != "PASS")


def build(buildah: Buildah, place: Path) -> dict[str, Any]:
    """Return what was built, and of what."""
    base = debian_image(buildah, place)
    say("building (some minutes) ...")
    said = buildah(
        *("build", "--isolation", "chroot", "--pull-never", "--build-arg", f"BASE={BASE}"),
        *("--file", "containers/Dockerfile", "--tag", IMAGE, "."),
    )
    tested = re.search(r"^good: .*$", said, re.MULTILINE)
    if tested is None:
        raise BuildError(f"the image's self-test said nothing:\n{said[-2000:]}")
    settings = json.loads(buildah("inspect", "--type", "image", IMAGE))["OCIv1"]
    version = subprocess.run(["buildah", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    return {
        "version": version,
        "base": base,
        "self_test": tested.group().removeprefix("good: "),
        "path": next(word for word in settings["config"]["Env"] if word.startswith("PATH=")),
        "labels": sorted(settings["config"]["Labels"]),
        "machine": platform.machine(),
    }


def debian_image(buildah: Buildah, place: Path) -> str:
    """Make the image that the Dockerfile's `BASE` names; return which Debian it is."""
    tree = place / "debian"
    make_debian(tree)
    container = buildah("from", "scratch").strip()
    buildah("add", container, str(tree), "/")
    buildah("commit", "--rm", container, BASE)
    release = (tree / "etc/debian_version").read_text().strip()
    shutil.rmtree(tree)
    return f"Debian {release}, by mmdebstrap"


def say(text: str) -> None:
    """Print a line at once: it lasts a while."""
    print(text, flush=True)  # noqa: T201  its output


if __name__ == "__main__":
    sys.exit(main())
