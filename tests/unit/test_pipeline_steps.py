"""The steps of a pipeline: their order, what each sets, and which files and words are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.errors import ConfigError
from ddp_hpc.pipeline.resolving import ResolvedStep, resolve_steps
from ddp_hpc.pipeline.start import Target, _cancel_outdated, check_steps, waiting_for
from ddp_hpc.pipeline.steps import read_pipeline
from ddp_hpc.run_dir.records import Awaited, write_awaited
from ddp_hpc.submission import slurm
from ddp_hpc.submission.backend import Submission

THREE = """
name: digits
seed: 1
resources: {workers_per_node: 3}
steps:
  export: {after: [evaluate, "train:any"], script: {command: [cp, "{train.checkpoints}", "{export.run_dir}"]}}
  train: {train: {epochs: 7, global_batch_size: 96}}
  evaluate: {after: train, seed: 2, script: {command: [python, "{train.run}", "{other}"]}, resources: {workers_per_node: 1}}
"""


def resolved(folder: Path, text: str, *words: str, is_for_slurm: bool = True) -> dict[str, ResolvedStep]:
    path = folder / "pipeline.yaml"
    path.write_text(text)
    pipeline = read_pipeline(path, [f"runs_dir={folder}", *words])
    assert pipeline is not None
    environ = {"DDP_HPC_SITE_PROFILE": ""}
    return {step.name: step for step in resolve_steps(pipeline, environ, site=None, is_for_slurm=is_for_slurm)}


def test_each_step_stands_behind_those_it_waits_for_and_wins_over_what_all_share(tmp_path: Path) -> None:
    steps = resolved(tmp_path, THREE, "seed=5", "steps.train.train.epochs=9", "log.every_steps=3")

    specs = {name: step.resolved.spec for name, step in steps.items()}
    assert list(specs) == ["train", "evaluate", "export"]
    assert [spec.name for spec in specs.values()] == ["digits-train", "digits-evaluate", "digits-export"]
    assert [spec.seed for spec in specs.values()] == [5, 2, 5], "a step's value wins over one for all steps"
    assert (specs["train"].train.epochs, specs["train"].log.every_steps) == (9, 3)
    assert [spec.resources.workers_per_node for spec in specs.values()] == [3, 1, 3]
    assert specs["evaluate"].script.command == ("python", "digits-train", "{other}")
    assert specs["export"].script.command == (
        "cp",
        f"{tmp_path}/digits-train/checkpoints",
        f"{tmp_path}/digits-export",
    )
    assert steps["evaluate"].resolved.sources["seed"] == "file pipeline.yaml, step evaluate"


def test_a_file_without_steps_is_no_pipeline(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: digits\n")

    assert read_pipeline(tmp_path / "run.yaml", []) is None


def test_a_dependency_on_one_of_several_jobs_is_refused_for_a_step_that_waits_for_another_before_anything_is_submitted(
    tmp_path: Path,
) -> None:
    steps = resolved(tmp_path, "slurm: {dependency: 'afterok:3?afterok:4'}\nsteps: {train: , evaluate: {after: train}}")
    awaited = [Awaited(path="train", job_id="7")]

    with pytest.raises(ConfigError, match="Slurm cannot combine the two"):
        waiting_for(steps["evaluate"].resolved, awaited, {})

    target = Target(backend=slurm, import_paths=[], environ={})
    with pytest.raises(ConfigError, match=r"step 'evaluate' cannot be submitted: .*Slurm cannot combine"):
        check_steps([steps["evaluate"]], target)


def test_an_outdated_job_that_ends_before_it_is_cancelled_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = resolved(tmp_path, "steps: {train: , evaluate: {after: train}}")["evaluate"]
    step.run.path.mkdir(parents=True)
    write_awaited(step.run, "8", [Awaited(path="train", job_id="6")])
    found = iter([Submission(step.run, "slurm", "waiting", 0, job_id="8"), None])
    monkeypatch.setattr(slurm, "find_job", lambda _run, _environ: next(found))
    target = Target(backend=slurm, import_paths=[], environ={})

    _cancel_outdated(step, [Awaited(path="train", job_id="7")], target)

    assert next(found, "asked twice") == "asked twice"


def test_the_jobs_dependency_is_beside_the_users_own_and_removes_what_can_never_start(tmp_path: Path) -> None:
    steps = resolved(tmp_path, "slurm: {dependency: 'afterany:3'}\nsteps: {train: , evaluate: {after: train}}")
    awaited = [Awaited(path="a", job_id="12"), Awaited(path="b", job_id="13", when="notok")]

    asked = waiting_for(steps["evaluate"].resolved, awaited, {}).spec.slurm

    assert asked.dependency == "afterany:3,afterok:12,afternotok:13"
    assert asked.extra == {"kill_on_invalid_dep": "yes"}
    assert waiting_for(steps["train"].resolved, [], {}).spec.slurm.extra == {}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("", "must have a name and settings for each step"),
        ("{}", "must have a name and settings for each step"),
        ("[train]", "must have a name and settings for each step"),
        ("{1: {seed: 1}}", "has a step 1, but a step's name"),
        ("{a.b: {seed: 1}}", "has a step 'a.b', but a step's name"),
        ("{a: 3}", "`steps.a` in .* is 3, but it must have keys"),
        ("{a: {after: b}}", "names the step 'b' .* there is no such step. Steps: a"),
        ("{train: , b: {after: trian}}", "Did you mean 'train'"),
        ("{a: {after: {b: ok}}}", "must be the name of a step, or a list of names"),
        ("{a: , b: {after: [a, 'a:any']}}", "names the step 'a' twice"),
        ("{a: {after: c}, b: {after: a}, c: {after: b}}", "none of them could start: (. waits for ){3}.. Remove"),
        ("{a: {after: a}}", "wait for each other, so none of them could start: a waits for a"),
        ("{a: {name: mine}}", "`steps.a.name` is set .* the pipeline names the run of each step"),
        ("{a: {seed: x}}", "The step 'a' has no valid configuration: `seed`"),
        ("{a: {sede: 1}}", "Did you mean `seed`"),
        ("{a: , b: {script: {command: [x, '{a.run_dir}']}}}", "does not wait for 'a'.* Add `after: a` to `steps.b`"),
        ("{a: , b: {after: a, script: {command: [x, '{a.newest}']}}}", "of a step there are only {a.run_dir}"),
        ("{a: {restart: {by: successor}}, b: {after: a}}", "Set `steps.a.restart.by` to `requeue`"),
        ("{a: {steps: {b: {}}}}", "`steps` .*step a.* is not a key of one run"),
        ("{a: , b: {after: a, script: {command: [x, {a.run_dir}]}}}", "{a.run_dir} without quotes, which YAML reads as a mapping"),
        ("{a: , b: {after: a, train: {init_from: {a.run_dir}}}}", "{a.run_dir} without quotes, which YAML reads as a mapping"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_run_are_refused_with_what_to_do(steps: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, f"steps: {steps}\n")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("steps.trian.seed=1", "names the step 'trian', but there is no such step. Did you mean 'train'"),
        ("steps.train=1", "Write `steps.STEP.KEY=VALUE`"),
        ("steps.train.name=mine", "`steps.train.name` is set"),
        ("steps.train.sede=1", "Did you mean `seed`"),
        ("steps.train.after=evaluate", "wait for each other"),
    ],
)
def test_words_for_a_step_that_mean_nothing_are_refused(word: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(tmp_path, "steps: {train: , evaluate: {after: train}}", word)


def test_the_command_line_changes_what_a_step_waits_for(tmp_path: Path) -> None:
    steps = resolved(tmp_path, "steps: {train: , evaluate: {after: train}}", "steps.evaluate.after=[train:any]")

    assert [(one.step, one.when) for one in steps["evaluate"].step.after] == [("train", "any")]


def test_on_one_machine_a_successor_is_no_obstacle(tmp_path: Path) -> None:
    text = "steps: {a: {restart: {by: successor}}, b: {after: a}}"

    assert list(resolved(tmp_path, text, is_for_slurm=False)) == ["a", "b"]
