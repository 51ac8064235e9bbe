"""The way of a run, as ARCHITECTURE.md shows it: each function is there, and a run passes them in that order."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_hpc
from tests.cli.test_submit import until

PACKAGE = Path(ddp_hpc.__file__).parent
PAGE = PACKAGE.parent / "ARCHITECTURE.md"

SLURMS_OWN = {
    ("launch/submission/slurm.py", "submit"),
    ("launch/render.py", "render"),
    ("launch/submission/allocate.py", "submit_job_script"),
    ("job/choose_endpoint.py", "endpoints_to_try"),
    ("job/launcher.py", "agents_step_argv"),
    ("job/ending/requeue_job.py", "carry_out_decision"),
}
"""What a run on one machine does not pass."""

RECORDER = """
import json, os, sys, threading, time

wanted = {tuple(each) for each in json.loads(os.environ["SPINE"])}
names = {name for _, name in wanted}

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_name in names:
        file = code.co_filename.partition("/ddp_hpc/")[2]
        if (file, code.co_name) in wanted:
            with open(os.environ["SPINE_TRACE"], "a") as trace:
                trace.write(json.dumps([time.monotonic_ns(), file, code.co_name]) + "\\n")

sys.setprofile(note)
threading.setprofile(note)
"""
"""Python runs it first in each process, as `sitecustomize`; a fork keeps it."""


def spine() -> list[tuple[str, str]]:
    """Return the files and functions of the page's first table, from top to bottom."""
    rows = PAGE.read_text(encoding="utf-8").partition("## The nine wings")[0].splitlines()
    found = []
    for row in (row for row in rows if row.startswith("| ") and ".py`" in row):
        *_, files, functions, _ = (
            row.split(" | ") if row.endswith(" | ") else (*row.removesuffix(" |").split(" | "), "")
        )
        paths, names = re.findall(r"`([\w/]+\.py)`", files), re.findall(r"`(\w+)`", functions)
        found += [(paths[min(at, len(paths) - 1)], name) for at, name in enumerate(names)]
    return found


@pytest.mark.parametrize(("file", "name"), spine())
def test_each_function_on_the_way_of_a_run_is_where_the_page_says(file: str, name: str) -> None:
    functions = ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))

    assert name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}


def test_a_run_that_is_stopped_passes_the_functions_in_the_order_of_the_page(tmp_path: Path) -> None:
    expected = [each for each in spine() if each not in SLURMS_OWN]
    (tmp_path / "sitecustomize.py").write_text(RECORDER, encoding="utf-8")
    trace, ledger = tmp_path / "trace.jsonl", tmp_path / "runs" / "way" / "attempts.jsonl"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "SPINE": json.dumps(expected), "SPINE_TRACE": str(trace)}
    config = {
        "name": "way",
        "recipe": {"target": "drill", "args": {"num_samples": 480, "sample_s": 0.004}},
        "train": {"max_steps": 100_000, "global_batch_size": 24},
        "checkpoint": {"every_steps": 1_000_000},  # the first one is that of the stop
    }
    (tmp_path / "way.yaml").write_text(json.dumps(config), encoding="utf-8")

    def command(*words: str) -> None:
        argv = [sys.executable, "-m", "ddp_hpc", *words]
        done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    command("submit", "way.yaml", "--cluster=local")
    until(lambda: '"update_weights"' in trace.read_text(encoding="utf-8"))
    command("stop", "way")
    until(lambda: len(ledger.read_text(encoding="utf-8").splitlines()) == 2)  # it has begun, and it has ended
    seen = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]

    last = {(file, name): at for at, file, name in sorted(seen)}
    assert sorted(last, key=last.__getitem__) == expected
