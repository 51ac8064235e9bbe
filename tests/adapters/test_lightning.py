"""Within a Slurm job, Lightning does not requeue by itself where ours is given, and a SIGTERM is not its own any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset

from ddp_hpc import attach
from ddp_hpc.base.processes import STOP_SIGNALS
from ddp_hpc.train.adapters.lightning import AgreedStop, cluster_environment
from ddp_hpc.train.attached import run as attached_run

JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.fixture(autouse=True)
def _in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attached_run, "_pid_and_run", None)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, signalled_at: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.signalled_at = signalled_at

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        if self.global_step == self.signalled_at:
            os.kill(os.getpid(), signal.SIGTERM)
        loss: torch.Tensor = self.layer(batch[0]).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(accelerator="cpu", devices=1, max_steps=100_000, max_epochs=-1, **quiet, **options)


def environment_of(one: Any) -> Any:
    return one._accelerator_connector.cluster_environment


@pytest.mark.filterwarnings("ignore")
def test_lightnings_own_requeue_is_off() -> None:
    assert isinstance(environment_of(trainer()), SLURMEnvironment)

    assert not isinstance(environment_of(trainer(plugins=[cluster_environment()])), SLURMEnvironment)


@pytest.mark.filterwarnings("ignore")
def test_a_sigterm_ends_the_training_with_a_commit_and_the_code_to_come_back() -> None:
    callback = AgreedStop(attach())
    one = trainer(plugins=[cluster_environment()], callbacks=[callback])

    with pytest.raises(SystemExit) as end:
        one.fit(Net(signalled_at=7), DataLoader(TensorDataset(torch.zeros(64, 1)), batch_size=4))

    assert end.value.code == 99
    assert not one.received_sigterm
    path = callback.latest()
    assert path is not None
    assert torch.load(path, weights_only=False)["global_step"] == one.global_step > 7
