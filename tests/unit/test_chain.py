"""What a new job waits for, where other runs have ended, or wait, or are no jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.launch.submission import slurm
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.sweep import chain
from ddp_hpc.launch.sweep.chain import add_dependency, split_end_condition
from ddp_hpc.run.config.resolve import Resolved, flat_spec, load_resolved
from ddp_hpc.run.run_dir.ledger import End, Ending, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import AwaitedRun, write_done
from ddp_hpc.run.spec import RunSpec, SlurmSpec
from ddp_hpc.run.workload.table import workload_of
from tests.made_run import make_run


def ended(run: RunDir, ending: Ending) -> None:
    record_start(run, attempt=0, job_id="7")
    record_end(run, 0, End(ending=ending, exit_code=1))
    if ending == Ending.FINISHED:
        write_done(run, workload_of(load_resolved(run.config)).goal)


def wait_for(run: RunDir, when: str, *, users: str | None = None) -> str | None:
    spec = RunSpec(name="next", runs_dir=str(run.path.parent), slurm=SlurmSpec(dependency=users))
    asked = SubmitRequest(
        resolved=Resolved(spec, dict.fromkeys(flat_spec(spec), "test")), import_paths=[], environ={"PATH": ""}
    )
    return add_dependency(asked, [f"{run.path}:{when}"], slurm).spec.slurm.dependency


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", ("a", "ok")), ("a:notok", ("a", "notok")), ("a:any", ("a", "any")), ("/runs/b:c", ("/runs/b:c", "ok"))],
)
def test_a_run_is_named_with_how_it_has_to_end(text: str, expected: tuple[str, str]) -> None:
    assert split_end_condition(text) == expected


@pytest.mark.parametrize(
    ("ending", "when"), [("finished", "ok"), ("finished", "any"), ("failed", "notok"), ("failed", "any")]
)
def test_a_run_that_has_ended_as_asked_for_is_not_waited_for(ending: str, when: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    ended(run, Ending(ending))

    assert wait_for(run, when) is None
    assert wait_for(run, when, users="afterany:3,singleton") == "afterany:3,singleton"


@pytest.mark.parametrize(
    ("ending", "when", "how"), [("finished", "notok", "has finished"), ("failed", "ok", "is failed")]
)
def test_a_run_that_has_ended_otherwise_is_refused(ending: str, when: str, how: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    ended(run, Ending(ending))

    with pytest.raises(ConfigError, match=how):
        wait_for(run, when)


def test_a_dependency_of_the_users_on_one_of_several_jobs_is_refused_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    ended(run, Ending.FINISHED)

    assert wait_for(run, "ok", users="afterok:3?afterok:4") == "afterok:3?afterok:4"
    monkeypatch.setattr(chain, "_awaited_job", lambda *_: AwaitedRun(path=str(run.path), job_id="7"))
    assert wait_for(run, "ok", users="singleton") == "singleton,afterok:7"
    with pytest.raises(ConfigError, match=r"has to wait for afterok:7; Slurm cannot combine the two"):
        wait_for(run, "ok", users="afterok:3?afterok:4")


def test_on_one_machine_a_chain_is_refused_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("recipe: {target: 'ddp_hpc.train.recipes.drill:build'}\n")

    assert main(["submit", "a.yaml", "--cluster", "local", "--after", "b"]) == 2

    assert "`ddp-hpc submit A --wait && ddp-hpc submit B`" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
