"""The image that comes with us is built by a real Apptainer, as an ordinary user, from what this machine can reach."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.debian import make_debian
from tests.slurm import apptainer
from tests.slurm.apptainer import Apptainer, NoApptainerError
from tests.slurm.cluster import USER
from tests.slurm.lab.packages import apt_install
from tests.slurm.lab.tools import sh

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def program(can_boot: None) -> Apptainer:
    """Return Apptainer; who can boot the cluster has its user too."""
    try:
        return apptainer.get()
    except NoApptainerError as error:
        pytest.skip(f"not tested that the image can be built: {error}")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Return a directory of the user's, outside of root's own."""
    path = Path("/var/tmp/ddp_hpc-image-test")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    shutil.chown(path, USER, USER)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def base(place: Path) -> Path:
    """Return a small Debian with its Python, as an image of squashfs."""
    apt_install(["squashfs-tools"])
    tree, image = place / "debian", place / "debian.sqsh"
    make_debian(tree)
    sh("mksquashfs", tree, image, "-all-root", "-comp", "zstd", "-quiet", "-no-progress")
    shutil.rmtree(tree)
    return image


def as_user(*argv: str | Path, place: Path, program: Apptainer) -> subprocess.CompletedProcess[str]:
    who = pwd.getpwnam(USER)
    path = f"{program.bin_dir}:{Path(sys.prefix) / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin"
    environ = {
        "PATH": path,
        "HOME": str(place),
        "APPTAINER_TMPDIR": str(place),
        "APPTAINER_CACHEDIR": str(place / "cache"),
        "APPTAINER_IGNORE_SUBUID": "1",  # mapping more users than one's own takes a setuid helper
    }
    demote = ["setpriv", f"--reuid={who.pw_uid}", f"--regid={who.pw_gid}", "--init-groups"]
    return subprocess.run(
        [*demote, *map(str, argv)], env=environ, cwd=place, capture_output=True, text=True, check=False
    )


def test_the_shipped_recipe_builds_and_its_test_passes(program: Apptainer, base: Path, place: Path) -> None:
    ours = [sys.executable, "-m", "ddp_hpc", "container"]

    built = as_user(*ours, "build", "torch.sif", "--base", base, place=place, program=program)

    said = built.stdout + built.stderr
    assert built.returncode == 0, said[-6000:]
    assert "good: torch " in said
    environ = {**os.environ, "APPTAINER_NO_PRIVS": "1", "APPTAINER_TMPDIR": str(place)}
    test = [str(program.program), "test", str(place / "torch.sif")]
    tested = subprocess.run(test, env=environ, capture_output=True, text=True, check=False)
    assert tested.stdout.startswith("good: torch "), tested.stderr
    told = as_user(*ours, "digest", "torch.sif", "--json", place=place, program=program)
    assert '"identity": "SIF ' in told.stdout
