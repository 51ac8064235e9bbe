"""`srun ddp-hpc certify`, typed on the login node: the script is certified on a compute node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.certify.planted import PLANTED, SCRIPTS
from tests.slurm.cluster import USER, Cluster
from tests.slurm.runs import LoginNode

pytestmark = pytest.mark.long

ON_A_NODE = ("srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--mem=2000", "--nodelist=node2", "--time=10")
QUICK = ("ddp-hpc", "certify", "--random-seed=1", "--patience=20", "resources.cpus_per_worker=1")
UNMARKED = "resumes from the wrong file"
"""A planted defect that takes no second undisturbed run."""


def add_script(login: LoginNode, text: str) -> None:
    script = login.folder / "train.py"
    script.write_text(text)
    shutil.chown(script, USER, USER)


def test_a_good_script_gets_its_certificate_and_a_planted_defect_is_named_on_a_node(
    cluster: Cluster, login: LoginNode
) -> None:
    def certified(*words: str) -> subprocess.CompletedProcess[str]:
        argv = (*ON_A_NODE, *QUICK, *words, "--", "python", "train.py")
        return cluster.run(*argv, cwd=login.folder, check=False, timeout=400)

    add_script(login, (SCRIPTS / "good.py").read_text())
    good = certified("--json", "--faults=kill-in-evaluation")
    assert good.returncode == 0, good.stdout + good.stderr
    found = json.loads(good.stdout)
    assert [one["defects"] for one in found["findings"]] == [[]]
    assert found["findings"][0]["verdict"] in {"exact", "loses"}
    assert json.loads((Path(found["folder"]) / "certificate.json").read_text()) == found
    (record,) = (Path(found["folder"]) / "runs").glob("undisturbed/logs/attempt-0")
    assert record.is_dir()

    planted = next(one for one in PLANTED if one.name == UNMARKED)
    add_script(login, planted.source)
    bad = certified(f"--faults={planted.fault}")
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert f"\n{UNMARKED}: " in bad.stdout


def test_where_the_time_is_over_srun_ends_and_nothing_is_proven(cluster: Cluster, login: LoginNode) -> None:
    add_script(login, "import time\nfor step in range(300):\n    print('step', step, flush=True)\n    time.sleep(1)\n")
    argv = (*ON_A_NODE[:-1], "--time=1", *QUICK, "--", "python", "train.py")

    done = cluster.run(*argv, cwd=login.folder, check=False, timeout=300)

    assert done.returncode not in {0, 1}, done.stdout + done.stderr
    assert "DUE TO TIME LIMIT" in done.stderr
    assert not list(login.folder.rglob("certificate.json"))


def test_a_certification_within_an_allocation_runs_there(cluster: Cluster, login: LoginNode) -> None:
    add_script(login, "import time\nfor step in range(3):\n    print('step', step, flush=True)\n    time.sleep(0.3)\n")
    words = ["salloc", "--nodes=1", "--ntasks=2", "--mem=2000", "srun", "--ntasks=1", "ddp-hpc", "certify"]

    done = cluster.run(
        *words, "--faults=kill-after-save", "--", "python", "train.py", cwd=login.folder, check=False, timeout=300
    )

    assert "undisturbed:" in done.stdout, done.stdout + done.stderr
    assert "2 ranks" not in done.stdout
    assert "3 steps in its output" in done.stdout
