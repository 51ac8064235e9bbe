"""Completion: what a real bash offers, and what the other shells are told."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.cli import VERBS, main
from ddp_hpc.cli.tab_completion import completions
from tests.made_run import make_run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "digits")
    make_run(tmp_path / "runs", "dry")
    make_run(tmp_path / "runs" / "grid", "000-seed-0")
    (tmp_path / "net.yaml").write_text("")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["sta"], ["status"]),
        ([""], list(VERBS)),
        (["status", "d"], ["digits", "dry"]),
        (["logs", "-f", "di"], ["digits"]),
        (["why", "grid/0"], ["grid/000-seed-0"]),
        (["submit", "net.yaml", "train.glob"], ["train.global_batch_size="]),
        (["submit", "train.l"], ["train.lr="]),
        (["submit", ""], []),
        (["submit", "net.yaml", "train.precision", "=", "b"], ["bf16"]),
        (["submit", "net.yaml", "train.precision", "="], ["fp32", "bf16", "fp16"]),
        (["submit", "net.yaml", "train.precision=f"], ["train.precision=fp32", "train.precision=fp16"]),
        (["submit", "net.yaml", "--dry"], ["--dry-run"]),
        (["submit", "net.yaml", "--cluster", "l"], ["local"]),
        (["config", "torchrun"], ["torchrun.max_restarts"]),
        (["completion", "b"], ["bash"]),
        (["nonsense", "d"], []),
    ],
)
def test_words_are_completed_by_where_they_stand(words: list[str], found: list[str]) -> None:
    assert completions(words, {}) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["ddp-hpc", "sub"], ["submit"]),
        (["ddp-hpc", "status", "d"], ["digits", "dry"]),
        (["ddp-hpc", "submit", "net.yaml", "optimizer.nest"], ["optimizer.nesterov="]),
        (["ddp-hpc", "submit", "net.yaml", "optimizer.nesterov", "=", "t"], ["true"]),
    ],
)
def test_a_real_bash_offers_them(line: list[str], found: list[str], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ddp-hpc"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ddp_hpc "$@"\n')
    command.chmod(0o755)
    words = " ".join(f"'{word}'" for word in line)
    program = (
        f'PATH={tmp_path}/bin:$PATH; eval "$(ddp-hpc completion bash)"; complete -p ddp-hpc >/dev/null || exit 3; '
        f"compopt() {{ :; }}; COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; _ddp_hpc; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )

    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.split() == found
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_sound_for_its_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out

    assert "ddp-hpc completion words" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
