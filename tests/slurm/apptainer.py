"""A real Apptainer and small images for tests; nothing of it is installed but squashfs-tools.

Debian has Apptainer in sid alone, built for a newer C library than Debian 12's. Of that library's new symbols it imports
`__isoc23_strtol` and `__isoc23_strtoul` only, which differ from the older `strtol` and `strtoul` in that they read `0b101`
as well. `downgrade` points them there, and refuses a build that imports anything else. A trick for a test bench: no user
should do it.
"""

from __future__ import annotations

import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.lab.packages import apt_install
from tests.slurm.lab.settings import ROOT
from tests.slurm.lab.tools import LabError, attempt, sh

FOLDER = ROOT / ".slurm-lab" / "apptainer"
SYSTEM_PYTHON = Path("/usr/bin/python3")


class NoApptainerError(Exception):
    """This machine cannot have one; the message says why."""


@dataclass(frozen=True)
class Apptainer:
    """Where it is, and what makes it find its helpers."""

    program: Path

    @property
    def bin_dir(self) -> Path:
        return self.program.parent

    def make_sandbox(self, path: Path) -> Path:
        """Make an image that is a directory: hardly more than mount points, and a Python environment without packages.

        Programs come from the host's /usr, packages from the tests' own environment: see `binds`.
        """
        for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "var/tmp", "root", "home", "opt/venv/bin"):
            (path / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (path / name).symlink_to(f"usr/{name}")
        for name in ("passwd", "group", "resolv.conf", "hosts", "localtime"):
            (path / "etc" / name).touch()
        (path / "opt/venv/bin/python").symlink_to(SYSTEM_PYTHON)
        (path / "opt/venv/pyvenv.cfg").write_text(f"home = {SYSTEM_PYTHON.parent}\n")
        (path / _packages_inside()).mkdir(parents=True)
        return path

    def make_sif(self, sandbox: Path, path: Path) -> Path:
        """Make an image that is a file."""
        if not shutil.which("mksquashfs"):
            apt_install(["squashfs-tools"])
        sh(self.program, "build", path, sandbox)
        return path

    @property
    def binds(self) -> str:
        """What the images need of the host, as `container.binds`."""
        return f"[/usr:/usr:ro, {sysconfig.get_path('purelib')}:/{_packages_inside()}:ro]"


PYTHON_INSIDE = "/opt/venv/bin/python"


def _packages_inside() -> str:
    return f"opt/venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def get() -> Apptainer:
    """Return it, fetched from the Debian archive that this machine uses where that has not been done yet.

    Raises:
        NoApptainerError: where it cannot be had, or its images would not run the tests' packages.
    """
    version = attempt(SYSTEM_PYTHON, "-c", "import sys; print(*sys.version_info[:2], sep='.')").stdout.strip()
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if version != ours:
        raise NoApptainerError(
            f"the images' Python is {SYSTEM_PYTHON}, {version}, and the tests' packages are {ours}'s"
        )
    apptainer = Apptainer(FOLDER / "usr" / "bin" / "apptainer")
    try:
        if not apptainer.program.exists() or attempt(apptainer.program, "--version").returncode:
            _fetch()
        sh(apptainer.program, "--version")
    except (LabError, OSError, DowngradeError) as error:
        raise NoApptainerError(f"Apptainer cannot be had: {error}") from error
    return apptainer


def _fetch() -> None:
    """Download the package of sid, unpack it beside the cluster's files, and make it run here."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    beside = _made(FOLDER.parent) / "apptainer.new"  # dpkg makes the last directory alone
    shutil.rmtree(beside, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        package = _download(Path(scratch))
        sh("dpkg", "-x", package, beside)
    library = beside / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    for program in (beside / "usr" / "bin" / "apptainer", library / "apptainer" / "bin" / "starter"):
        program.write_bytes(downgrade(program.read_bytes()))
    # Moved, the program looks for /usr/etc below its new place, and its starter for etc and var below /usr/lib.
    (beside / "etc" / "apptainer").rename(_made(beside / "usr" / "etc") / "apptainer")
    (beside / "usr" / "lib" / "etc").symlink_to("../etc")
    for name in ("usr/lib/var/lib", "usr/var/lib"):
        _made(beside / name / "apptainer" / "mnt" / "session")
    beside.rename(FOLDER)


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _download(scratch: Path) -> Path:
    """Download by an apt that knows sid alone and leaves the system's own lists and settings as they are."""
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        _made(scratch / name)
    codename = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    uris = sh(
        "apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {codename[1] if codename else ''}"
    ).split()
    if not uris:
        raise LabError("apt-get knows no archive of Debian; `apt-get update` may help")
    sources = scratch / "sources.list"
    sources.write_text(f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {uris[0]} sid main\n")
    places = {"Etc::sourcelist": "sources.list", "Etc::sourceparts": "parts", "Etc::preferencesparts": "parts"}
    places |= {"Etc::preferences": "/dev/null", "State::lists": "lists", "Cache": "cache"}
    options = [f"-oDir::{key}={scratch / place}" for key, place in places.items()]
    apt = ["apt-get", "-qq", "-oAPT::Sandbox::User=root", *options]
    sh(*apt, "update")
    done = subprocess.run([*apt, "download", "apptainer/sid"], cwd=scratch, capture_output=True, text=True, check=False)
    found = next(scratch.glob("apptainer_*.deb"), None)
    if found is None:
        raise LabError(f"sid's package cannot be downloaded: {done.stderr.strip()}")
    return found


# --- making it run with an older C library -----------------------------------------------------------------------------


class DowngradeError(Exception):
    """The program needs more of the newer C library than a new name for an old function."""


DYNSYM, VERSYM, VERNEED = 11, 0x6FFFFFFF, 0x6FFFFFFE
NEWER, OLDER, OLDEST = b"GLIBC_2.38", b"GLIBC_2.34", b"GLIBC_2.2.5"
RENAMED = b"__isoc23_"


def downgrade(program: bytes) -> bytes:
    """Return an ELF program for 64 bits that wants `strto...` of glibc 2.34 where it wanted `__isoc23_strto...` of 2.38.

    Raises:
        DowngradeError: where it wants anything else of 2.38.
    """
    image = bytearray(program)
    sections = {section[1]: section for section in _sections(image)}
    symbols, versions, needs = (sections[kind] for kind in (DYNSYM, VERSYM, VERNEED))
    names_at = _sections(image)[symbols[6]][4]
    of_libc = list(_needs_of_libc(image, needs[4], names_at))
    newer = {index for name, _, index in of_libc if name == NEWER}
    known = {name: (at, index) for name, at, index in of_libc}
    if not newer:
        return bytes(image)
    if OLDER not in known or OLDEST not in known:
        raise DowngradeError(f"it wants nothing of {OLDER.decode()} or {OLDEST.decode()}")
    for number in range(symbols[5] // 24):
        symbol_at, version_at = symbols[4] + 24 * number, versions[4] + 2 * number
        (version,) = struct.unpack_from("<H", image, version_at)
        if version & 0x7FFF not in newer:
            continue
        (name_at,) = struct.unpack_from("<I", image, symbol_at)
        name = _text(image, names_at + name_at)
        if not name.startswith(RENAMED + b"strto"):
            raise DowngradeError(f"it wants {name.decode()} of {NEWER.decode()}")
        struct.pack_into("<I", image, symbol_at, name_at + len(RENAMED))
        struct.pack_into("<H", image, version_at, known[OLDEST][1])
    wanted, instead = known[NEWER][0], known[OLDER][0]
    for field in (0, 8):  # the name's hash, and where it lies
        struct.pack_into("<I", image, wanted + field, *struct.unpack_from("<I", image, instead + field))
    return bytes(image)


def _sections(image: bytearray) -> list[tuple[int, ...]]:
    (table_at,) = struct.unpack_from("<Q", image, 0x28)
    size, count, _ = struct.unpack_from("<HHH", image, 0x3A)
    return [struct.unpack_from("<IIQQQQIIQQ", image, table_at + size * number) for number in range(count)]


def _needs_of_libc(image: bytearray, at: int, names_at: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield each version of the C library that is wanted: its name, where it says so, and its index."""
    while True:
        _, count, file, first, following = struct.unpack_from("<HHIII", image, at)
        entry = at + first
        for _ in range(count):
            _, _, index, name, step = struct.unpack_from("<IHHII", image, entry)
            if _text(image, names_at + file) == b"libc.so.6":
                yield _text(image, names_at + name), entry, index
            entry += step
        if not following:
            return
        at += following


def _text(image: bytearray, at: int) -> bytes:
    return bytes(image[at : image.index(b"\0", at)])
