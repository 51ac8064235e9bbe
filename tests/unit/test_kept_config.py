"""A run's `config.yaml` of version 0.1.0, with a value of its own for every key there was: tests/data/config."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ddp_hpc.base.durable import replace_text
from ddp_hpc.launch.submission.fill_unset import fill_unset
from ddp_hpc.run.config.keys import key_of
from ddp_hpc.run.config.resolve import Resolved, flat_spec, load_resolved, removed_key_notes, render_resolved, resolve
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, write_progress

KEPT = Path(__file__).parents[1] / "data" / "config" / "every-key.yaml"
SINCE_THEN = {
    "script",
    "notify",
    "integrity",
    "slurm.gpu_option",
    "debug",
    "preflight",
    "log.recorders",
    "log.grad_norm",
    "checkpoint.min_interval_s",
    "checkpoint.max_interval_s",
    "checkpoint.max_failing_s",
    "profile",
}
"""Sections and keys that version 0.1.0 did not have."""
FLAGS = {
    "mail_type": "END",
    "mail_user": "me@example.org",
    "comment": "a: comment",
    "reservation": "class",
}
"""Keys of `slurm` then, which are in `slurm.extra` now."""
NO_PROFILE = {"DDP_HPC_SITE_PROFILE": ""}
CONFLICTING = {"stage.archive"}
"""Keys that the file leaves at their default: they exclude another that it sets."""


def test_a_run_directory_of_version_0_1_0_holds_the_values_that_it_held_then() -> None:
    values = flat_spec(load_resolved(KEPT))

    written = yaml.safe_load(KEPT.read_text())
    for key, value in values.items():
        if {key, key.partition(".")[0]} & SINCE_THEN:
            continue
        of_file = written
        for part in (
            key.replace("slurm.extra.", "slurm.").split(".") if key.rpartition(".")[2] in FLAGS else key.split(".")
        ):
            of_file = of_file[part]
        assert value == (tuple(of_file) if isinstance(value, tuple) else of_file), key
        assert value != default_of(key) or key in CONFLICTING, f"{key} has its default: it shows nothing"


def default_of(key: str) -> object:
    """Return the default of a key; of one below an open key, that there is none."""
    found = key_of(key)
    assert found is not None, key
    return found.default


def test_it_can_be_submitted_again_without_the_keys_that_are_gone_since(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "kept")
    run.path.mkdir()
    run.attempts.touch()
    run.config.write_bytes(KEPT.read_bytes())

    again = resolve(run.config, [f"runs_dir={tmp_path}", "name=again"], NO_PROFILE).spec

    gone = {line.split("`")[1] for line in removed_key_notes(run.config)}
    assert gone == {"log.tensorboard"}
    assert again.slurm.extra == {"switches": 1, "overcommit": True, **FLAGS}

    assert (again.name, again.train, again.resources) == (
        "again",
        load_resolved(KEPT).train,
        load_resolved(KEPT).resources,
    )


@pytest.fixture
def recorded(tmp_path: Path) -> RunDir:
    """A run that an older version began, whose default was `highest`; it has a checkpoint."""
    run = RunDir(tmp_path / "older")
    run.path.mkdir()
    replace_text(run.config, "name: older\ntrain: {matmul_precision: highest}\n", durable=False)
    write_progress(run, Progress(attempt=0, step=5, last_checkpoint=5))
    return run


def submitted(run: RunDir, *words: str, is_fresh: bool = False) -> Resolved:
    """Return the configuration with which the run is submitted again."""
    settings = [f"runs_dir={run.path.parent}", f"name={run.name}", *words]
    return fill_unset(resolve(None, settings, NO_PROFILE, command=["true"]), {}, is_for_slurm=True, is_fresh=is_fresh)


def test_a_run_with_a_checkpoint_keeps_the_precision_that_it_was_trained_with(
    recorded: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    again = submitted(recorded)

    assert again.spec.train.matmul_precision == "highest"
    assert again.sources["train.matmul_precision"] == "the run's first submission"
    assert "`train.matmul_precision` stays 'highest', as the run's checkpoint was trained" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "value"), [("high", "high"), ("null", None)])
def test_it_has_another_precision_where_one_is_asked_for(recorded: RunDir, word: str, value: str | None) -> None:
    assert submitted(recorded, f"train.matmul_precision={word}").spec.train.matmul_precision == value


def test_it_has_the_default_where_it_begins_anew(recorded: RunDir) -> None:
    fresh = submitted(recorded, is_fresh=True)
    recorded.progress.unlink()

    assert fresh.spec.train.matmul_precision is submitted(recorded).spec.train.matmul_precision is None


def test_a_run_that_is_named_by_its_directory_is_the_run_that_starts_wherever_that_lies_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "$moved" / "net.old-1")
    run.path.mkdir(parents=True)
    run.config.write_text("name: net\nruns_dir: runs\n")
    monkeypatch.chdir(tmp_path)
    elsewhere = {**NO_PROFILE, "DDP_HPC__RUNS_DIR": "elsewhere"}

    assert resolve(run.config, [], NO_PROFILE).spec.path == tmp_path / "runs" / "net"  # a file that somebody has copied
    run.submission_lock.touch()
    assert resolve(run.config, [], elsewhere).spec.path == run.path
    monkeypatch.chdir(run.path)
    assert resolve(Path("config.yaml"), [], NO_PROFILE).spec.path == run.path
    again = resolve(run.config, ["name=again", "runs_dir=other"], NO_PROFILE).spec
    assert (again.name, again.runs_dir) == ("again", "other")

    (tmp_path / "runs").mkdir()
    run.path.rename(tmp_path / "runs" / "net")
    monkeypatch.chdir(tmp_path)
    assert resolve(Path("runs/net/config.yaml"), [], NO_PROFILE).spec.runs_dir == "runs"  # nothing has changed


def test_paths_of_a_runs_own_file_are_not_filled_in_again(tmp_path: Path) -> None:
    words = [f"runs_dir={tmp_path}/a$$b", "name=own", "train.init_from=/data/$$x"]
    first = resolve(None, words, NO_PROFILE, command=["true"])
    run = RunDir(first.spec.path)
    run.path.mkdir(parents=True)
    run.config.write_text(render_resolved(first))
    run.submission_lock.touch()

    again = resolve(run.config, [], NO_PROFILE | {"b": "other", "x": "other"}).spec

    assert (again.path, again.train.init_from) == (run.path, "/data/$x")


@pytest.mark.parametrize(
    ("word", "is_kept"),
    [("recipe.args={}", False), ("recipe.args.a=2", False), ("recipe.args.a.b.c=2", False), ("recipe.args.x=2", True)],
)
def test_a_value_of_an_earlier_command_line_gives_place_to_one_above_or_below_it(
    word: str, is_kept: bool, tmp_path: Path
) -> None:
    words = [f"runs_dir={tmp_path}", "name=own"]
    first = resolve(None, [*words, "recipe.args.a.b=1"], NO_PROFILE, command=["true"])
    run = RunDir(first.spec.path)
    run.path.mkdir()
    run.config.write_text(render_resolved(first))

    again = fill_unset(resolve(None, [*words, word], NO_PROFILE, command=["true"]), {}, is_for_slurm=True).spec

    assert (again.recipe.args.get("a") == {"b": 1}) == is_kept


def test_what_an_earlier_command_line_has_set_is_kept_letter_by_letter_and_a_secret_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"runs_dir={tmp_path}", "name=own"]
    first = resolve(
        None, [*words, "env.HF_TOKEN=hf_secret123", "train.init_from=/data/$$x"], NO_PROFILE, command=["true"]
    )
    run = RunDir(first.spec.path)
    run.path.mkdir()
    run.config.write_text(render_resolved(first))

    again = fill_unset(resolve(None, words, NO_PROFILE, command=["true"]), {}, is_for_slurm=True).spec

    assert (again.env, again.train.init_from) == ({"HF_TOKEN": "hf_secret123"}, "/data/$x")
    told = capsys.readouterr().err
    assert "`env.HF_TOKEN=" in told
    assert "secret123" not in told
