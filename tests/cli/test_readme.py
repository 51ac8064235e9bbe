"""What the README shows does what it says."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.cli import VERBS
from ddp_hpc.run.config.keys import all_keys, is_section, key_of
from ddp_hpc.run.config.removed import REMOVED_KEYS
from tests.consoles import Shown, not_printed, shown_in

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


OWN_SCRIPT = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
for epoch in range(20):
    loss = model(torch.zeros(1, 1)).square().mean()
    loss.backward()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
        os.makedirs("checkpoints", exist_ok=True)
        torch.save(model.state_dict(), "checkpoints/new.tmp")
        os.replace("checkpoints/new.tmp", "checkpoints/last.pt")
"""


def _block(first_line: str) -> str:
    """Return the fenced block that begins with a comment naming its file."""
    match = re.search(rf"```\w+\n(# {re.escape(first_line)}\n.*?)```", README, flags=re.DOTALL)
    assert match, f"the README has no block for {first_line}"
    return match.group(1)


def test_the_readmes_first_commands_print_what_it_shows(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "train.py").write_text(OWN_SCRIPT)
    for shown in shown_in(README)[:5]:
        done = subprocess.run(  # noqa: S602  a reader's shell
            shown.command,
            shell=True,
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
        )

        assert done.returncode == 0, done.stdout + done.stderr
        assert not_printed(shown, done.stdout, {str(tmp_path): "/home/ada"}) == [], done.stdout


def test_a_line_that_a_command_does_not_print_is_found() -> None:
    shown = Shown("echo", ("step 1 of 2", "...", "in /home/ada/runs", "done"))

    assert not_printed(shown, "step 10 of 20\nmore\nin /tmp/x/runs\ndone\n", {"/tmp/x": "/home/ada"}) == []
    assert not_printed(shown, "done\nin /tmp/x/runs\nstep one\n", {}) == ["step 1 of 2", "in /home/ada/runs"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("own_net.py", "own_net.yaml"):
        (tmp_path / name).write_text(_block(name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_the_readmes_recipe_and_commands_work_one_after_the_other_as_printed(here: Path) -> None:
    commands = [shown.command for shown in shown_in(README) if re.search(r"own_net|longer", shown.command)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    for command in commands[:-1]:  # the last is the cluster's
        done = subprocess.run(  # noqa: S602  a reader's shell
            command, shell=True, check=False, capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"

    assert len(commands) == 9
    assert (here / "own_net.safetensors").exists()


PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")})
"""Without the list of messages, which quotes those of before, too."""
NO_KEYS = {"train.lrr", "train.batch_size", "optimizer.lr"}
"""What pages show as mistakes."""


GONE = {"top", "trace", "--nccl"}
"""Commands and options that CHANGELOG.md names, and that no longer exist."""


def _options(verb: str) -> set[str]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"ddp_hpc.cli.verbs.{verb}").add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_option_and_key_in_the_documentation_exists(path: Path) -> None:
    text = path.read_text()
    sections = "|".join({name.partition(".")[0] for name in all_keys() if "." in name})
    gone = GONE | {*REMOVED_KEYS} if path.name == "CHANGELOG.md" else set()

    for verb, words in re.findall(r"ddp-hpc ([a-z]+)((?: [^`\n#|&)]*)?)", text):
        if verb in gone:
            continue
        assert verb in VERBS, f"ddp-hpc {verb}"
        ours = words.partition(" -- ")[0]  # what follows is a user's own command
        unknown = set(re.findall(r"(?<!\S)(--?[a-z][a-z-]*)(?=[\s=]|$)", ours)) - _options(verb) - {"--help"} - gone
        assert not unknown, f"ddp-hpc {verb} {words}"
    for name in {one.rstrip(".") for one in re.findall(rf"`((?:{sections})\.[a-z_.]+)", text)} - NO_KEYS - gone:
        assert name.endswith(".py") or key_of(name) or is_section(name), name


@pytest.mark.long
def test_a_run_that_the_tutorial_breaks_in_four_lines_ends_with_the_digest_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    consoles = re.findall(r"```console\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), flags=re.DOTALL)
    (console,) = (each for each in consoles if "name=a --wait" in each)
    ours = f"{shlex.quote(sys.executable)} -m ddp_hpc"

    printed = []
    for line in re.sub(r" +#.*", "", console).splitlines():
        command = line.removeprefix("$ ").replace("ddp-hpc", ours)
        done = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)  # noqa: S602  a reader's shell
        printed.append(done.stdout.splitlines()[-1])

    assert len(printed) == 4
    assert re.fullmatch(r"[0-9a-f]{16,}", printed[0])
    assert printed[3] == printed[0]
