"""Which nodes a job does without, and what a new submission of a run remembers of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.cluster.slurm.exclude_nodes import nodes_to_exclude
from ddp_hpc.launch.submission import slurm as slurm_backend
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.run.config.resolve import Resolved
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, record_end, record_start
from ddp_hpc.run.spec import ResourcesSpec, RunSpec, SlurmSpec
from tests.made_run import make_run
from tests.unit.fake_slurm import FakeSlurm

TWO_NODES = ResourcesSpec(nodes=2)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path)
    slurm.knows_nodes(node1="idle", node2="mixed", node3="idle", node4="drained")
    return slurm


def test_nodes_are_spared_as_far_as_others_can_take_their_place(slurm: FakeSlurm) -> None:
    spec = RunSpec(name="digits", resources=TWO_NODES)

    assert nodes_to_exclude(["node1"], spec, slurm.environ, script="") == (("node1",), "")
    excluded, note = nodes_to_exclude(["node1", "node2"], spec, slurm.environ, script="")
    assert excluded == ("node1",)
    assert (
        note
        == "node2 failed before, but the job may still use it: too few of the other nodes take jobs and have what the job asks for. To exclude it all the same, set `slurm.exclude`"
    )


def test_nodes_that_the_user_leaves_out_take_nobodys_place(slurm: FakeSlurm) -> None:
    spec = RunSpec(name="digits", resources=TWO_NODES, slurm=SlurmSpec(exclude="node[2-3]"))

    assert nodes_to_exclude(["node1"], spec, slurm.environ, script="")[0] == ()


def test_without_an_answer_of_slurms_no_node_is_spared(tmp_path: Path) -> None:
    excluded, note = nodes_to_exclude(["node1"], RunSpec(name="digits"), {"PATH": str(tmp_path)}, script="")

    assert excluded == ()
    assert note.startswith("node1 failed before")


@pytest.mark.parametrize(
    ("num_others", "num_needed", "excluded"),
    [
        (4, 2, ("node2", "node1", "node3")),
        (2, 2, ("node2", "node1", "node3")),
        (1, 2, ("node2", "node3")),
        (0, 2, ("node3",)),
        (1, 4, ()),
    ],
)
def test_a_job_that_needs_suspected_nodes_gets_the_least_suspect_back_and_lost_ones_last(
    slurm: FakeSlurm, num_others: int, num_needed: int, excluded: tuple[str, ...]
) -> None:
    others = {f"node{number}": "idle" for number in range(4, 4 + num_others)}
    slurm.knows_nodes(node1="idle", node2="idle", node3="down", **others)
    spec = RunSpec(name="digits", resources=ResourcesSpec(nodes=num_needed))

    assert nodes_to_exclude(["node2", "node1", "node3"], spec, slurm.environ, script="")[0] == excluded


def test_slurms_answer_counts_for_more_than_the_number_of_nodes(slurm: FakeSlurm) -> None:
    slurm.knows_nodes(node1="idle", node2="powered_down")  # which a job has Slurm switch on
    slurm.has("sbatch", "echo 'sbatch: Job 7 to start at 2030-01-01T00:00:00 using 1 processors on nodes node2' >&2")

    assert nodes_to_exclude(["node1"], RunSpec(name="digits"), slurm.environ, script="")[0] == ("node1",)


UNLIKE = """case "$*" in *--exclude=*{needed}*) echo "{said}" >&2; exit 1 ;; esac"""
LACKING = "allocation failure: Requested node configuration is not available"


@pytest.mark.parametrize(
    ("needed", "said", "excluded"),
    [
        ("node1", LACKING, ("node3",)),
        ("node3", f"NOTE: maintenance on Monday\n{LACKING}", ("node1",)),
        ("node", LACKING, ()),
        ("node1", "allocation failure: Required node not available (down, drained or reserved)", ("node3",)),
        ("node", "allocation failure: Job violates accounting/QOS policy (job submit limit)", ("node1", "node3")),
        ("node", "NOTE: 60 estimates 2 SUs from allocation abc", ("node1", "node3")),
        ("node", "allocation failure: Unable to contact slurm controller (connect failure)", ("node1", "node3")),
    ],
)
def test_of_unlike_nodes_slurm_says_which_a_job_cannot_do_without(
    slurm: FakeSlurm, tmp_path: Path, needed: str, said: str, excluded: tuple[str, ...]
) -> None:
    slurm.knows_nodes(**{f"node{number}": "idle" for number in range(1, 9)})
    slurm.has("sbatch", f"cat > {tmp_path}/script; {UNLIKE.format(needed=needed, said=said)}")

    spared, _ = nodes_to_exclude(["node1", "node3"], RunSpec(name="digits"), slurm.environ, script="#SBATCH -C big")

    assert spared == excluded
    assert (tmp_path / "script").read_text() == "#SBATCH -C big"


def test_slurm_is_asked_with_what_the_user_leaves_out_and_where_the_job_is(slurm: FakeSlurm, tmp_path: Path) -> None:
    spec = RunSpec(name="digits", slurm=SlurmSpec(exclude="node4"))

    slurm.has("sbatch", f"echo $* > {tmp_path}/asked")

    nodes_to_exclude(["node1"], spec, slurm.environ, script=tmp_path / "job", partition="high")

    asked = f"--test-only --exclude=node4,node1 --partition=high {tmp_path}/job\n"
    assert (tmp_path / "asked").read_text() == asked


@pytest.mark.parametrize(
    ("asked", "directive"),
    [(SlurmSpec(), "#SBATCH --exclude=node1"), (SlurmSpec(nodelist="node[1-2]"), None)],
    ids=["any nodes", "these nodes"],
)
def test_a_new_submission_remembers_where_the_run_failed(
    slurm: FakeSlurm, tmp_path: Path, asked: SlurmSpec, directive: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_backend, "check_users_part", lambda *_: [])  # of the digits
    monkeypatch.setattr("ddp_hpc.launch.submission.submit_checks.capacity.NODE_LOCAL_DIRS", ())
    run = make_run(tmp_path)
    for attempt in (0, 1):
        record_start(run, attempt=attempt, job_id="7", cluster="slurm", nodes=("node1", "node2"))
        end = End(ending=Ending.FAILED, exit_code=1, cause=Cause.WORKER_CRASHED, failed_nodes=("node1",))
        record_end(run, attempt, end)
    spec = RunSpec(name=run.name, runs_dir=str(tmp_path), resources=TWO_NODES, slurm=asked)

    request = SubmitRequest(resolved=Resolved(spec, {}), import_paths=[], environ=slurm.environ)

    described = slurm_backend.describe(request)

    lines = (described.script or "").splitlines()
    assert [line for line in lines if "--exclude" in line] == ([directive] if directive else [])
    assert any("the job excludes node1" in note for note in described.notes) is bool(directive)
