"""The commands of the campaigns say what they do, and start nothing by mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

import pytest

from tests.campaigns import fuzz, stragglers, why
from tests.campaigns.deaths import on_machine
from tests.campaigns.written import RESULTS

FOLDER = Path(stragglers.__file__).parent
COMMANDS = sorted(
    ".".join(("tests.campaigns", *path.relative_to(FOLDER).with_suffix("").parts))
    for path in FOLDER.rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


def results() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in RESULTS.iterdir()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_campaign_answers_help_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = import_module(name)
    main = cast("Callable[[Sequence[str]], int]", module.main)
    before = results()

    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m {name} ")
    assert (module.__doc__ or "").split(maxsplit=1)[0] in said
    assert not list(tmp_path.iterdir())
    assert results() == before


def test_all_campaigns_are_among_them() -> None:
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (stragglers.main, "", "the following arguments are required: FOLDER"),
        (stragglers.main, "{here}/file/below", "file is not a directory"),
        (stragglers.main, "{here}/new 0", "NUM_AT_ONCE is 0"),
        (why.main, "{here}/new", "there is no folder"),
        (why.main, "{here}", "holds no death"),
        (on_machine.main, "{here}/new nothing-like-it", "no death's name fits 'nothing-like-it'"),
    ],
)
def test_a_wrong_or_missing_folder_is_said_before_anything_starts(
    main: Callable[[Sequence[str]], int], words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SystemExit) as ended:
        main(words.format(here=tmp_path).split())

    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.long
def test_a_reader_that_fails_on_some_text_is_found_with_the_text() -> None:
    failed: dict[str, str] = {}

    for read in (float, json.loads, str):
        fuzz.tried(failed, read.__name__, fuzz.edited(["1.5"]), 300, read)

    assert set(failed) == {"float", "loads"}
    assert failed["float"].startswith("ValueError: could not convert string to float")
    assert "Failing test case" in failed["float"]


@pytest.mark.long
def test_a_reader_whose_time_grows_faster_than_its_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "PARTS", ("ab",))
    monkeypatch.setattr(fuzz, "GROWN", (5_000, 20_000))
    monkeypatch.setattr(fuzz, "SLOW_S", 0.05)

    assert fuzz.growth_of(["1"], str) == 0
    assert fuzz.growth_of(["1"], lambda text: [text.count("z") for _ in text]) > fuzz.MOST_GROWTH
