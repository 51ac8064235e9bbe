"""The page that puts an sbatch script beside our keys says what comes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "from-other-tools.md").read_text().partition("## From torchrun")[0]
BEFORE = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)[0]
AFTER = re.findall(r"```yaml\n(# resnet\.yaml\n.*?)```", PAGE, flags=re.DOTALL)[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| `")]


def codes(cell: str) -> list[str]:
    """Return what stands in code font."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.usefixtures("_users_part_unchecked")
def test_the_file_it_shows_makes_the_directives_of_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet.yaml").write_text(AFTER)

    assert main(["submit", "resnet.yaml", "--cluster", "slurm", "--dry-run"]) == 0

    script = capsys.readouterr().out.splitlines()
    promised = [code for _, _, made in ROWS for code in codes(made) if code.startswith(("--", "module "))]
    assert len(promised) > 12
    lines = [line.removeprefix("#SBATCH ").removeprefix("if ! ").removesuffix("; then") for line in script]
    assert [code for code in promised if code not in lines] == []
    assert "ulimit -l unlimited" in lines


def test_its_table_names_every_line_of_the_script_that_it_replaces() -> None:
    named = " ".join(code for theirs, _, _ in ROWS for code in codes(theirs))

    flags = re.findall(r"^#SBATCH (--[a-z-]+)", BEFORE, flags=re.MULTILINE)
    exported = re.findall(r"^export ([A-Z_]+)=", BEFORE, flags=re.MULTILINE)

    assert len(flags) == 15
    assert [
        each
        for each in [*flags, *exported, "module load", "ulimit", "trap", "srun torchrun", "--resume"]
        if each not in named
    ] == []


def test_no_directive_of_the_old_script_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But those that the table says differ: the log's place, the time in minutes, whom the signal goes to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet.yaml").write_text(AFTER)

    assert main(["submit", "resnet.yaml", "--cluster", "slurm", "--dry-run"]) == 0

    made = set(re.findall(r"^#SBATCH (.*)", capsys.readouterr().out, flags=re.MULTILINE))
    asked = set(re.findall(r"^#SBATCH (.*)", BEFORE, flags=re.MULTILINE))
    assert asked - made == {"--time=24:00:00", "--output=logs/%x-%j.out", "--signal=B:USR1@300"}
