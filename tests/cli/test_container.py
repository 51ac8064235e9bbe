"""`ddp-hpc container check`, with a runtime that is a shell script: it starts the Python here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc import cli
from ddp_hpc.watch.diagnose.image_probe import judge

ANSWER: dict[str, Any] = {
    "python": [3, 11, 2],
    "machine": "x86_64",
    "modules": {"torch": "2.9"},
    "problems": {},
    "torch": {},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a configuration, an image, and a runtime on PATH."""
    (tmp_path / "run.yaml").write_text("name: run\n")
    (tmp_path / "image").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    has_runtime(tmp_path, 'while [ "$1" != sh ]; do shift; done; exec "$@"')
    return tmp_path


def has_runtime(place: Path, text: str) -> None:
    path = place / "bin" / "apptainer"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def check(*words: str) -> int:
    return cli.main(["container", "check", "run.yaml", "container.image=image", *words])


@pytest.mark.long
def test_an_image_with_all_that_is_needed_is_good(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = check(f"container.python={sys.executable}", "--json")

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["problems"] == []
    assert found["image"] == str(place / "image")
    assert {"torch", "numpy", "msgspec", "psutil", "xxhash", "yaml"} <= found["modules"].keys()
    assert found["torch"]["gloo"] is True


def test_what_is_missing_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    has_runtime(place, 'while [ "$1" != sh ]; do shift; done; shift 5; exec /usr/bin/env "$0.python" -S -E "$@"')
    (place / "bin" / "apptainer.python").symlink_to(sys.executable)

    code = check()

    said = capsys.readouterr().out
    assert code == 1
    assert "torch cannot be imported: ModuleNotFoundError: No module named 'torch'" in said
    assert "a run in this image would fail" in said


def test_a_python_that_does_not_start_is_told_with_the_runtimes_words(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has_runtime(place, 'echo "FATAL: \\"pithon\\": executable file not found" >&2; exit 255')

    assert check("container.python=pithon") == 1
    assert 'pithon did not start: FATAL: "pithon": executable file not found' in capsys.readouterr().out


def test_without_an_image_or_a_runtime_there_is_nothing_to_look_into(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["container", "check", "run.yaml"]) == 2
    assert "There is no image to check" in capsys.readouterr().err
    assert check("container.runtime=pyxis") == 2
    assert "pyxis, which starts images only in Slurm jobs" in capsys.readouterr().err
    (place / "bin" / "apptainer").unlink()
    assert check() == 2
    assert "needs apptainer or singularity" in capsys.readouterr().err


def test_an_old_python_is_a_problem_and_a_missing_torchvision_a_note() -> None:
    old = judge("image", "apptainer", {**ANSWER, "python": [3, 9, 1]})
    plain = judge("image", "apptainer", {**ANSWER, "problems": {"torchvision": "ModuleNotFoundError: no"}})

    assert list(old.problems) == ["Python is 3.9.1, but must be 3.10 or newer"]
    assert list(plain.problems) == []
    assert list(plain.notes) == ["torchvision is missing; only the built-in recipe `image_classification` needs it"]
