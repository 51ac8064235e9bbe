"""Sends a run's numbers to MLflow: one MLflow run for all attempts, which is found again by a tag.

A number that MLflow has for a step is left out: MLflow keeps every value that it was sent, and cannot take one back.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from ddp_hpc.base.durable import make_directories, replace_text
from ddp_hpc.train.recording.recorders import Ending, MetricsRow, RecordedRun, SentNumbers
from ddp_hpc.train.recording.temporary import temporary_folder

TAG = "ddp_hpc.id"
_MOST_METRICS, _MOST_PARAMS, _LONGEST_VALUE, _LONGEST_NAME = 1000, 100, 500, 250
"""What one call of MLflow takes: https://mlflow.org/docs/latest/api_reference/rest-api.html (Request Limits)."""
_STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_FORBIDDEN_CHARS = re.compile(r"[^\w./ :-]")


def open_recorder(subject: RecordedRun) -> MLflow:
    """Find the run in MLflow, or make it there."""
    uri = subject.environ.get("MLFLOW_TRACKING_URI")
    return MLflow(subject, MlflowClient(tracking_uri=uri or f"sqlite:///{_make_database(subject.run.mlflow)}"))


def _make_database(folder: Path) -> Path:
    """Return the run's own database; make it first.

    MLflow makes its tables in many small steps: slow on a shared disk, and killed in between they are never completed. So
    they are made on a disk of this node, and appear by one rename.
    """
    path = folder / "mlflow.db"
    if not path.exists():
        make_directories(folder)
        memory = Path("/dev/shm")  # noqa: S108
        with temporary_folder(memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())) as here:
            made = here / path.name
            MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments()
            replace_text(path, made.read_bytes())
    return path


class MLflow:
    """One run of MLflow."""

    def __init__(self, subject: RecordedRun, client: MlflowClient) -> None:
        self._client = client
        self._run_id = _find_run_id(subject, client)
        self._names: dict[str, str] = {}
        """Tag -> the name that MLflow accepts for it."""
        self._asked: set[str] = set()
        """Names of which it is known what MLflow has."""
        self._sent = SentNumbers()
        self._waiting: list[Metric] = []

    def record(self, row: MetricsRow) -> None:
        for tag, value in row.numbers.items():
            if tag not in self._names:
                self._names[tag] = accepted_name(tag, {*self._names.values()})
            name = self._names[tag]
            if name not in self._asked:
                history = self._client.get_metric_history(self._run_id, name)
                self._sent.values |= {(one.step, name): one.value for one in history}
                self._asked.add(name)
            if self._sent.add_if_new(row.step, name, value):
                self._waiting.append(Metric(name, value, int(row.at * 1000), row.step))
        if len(self._waiting) >= _MOST_METRICS:
            self.flush()

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:_MOST_METRICS])
            del self._waiting[:_MOST_METRICS]
        self._sent.warn_of_changes()

    def close(self, ending: Ending) -> None:
        self._client.set_terminated(self._run_id, _STATUS[ending])


def accepted_name(tag: str, taken: set[str]) -> str:
    """Return a tag as MLflow accepts it: other characters than it allows become `_`; two tags never get one name."""
    parts = [part if part.strip(".") else "_" * max(1, len(part)) for part in _FORBIDDEN_CHARS.sub("_", tag).split("/")]
    plain = "/".join(parts)[:_LONGEST_NAME]
    name, number = plain, 2
    while name in taken:
        end = f"_{number}"
        name, number = plain[: _LONGEST_NAME - len(end)] + end, number + 1
    return name


def _find_run_id(subject: RecordedRun, client: MlflowClient) -> str:
    """Return the id of the run in MLflow: the one with our tag that is not deleted, else a new one."""
    name = subject.environ.get("MLFLOW_EXPERIMENT_NAME") or "ddp_hpc"
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        is_ours = not subject.environ.get("MLFLOW_TRACKING_URI")
        artifacts = (subject.run.mlflow / "artifacts").as_uri() if is_ours else None
        experiment_id = client.create_experiment(name, artifact_location=artifacts)
    else:
        experiment_id = experiment.experiment_id
    found = client.search_runs([experiment_id], f"tags.`{TAG}` = '{subject.id}'", order_by=["attributes.start_time"])
    if found:
        run_id, known = str(found[0].info.run_id), found[0].data.params
        client.update_run(run_id, status="RUNNING")
    else:
        tags = {TAG: subject.id, "ddp_hpc.path": str(subject.run.path)}
        run_id, known = str(client.create_run(experiment_id, run_name=subject.run.name, tags=tags).info.run_id), {}
    params = [
        Param(_FORBIDDEN_CHARS.sub("_", key)[:_LONGEST_NAME], str(value)[:_LONGEST_VALUE])
        for key, value in subject.config.items()
    ]
    params = [one for one in params if one.key not in known]  # MLflow never changes one
    for first in range(0, len(params), _MOST_PARAMS):
        client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
    return run_id
