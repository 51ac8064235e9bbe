"""The compiler's cache is in a directory that no other user has made or can enter."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_hpc.base.private_cache import private_cache_dir
from ddp_hpc.cluster.rendezvous.worker_env import Sourced, keep_users_values, library_variables

CPUS = Sourced(value="1", rule="")


@pytest.fixture(autouse=True)
def _disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private_cache_dir.cache_clear()
    yield
    private_cache_dir.cache_clear()


def test_it_is_made_for_this_user_alone_and_found_again(tmp_path: Path) -> None:
    made = private_cache_dir()
    private_cache_dir.cache_clear()

    assert made == private_cache_dir() == tmp_path / f"ddp_hpc-cache-{os.getuid()}"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def elsewhere(place: Path) -> None:
    target = place.parent / "elsewhere"
    target.mkdir(mode=0o700)
    place.symlink_to(target)


def anothers(place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)


@pytest.mark.parametrize("plant", [open_to_all, elsewhere, anothers, Path.touch])
def test_what_a_stranger_has_planted_is_left_alone(plant: Callable[[Path], None], tmp_path: Path) -> None:
    planted = tmp_path / f"ddp_hpc-cache-{os.getuid()}"
    plant(planted)

    found = private_cache_dir()

    assert found is not None
    assert found.resolve().parent == tmp_path
    assert found != planted
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


def test_workers_compile_there_unless_the_user_names_a_place(tmp_path: Path) -> None:
    ours = keep_users_values(library_variables(CPUS), {})
    users = keep_users_values(library_variables(CPUS), {"TORCHINDUCTOR_CACHE_DIR": "/fast/cache"})

    assert ours["TORCHINDUCTOR_CACHE_DIR"].value == f"{private_cache_dir()}/inductor"
    assert users["TORCHINDUCTOR_CACHE_DIR"].value == "/fast/cache"


def test_a_node_without_a_disk_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))

    assert private_cache_dir() is None
    assert library_variables(CPUS)["TORCHINDUCTOR_CACHE_DIR"].value is None
