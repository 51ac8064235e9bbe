"""What the README shows does what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def _block(first_line: str) -> str:
    """Return the fenced block that begins with a comment naming its file."""
    match = re.search(rf"```\w+\n(# {re.escape(first_line)}\n.*?)```", README, flags=re.DOTALL)
    assert match, f"the README has no block for {first_line}"
    return match.group(1)


def _commands() -> list[str]:
    """Return the `ddp-hpc` commands on the README's second console, without their comments."""
    console = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)[1]
    return [line.removeprefix("$ ").split("   ")[0].strip() for line in console.splitlines() if line.startswith("$")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("own_net.py", "own_net.yaml"):
        (tmp_path / name).write_text(_block(name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readmes_recipe_and_commands_work_one_after_the_other(here: Path) -> None:
    ours = f"{shlex.quote(sys.executable)} -m ddp_hpc"
    commands = _commands()

    for command in commands:
        if "stop" in command:  # it has finished long ago: begin another, so that there is something to stop
            command = command.replace("own_net ", "longer ").replace("own_net.yaml", "own_net.yaml name=longer")  # noqa: PLW2901
            subprocess.run(f"{ours} submit own_net.yaml name=longer train.epochs=10000", shell=True, check=True)  # noqa: S602
        done = subprocess.run(  # noqa: S602  a reader's shell
            command.replace("ddp-hpc", ours), shell=True, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"

    assert len(commands) == 6
    assert (here / "own_net.safetensors").exists()
    subprocess.run([sys.executable, "-m", "ddp_hpc", "cancel", "longer"], check=False)  # it may have finished


@pytest.mark.parametrize("path", sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")}), ids=lambda path: path.name)
def test_links_in_the_documentation_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())

    missing = [link for link in links if not (path.parent / link).exists()]
    assert missing == []
