"""`ddp-hpc certify --cluster slurm`, typed on the login node: the script is certified on a compute node."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.certify.planted import PLANTED, SCRIPTS
from tests.slurm.cluster import USER, Cluster
from tests.slurm.runs import LoginNode

pytestmark = pytest.mark.long

QUICK = (
    "--cluster",
    "slurm",
    "--random-seed=1",
    "--patience=20",
    "resources.cpus_per_worker=1",
    "slurm.nodelist=node2",
)
UNMARKED = "resumes from the wrong file"
"""A planted defect that takes no second undisturbed run."""


def add_script(login: LoginNode, text: str) -> None:
    script = login.folder / "train.py"
    script.write_text(text)
    shutil.chown(script, USER, USER)


def test_a_good_script_gets_its_certificate_and_a_planted_defect_is_named_by_a_job(
    cluster: Cluster, login: LoginNode
) -> None:
    add_script(login, (SCRIPTS / "good.py").read_text())
    good = login.type(
        "certify", *QUICK, "--json", "--faults=kill-in-evaluation", "--", "python", "train.py", timeout=400
    )
    assert good.returncode == 0, good.stdout + good.stderr
    found = json.loads(good.stdout)
    assert [one["defects"] for one in found["findings"]] == [[]]
    assert found["findings"][0]["verdict"] in {"exact", "loses"}
    assert json.loads((Path(found["folder"]) / "certificate.json").read_text()) == found
    assert "runs on node2" in good.stderr
    (record,) = (Path(found["folder"]) / "runs").glob("undisturbed/logs/attempt-0")
    assert record.is_dir()

    planted = next(one for one in PLANTED if one.name == UNMARKED)
    add_script(login, planted.source)
    bad = login.type("certify", *QUICK, f"--faults={planted.fault}", "--", "python", "train.py", timeout=400)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert f"\n{UNMARKED}: " in bad.stdout
    assert not cluster.run("squeue", "--noheader").stdout.strip()


def test_a_certification_within_an_allocation_runs_there(cluster: Cluster, login: LoginNode) -> None:
    add_script(login, "import time\nfor step in range(3):\n    print('step', step, flush=True)\n    time.sleep(0.3)\n")
    words = ["salloc", "--nodes=1", "--ntasks=2", "--mem=2000", "srun", "--ntasks=1", "ddp-hpc", "certify"]

    done = cluster.run(
        *words, "--faults=kill-after-save", "--", "python", "train.py", cwd=login.folder, check=False, timeout=300
    )

    assert "undisturbed:" in done.stdout, done.stdout + done.stderr
    assert "2 ranks" not in done.stdout
    assert "3 steps in its output" in done.stdout
