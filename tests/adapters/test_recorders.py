"""Weights & Biases and MLflow, the real ones: each number of each step once, whatever kills a run, and nothing left over."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from wandb.proto.wandb_internal_pb2 import Record

from ddp_hpc.base import processes
from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.recording.metrics_file import MetricsFile
from ddp_hpc.train.recording.recorders import identity_of
from ddp_hpc.train.recording.to_mlflow import TAG, accepted_name
from ddp_hpc.train.recording.to_wandb import _records
from tests.distributed.test_leaving import until
from tests.distributed.whole_runs import live_processes, make_workplace
from tests.made_run import make_run
from tests.unit.test_recorders import events_of, line

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's
KEY = "0123456789abcdef0123456789abcdef01234567"
CONFIG = """
recipe: {target: "trial_recipe:build", args: {num_samples: 96}}
train: {epochs: 6, global_batch_size: 24, lr: 0.01, grad_clip_norm: 1.0}
checkpoint: {every_steps: 2}
log: {every_steps: 1, recorders: [tensorboard, wandb, mlflow]}
resources: {workers_per_node: 2}
"""
SLOW = ("recipe.args.load_s=0.25",)
"""Three seconds a step, so that an attempt is killed before its end, however slow the machine is."""
Point = tuple[str, int]
"""A tag and a step."""


def followers_of(run: RunDir) -> list[psutil.Process]:
    """Return the processes that send this run's metrics, and what they have started."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if "ddp_hpc.train.recording.follower" in words and str(run.path) in words:
                found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def wandb_files(run: RunDir) -> list[Path]:
    return sorted(run.path.glob("wandb/offline-run-*/run-*.wandb"))


def in_wandb(files: Sequence[Path]) -> Counter[Point]:
    """Return how often each number is in W&B's files, by W&B's own records."""
    found: Counter[Point] = Counter()
    for path in files:
        for raw in _records(path.read_bytes()):
            history = Record.FromString(raw).history
            keys = [".".join(item.nested_key) for item in history.item]
            found.update((key, history.step.num) for key in keys if not key.startswith("_"))
    return found


def in_mlflow(run: RunDir, uri: str | None = None) -> Counter[Point]:
    """Return how often each number is in MLflow; there is one run."""
    client = MlflowClient(tracking_uri=uri or f"sqlite:///{run.mlflow / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("ddp_hpc")
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`{TAG}` = '{identity_of(run)}'")
    points: Counter[Point] = Counter()
    for name in found.data.metrics:
        points.update((name, one.step) for one in client.get_metric_history(found.info.run_id, name))
    return points


def in_tensorboard(run: RunDir) -> Counter[Point]:
    return Counter((tag, step) for tag, pairs in events_of(run).items() for step, _ in pairs)


def in_metrics(run: RunDir) -> Counter[Point]:
    """Return the numbers of metrics.jsonl; a rate is null until it was measured."""
    found: Counter[Point] = Counter()
    for one in read_json_lines(run.metrics):
        names = one.keys() - {"kind", "step", "epoch", "at"}
        found.update(
            (f"{one['kind']}/{name}", one["step"]) for name in names if one[name] is not None or "_per_s" not in name
        )
    return found


def newest_checkpoint(run: RunDir) -> int:
    return max(committed_steps(run), default=0) if run.checkpoints.exists() else 0


def newest_line(run: RunDir) -> int:
    return max((one["step"] for one in read_json_lines(run.metrics)), default=0)


def without_rates(points: Counter[Point]) -> Counter[Point]:
    """Leave out rates, which a repeated step may have been measured at, and before not, or the reverse."""
    return Counter({point: number for point, number in points.items() if not point[0].endswith("_per_s")})


def test_after_kills_a_stop_and_another_world_each_number_is_everywhere_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HOME", "/proc/nobody")  # where nothing can be written
    place = make_workplace(tmp_path, CONFIG)
    run = place.run("broken")
    for kind in ("worker", "agent"):
        before = newest_checkpoint(run)
        assert place.submit("broken", *SLOW).returncode == 0
        until(lambda: len(in_wandb(wandb_files(run)[-1:])) > 0)
        until(lambda: before < newest_checkpoint(run) < newest_line(run))  # noqa: B023
        victims = followers_of(run)
        live_processes(run)[kind][0].kill()
        until(lambda: not processes.is_locked(run.lock))
        _, alive = psutil.wait_procs(victims, timeout=30)
        assert alive == []
    assert place.submit("broken", *SLOW).returncode == 0
    until(lambda: len(Ledger.read(run).attempts) >= 3 and followers_of(run))
    assert place.command("stop", "broken").returncode == 0

    place.finish("broken", "resources.workers_per_node=1")

    assert list(read_json_lines(run.superseded_metrics)), "no step was repeated, so this shows nothing"
    expected = without_rates(in_metrics(run))
    assert {step for _, step in expected} == {*range(1, 25)}
    assert set(expected.values()) == {1}
    assert without_rates(in_wandb(wandb_files(run))) == expected
    assert without_rates(in_mlflow(run)) == expected
    assert without_rates(in_tensorboard(run)) == expected
    assert max(in_wandb(wandb_files(run)).values()) == max(in_mlflow(run).values()) == 1
    assert len({path.name for path in wandb_files(run)}) == 1
    assert followers_of(run) == []
    assert [str(path) for path in run.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []


def write(run: RunDir, lines: Sequence[Mapping[str, Any]], resumed_at: int = 0) -> None:
    """Write the lines of one attempt, as rank zero does."""
    file = MetricsFile(run, 0)
    file.open(resumed_at)
    for one in lines:
        file.append(one)
    file.close()


def send(run: RunDir, recorder: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Send what a recorder lacks, as a user does after a run."""
    argv = [sys.executable, "-m", "ddp_hpc.train.recording.follower", str(run.path), recorder]
    return subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, check=False, timeout=120)


def test_wandb_gets_the_rest_where_a_killed_attempt_left_half_a_record_and_nothing_where_it_has_all(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    write(run, [line(step, loss=math.nan if step == 3 else 1.0) for step in range(1, 200)])
    assert send(run, "wandb").returncode == 0
    (first,) = wandb_files(run)
    first.write_bytes(first.read_bytes()[:-3000])
    lost = in_metrics(run) - in_wandb([first])

    again = [send(run, "wandb").returncode for _ in range(2)]

    assert again == [0, 0]
    assert len(wandb_files(run)) == 2
    assert lost
    assert in_wandb(wandb_files(run)[1:]) == lost
    assert in_wandb(wandb_files(run)) == in_metrics(run)


@pytest.mark.parametrize("recorder", ["wandb", "mlflow"])
def test_steps_that_come_out_otherwise_as_they_are_repeated_are_named(tmp_path: Path, recorder: str) -> None:
    run = make_run(tmp_path)
    write(run, [line(step, loss=math.nan if step > 3 else 0.1 * step, samples_per_s=1.0) for step in range(1, 7)])
    first = send(run, recorder)
    write(run, [line(step, loss=math.nan if step == 5 else 0.7, samples_per_s=2.0) for step in (4, 5, 6)], resumed_at=3)

    again = send(run, recorder)

    assert (first.returncode, again.returncode) == (0, 0)
    assert "got other values" not in first.stderr
    assert (
        "steps that were repeated have other values than the first time: 4, 6. This recorder keeps their first values"
        in again.stderr
    )


def test_files_of_wandb_in_a_directory_that_the_user_names_are_found_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write(run, [line(1), line(1, "eval", accuracy=0.5)])
    elsewhere = RunDir(tmp_path / "elsewhere")
    environ = {"WANDB_DIR": str(elsewhere.path), "WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}

    assert [send(run, "wandb", **environ).returncode for _ in range(2)] == [0, 0]

    assert in_wandb(wandb_files(elsewhere)) == in_metrics(run)
    assert not (run.path / "wandb").exists()
    assert [path for path in elsewhere.path.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022] == []


def test_a_file_of_wandb_in_another_format_ends_the_recorder_and_names_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write(run, [line(1)])
    folder = run.path / "wandb" / f"offline-run-20260101_000000-{identity_of(run)}"
    folder.mkdir(parents=True)
    (folder / f"run-{identity_of(run)}.wandb").write_bytes(b":W&B of the future")

    sent = send(run, "wandb")

    assert sent.returncode == 1
    assert f"{folder.name}/run-{identity_of(run)}.wandb is not in the format of W&B's files" in sent.stderr


def test_an_mlflow_run_that_was_deleted_is_made_again_with_all_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write(
        run,
        [
            line(1, loss=math.nan),
            line(2),
            line(2, "eval", **{"f1@0.5 (é)": 0.5, "f1@0.5 [é]": 0.25, "": 1.0, "..": 2.0}),
        ],
    )
    uri = f"sqlite:///{tmp_path / 'shared.db'}"
    assert send(run, "mlflow", MLFLOW_TRACKING_URI=uri).returncode == 0
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("ddp_hpc")
    (first,) = client.search_runs([experiment.experiment_id])
    client.delete_run(first.info.run_id)

    assert [send(run, "mlflow", MLFLOW_TRACKING_URI=uri).returncode for _ in range(2)] == [0, 0]

    assert in_mlflow(run, uri) == {
        ("train/loss", 1): 1,
        ("train/loss", 2): 1,
        ("eval/f1_0.5 _é_", 2): 1,
        ("eval/f1_0.5 _é__2", 2): 1,
        ("eval/_", 2): 1,
        ("eval/__", 2): 1,
    }
    assert not run.mlflow.exists()


def test_what_is_left_is_sent_to_the_server_that_the_configuration_names(tmp_path: Path) -> None:
    run, uri = make_run(tmp_path), f"sqlite:///{tmp_path / 'central.db'}"
    run.config.write_text(f"{run.config.read_text()}\nenv: {{MLFLOW_TRACKING_URI: '{uri}'}}\n")
    write(run, [line(1)])

    assert send(run, "mlflow").returncode == 0

    assert in_mlflow(run, uri) == {("train/loss", 1): 1}
    assert not run.mlflow.exists()


def test_an_mlflow_run_whose_process_was_killed_before_it_had_the_configuration_gets_it_next_time(
    tmp_path: Path,
) -> None:
    run, uri = make_run(tmp_path), f"sqlite:///{tmp_path / 'shared.db'}"
    client = MlflowClient(tracking_uri=uri)
    made = client.create_run(client.create_experiment("ddp_hpc"), tags={TAG: identity_of(run)}).info.run_id
    client.log_param(made, "train.lr", "as the first attempt had it")
    write(run, [line(1)])

    assert send(run, "mlflow", MLFLOW_TRACKING_URI=uri).returncode == 0

    params = client.get_run(made).data.params
    assert params["train.lr"] == "as the first attempt had it"
    assert params["name"] == "digits"


def test_a_copied_run_and_another_point_of_a_sweep_have_runs_of_their_own_in_one_mlflow(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'shared.db'}"
    point, other, copy = make_run(tmp_path, "a-0"), make_run(tmp_path, "a-1"), RunDir(tmp_path / "copy")
    write(point, [line(1)])
    write(other, [line(1), line(2)])
    for run in (point, other):
        assert send(run, "mlflow", MLFLOW_TRACKING_URI=uri).returncode == 0
    shutil.copytree(point.path, copy.path)
    write(copy, [line(2), line(3)], resumed_at=1)

    assert send(copy, "mlflow", MLFLOW_TRACKING_URI=uri).returncode == 0

    assert [len(in_mlflow(run, uri)) for run in (point, other, copy)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("tag", "taken", "name"),
    [
        ("train/loss", set(), "train/loss"),
        ("eval/a%b", {"eval/a_b"}, "eval/a_b_2"),
        ("eval//x", set(), "eval/_/x"),
        ("eval/../x", set(), "eval/__/x"),
        ("eval/" + "x" * 300, set(), "eval/" + "x" * 245),
        ("eval/" + "x" * 300, {"eval/" + "x" * 245}, "eval/" + "x" * 243 + "_2"),
    ],
)
def test_a_name_that_mlflow_refuses_becomes_one_that_it_accepts(tag: str, taken: set[str], name: str) -> None:
    assert accepted_name(tag, taken) == name


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("answers", ["never", "not there"])
def test_servers_that_do_not_answer_cost_a_training_nothing_but_the_bound_at_its_end(
    tmp_path: Path, silent_server: str, answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = silent_server if answers == "never" else "http://127.0.0.1:9"
    for name, value in {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": server,
        "WANDB_API_KEY": KEY,
        "MLFLOW_TRACKING_URI": server.replace("//", "//me:secretword@"),
    }.items():
        monkeypatch.setenv(name, value)
    place = make_workplace(tmp_path, CONFIG)

    place.finish("alone")

    run = place.run("alone")
    started, ended = Ledger.read(run).attempts[0].started_at, read_ended(run)
    assert ended - started < 90
    assert in_tensorboard(run) == in_metrics(run)
    assert followers_of(run) == []
    log = run.rank_log(0, 0).read_text()
    assert "the recorder 'mlflow' has not sent all numbers" in log
    assert "ddp_hpc.train.recording.follower" in log
    assert "the recorder 'wandb' has not sent all" not in log or "`wandb sync` uploads" in log
    every_text = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert [text for text in every_text if KEY.encode() in text or b"secretword" in text] == []


def read_ended(run: RunDir) -> float:
    ended = Ledger.read(run).attempts[0].ended_at
    assert ended is not None
    return ended
