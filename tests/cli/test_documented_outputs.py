"""What the documents show of a command's output is what it prints today."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from tests.consoles import not_printed, shown_in

ROOT = Path(__file__).parents[2]
CODE = "\n".join(path.read_text() for path in ROOT.glob("ddp_hpc/**/*.py"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in ROOT.glob("examples/*"):
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_directives_of_a_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = (
        each for each in shown_in((ROOT / "docs/slurm.md").read_text()) if "own_vision.yaml --cluster" in each.command
    )

    assert main(shlex.split(shown.command)[1:]) == 0

    printed = capsys.readouterr().out
    assert len(shown.lines) > 10
    assert not_printed(shown, printed, {str(folder): "/scratch/ada"}) == []
    assert (
        len(re.findall(r"^#SBATCH", printed, flags=re.MULTILINE)) == len(shown.lines) - 2
    )  # nothing is left out of them


def test_the_error_of_an_unknown_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (begin,) = re.findall(
        r"^(error: `train\.lrr.*), \.\.\.$", (ROOT / "docs/configuration.md").read_text(), flags=re.MULTILINE
    )
    (folder / "digits.yaml").write_text("recipe:\n  args: {dataset: digits}\ntrain:\n  lrr: 0.1\n")

    assert main(["submit", "digits.yaml", "--dry-run"]) == 2

    assert capsys.readouterr().err.startswith(begin)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("survival.md", "no rank made progress for "),
        ("survival.md", "others wait in collective "),
        (
            "recipes.md",
            "note: each rank's worker starts as a new process and imports its modules itself, which is slower, because ",
        ),
        ("recipes.md", "the recipe did not return within "),
        ("tutorial.md", "training from the beginning, to step "),
        ("tutorial.md", "was cancelled. Submit it again to go on: "),
        ("slurm.md", "Slurm refuses the job"),
        ("slurm.md", "the fastest network that all "),
    ],
)
def test_a_message_that_a_page_quotes_is_one_of_the_code(page: str, words: str) -> None:
    assert words in (ROOT / "docs" / page).read_text()
    assert words in CODE
