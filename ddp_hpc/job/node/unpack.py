"""Put an image or a packed environment on this node's own disk; one of these runs on each node of the job.

    srun --ntasks-per-node=1 python -m ddp_hpc.job.node.unpack SOURCE TARGET [PACKAGE] --mark MARK
    srun --ntasks-per-node=1 python -m ddp_hpc.job.node.unpack FOLDER --mark MARK

prints a node's answer in the short lines of `slurm.framing`. The target appears by one rename: it is whole, or it is not there. Beside it, `import/` links
to PACKAGE. With one argument, the folder is taken away.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.cluster.containers import is_archive
from ddp_hpc.cluster.slurm.allocation import node_name
from ddp_hpc.cluster.slurm.framing import framed

_MAX_GROWTH = 4
"""How many times larger than its archive an environment may be."""


def unpack(source: Path, target: Path) -> int:
    """Copy or unpack, unless it is there already; return how many bytes were read. Raise OSError where it fails."""
    _make_private_dir(target.parent)
    if target.exists():  # several nodes may share a disk
        return 0
    num_bytes = source.stat().st_size
    needed, free = (num_bytes * (_MAX_GROWTH if is_archive(source.name) else 1), shutil.disk_usage(target.parent).free)
    if free < needed:
        raise OSError(
            f"{target.parent} has {free / 1e9:.1f} GB free, but up to {needed / 1e9:.1f} GB are needed; free space there, or set another `stage.dir`"
        )
    beside = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        if is_archive(source.name):
            beside.mkdir()
            into = ["--directory", str(beside), "--no-same-owner"]
            _run(["tar", "--extract", "--file", str(source), *into], f"unpack {source}")
        else:
            shutil.copyfile(source, beside)
        beside.rename(target)  # atomic: other nodes see the whole target, or none (rename(2))
    except OSError:
        _remove(beside)
        if not target.exists():  # else another node was faster
            raise
        return 0
    if is_archive(source.name):
        _relocate(target)
    return num_bytes


def _make_private_dir(folder: Path) -> None:
    """Make a folder that only this user can write to. Its name can be guessed, so refuse one that another user has made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(
            f"{folder} exists already, but is not a directory that only you can write to; remove it, or set another `stage.dir`"
        )


def link_package(package: Path, folder: Path) -> None:
    """Link the package into `folder/import`, so that a Python with this path imports it, and nothing beside it."""
    link = folder / "import" / package.name
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(package)


def _relocate(target: Path) -> None:
    """Relocate an unpacked environment, and check that its Python starts."""
    python, again = target / "bin" / "python", target / "bin" / "conda-unpack"
    try:
        if again.exists():  # of conda-pack: it writes the new place into scripts
            _run([str(python), str(again)], "relocate the environment")
        _run([str(python), "-c", ""], "start in the environment")
    except OSError:
        _remove(target)
        raise


def _run(argv: Sequence[str], what: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise OSError(f"{Path(argv[0]).name} could not {what}: {last_line}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Copy, unpack or remove on this node; print the result."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.node.unpack", description=__doc__)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--mark", required=True, help="marks the lines of the answer")
    arguments = parser.parse_args(argv)
    source, *rest = arguments.paths
    began, error, num_bytes = time.monotonic(), "", 0
    try:
        if rest:
            num_bytes = unpack(Path(source), Path(rest[0]))
            if rest[1:]:
                link_package(Path(rest[1]), Path(rest[0]).parent)
        else:
            _remove(Path(source))
    except OSError as problem:
        error = str(problem)
    answer = {"error": error, "seconds": time.monotonic() - began, "num_bytes": num_bytes}
    sys.stdout.write(framed(answer, node=node_name(os.environ), mark=arguments.mark))
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
