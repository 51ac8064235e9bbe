"""Users whose home cannot be written, and whose language is not English."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.paths import RunDir

RECIPE = """
import torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe

def build(words):
    print("worte", words)
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    return Recipe(model=torch.nn.Linear(4, 2), train_data=data, loss=torch.nn.functional.cross_entropy)
"""
CONFIG = "recipe: {target: 'netz_größe:build', args: {words: 'Größe 世界'}}\ntrain: {global_batch_size: 8, epochs: 1}\n"


@pytest.mark.parametrize(
    "settings",
    [
        {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de"},
        {"LC_ALL": "tr_TR.ISO-8859-9", "HOME": "/nonexistent"},
        {"HOME": "/proc", "XDG_CACHE_HOME": "/proc/none", "XDG_CONFIG_HOME": "/proc/none"},
    ],
    ids=["C", "German", "a home that is not there", "a home that cannot be written"],
)
@pytest.mark.long
def test_a_run_in_a_directory_of_another_alphabet_finishes_and_is_read(
    settings: dict[str, str], tmp_path: Path
) -> None:
    here = tmp_path / "Prüfung 世界"
    here.mkdir()
    (here / "lauf.yaml").write_text(CONFIG, encoding="utf-8")
    (here / "netz_größe.py").write_text(RECIPE, encoding="utf-8")
    dropped = {"LANG", "LC_ALL", "LC_CTYPE", "PYTHONUTF8", "HOME"}
    environ = {**{name: value for name, value in os.environ.items() if name not in dropped}, **settings}

    def type_(*words: str) -> subprocess.CompletedProcess[bytes]:
        argv = [sys.executable, "-m", "ddp_hpc", *words]
        return subprocess.run(argv, cwd=here, env=environ, capture_output=True, check=False)

    done = type_("submit", "lauf.yaml", "--wait")
    told = [type_(*words) for words in (["status", "lauf"], ["logs", "lauf", "--rank", "0"], ["list"])]
    status = json.loads(type_("status", "lauf", "--json").stdout)

    run = RunDir(here / "runs/lauf")
    assert done.returncode == 0, done.stderr
    assert [(one.returncode, one.stderr) for one in told] == [(0, b"")] * 3
    assert "Größe 世界" in run.rank_log(0, 0).read_text(encoding="utf-8")
    assert (status["state"], status["path"]) == ("finished", str(run.path))
