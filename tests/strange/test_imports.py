"""Recipes whose import starts threads: workers train all the same, and the log says what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.job.ending import node_probe
from ddp_hpc.job.node.python_environ import IMPORT_PATH_NAME
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.workload.table import workload_of
from tests.distributed.whole_runs import Workplace, make_workplace
from tests.made_run import make_run

CONFIG = """
recipe: {target: "strange_recipe:build"}
train: {epochs: 1, max_steps: 4, global_batch_size: 8}
"""
WORKS = """
import torch
WEIGHTS = torch.randn(600, 600) @ torch.randn(600, 600) + torch.zeros(600, 600).fill_(2.0).exp()
"""
"""Large enough for OpenMP's pool."""
WAITS = """
import threading
threading.Thread(target=threading.Event().wait, name="uploader", daemon=True).start()
"""


@pytest.mark.long
@pytest.mark.parametrize(("at_import", "is_safe"), [(WORKS, True), (WAITS, False)], ids=["works", "waits"])
def test_after_the_preload_a_fork_computes_with_all_threads_or_is_warned_of(
    at_import: str, is_safe: bool, tmp_path: Path
) -> None:
    (tmp_path / "strange_recipe.py").write_text(at_import)
    script = """
import os, signal, sys, torch
from ddp_hpc.train.fork_safety import no_openmp_pool, why_not_fork
before = torch.get_num_threads()
with no_openmp_pool():
    import strange_recipe
print(why_not_fork("strange_recipe:build"))
if os.fork() == 0:
    signal.alarm(60)
    torch.ones(1000, 1000).exp()
    os._exit(torch.get_num_threads() - before)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    environ = {**os.environ, "OMP_NUM_THREADS": "3", "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}

    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True, timeout=120
    )

    why, code = done.stdout.splitlines()
    assert code == "0"
    assert (why == "") is is_safe
    assert is_safe or "uploader (threading.Thread)" in why


def strange_workplace(path: Path, at_import: str) -> Workplace:
    workplace = make_workplace(path, CONFIG)
    text = f"{at_import}\nimport trial_recipe\n\n\ndef build():\n    return trial_recipe.build()\n"
    (path / "strange_recipe.py").write_text(text)
    return workplace


@pytest.mark.long
def test_runs_whose_recipes_start_threads_at_import_come_to_the_weights_of_one_that_does_not(tmp_path: Path) -> None:
    digests = {}
    for name, at_import in {"plain": "", "works": WORKS, "waits": WAITS}.items():
        workplace = strange_workplace(tmp_path / name, at_import)
        digests[name] = workplace.finish("one", "resources.workers_per_node=2", "resources.cpus_per_worker=1")
        console = workplace.run("one").console.read_text()
        assert ("each rank's worker starts as a new process" in console) is (name == "waits")

    assert len(set(digests.values())) == 1


@pytest.mark.long
def test_a_node_is_asked_to_import_the_users_own_recipe(tmp_path: Path) -> None:
    (tmp_path / "my_own.py").write_text("def build():\n    raise NotImplementedError\n")
    run = make_run(tmp_path / "runs")
    run.config.write_text("name: run\nrecipe: {target: 'my_own:build'}\n")

    answers = [
        subprocess.run(
            [
                sys.executable,
                "-c",
                node_probe._PROBE_PROGRAM,
                str(run.path),
                workload_of(load_resolved(run.config)).worker,
            ],
            env={**os.environ, IMPORT_PATH_NAME: path},
            cwd=run.path,
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for path in (str(tmp_path), "")
    ]

    assert [node_probe._CAN_START_MARKER in answer for answer in answers] == [True, False]
