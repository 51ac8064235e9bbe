"""Makes the deaths of the test cluster: two nodes with two ranks each, several jobs at a time, one boot for all.

    python -m tests.campaigns.deaths.on_cluster FOLDER [PATTERN]

What a death leaves is copied to FOLDER; one that is whole there is not made again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from tests.campaigns.command_line import asked_deaths
from tests.campaigns.deaths.on_machine import WHOLE, prepare, words_of
from tests.campaigns.deaths.table import ON_CLUSTER, Death
from tests.campaigns.written import stamp
from tests.slurm.cluster import USER, Cluster, booted, why_not

AT_ONCE = 4
PATIENCE_S = 300.0
WORLD = ("resources.nodes=2", "resources.workers_per_node=2", "resources.cpus_per_worker=1")
OF_SLURM: Mapping[str, tuple[str, ...]] = {
    "preempt": ("slurm.partition=low",),
    "time-limit": ("resources.time_limit_min=1",),
}
"""What Slurm, or a user of it, does to a script that waits -> keys of its submission."""


def happen(cluster: Cluster, death: Death, folder: Path) -> None:
    """Run it to its end on the cluster, unless that was done, and copy what it leaves."""
    if (folder / WHOLE).exists():
        return
    place = cluster.shared / death.name
    prepare(place)
    keys = [*WORLD, f"launcher={death.launcher}", f"resources.mem_gb={1 if death.how == 'cgroup' else 3}"]
    typed = words_of(death)
    typed[1:1] = ["--cluster", "slurm", *keys, *OF_SLURM.get(death.how, ())]
    _give_to_user(place)
    argv = [sys.executable, "-m", "ddp_hpc", "submit", *typed]
    done = cluster.run(*argv, cwd=place, env={"OMP_NUM_THREADS": "1"}, check=False)
    (place / "said").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(place / "runs" / "dying")
    if death.how in DEEDS:
        _wait(lambda: len(list(run.attempt_logs(0).glob("rank-*.log"))) == 4 and (place / "waits").exists())
        DEEDS[death.how](cluster, run, place)
    _wait(lambda: _is_over(cluster, run))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place, folder)
    (folder / WHOLE).write_text(stamp()["commit"])


def _is_over(cluster: Cluster, run: RunDir) -> bool:
    """Tell whether Slurm knows the job no more, or has ended it."""
    record = json.loads(run.submission.read_text())
    state = cluster.run("squeue", "--noheader", "--format=%T", f"--jobs={record['job_id']}", check=False).stdout.strip()
    attempts = Ledger.read(run).attempts
    # Once it is back in the queue, and not before: else the first attempt, too, counts as cancelled.
    if attempts and attempts[0].next and (state == "PENDING" or len(attempts) > 1):
        cluster.run("scancel", str(record["job_id"]), check=False)
    return state not in {"PENDING", "RUNNING", "COMPLETING", "SUSPENDED"} and bool(attempts)


def _wait(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s in vain"
        time.sleep(1)


def _give_to_user(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, USER, USER)


def _job(run: RunDir) -> str:
    return str(json.loads(run.submission.read_text())["job_id"])


def _nodes(run: RunDir) -> list[str]:
    return list(Ledger.read(run).attempts[0].nodes)


def _preempt(cluster: Cluster, run: RunDir, folder: Path) -> None:
    wanted = f"--nodelist={','.join(_nodes(run))}"
    cluster.run("sbatch", "--partition=high", wanted, "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


def _cut_power(cluster: Cluster, run: RunDir, folder: Path) -> None:
    cluster.kill(_nodes(run)[-1])


DEEDS: Mapping[str, Callable[[Cluster, RunDir, Path], object]] = {
    "preempt": _preempt,
    "node-failure": _cut_power,
    "scancel": lambda cluster, run, folder: cluster.run("scancel", _job(run)),
    "cancel": lambda cluster, run, folder: cluster.run(
        sys.executable, "-m", "ddp_hpc", "cancel", "dying", cwd=folder, check=False
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make all, or those whose name fits a pattern."""
    folder, chosen = asked_deaths("tests.campaigns.deaths.on_cluster", __doc__, ON_CLUSTER, argv)
    missing = [death for death in chosen if not (folder / death.name / WHOLE).exists()]
    alone = [death for death in missing if death.how in {"node-failure", "preempt"}]  # they take nodes away
    if not missing:
        return 0
    assert not why_not(), why_not()
    os.umask(0o022)
    with booted("why") as cluster, ThreadPoolExecutor(AT_ONCE) as pool:
        said = [pool.submit(_said, cluster, death, folder) for death in missing if death not in alone]
        for one in as_completed(said):
            print(one.result(), flush=True)  # noqa: T201  it is watched
        for death in alone:
            print(_said(cluster, death, folder), flush=True)  # noqa: T201
            cluster.mend()
    return 0


def _said(cluster: Cluster, death: Death, folder: Path) -> str:
    begin = time.monotonic()
    try:
        happen(cluster, death, folder / death.name)
        said = "done"
    except Exception as error:  # noqa: BLE001  the others go on
        said = f"NOT DONE: {error!r}"[:600]
    return f"{death.name} {time.monotonic() - begin:.1f} s {said}"


if __name__ == "__main__":
    sys.exit(main())
