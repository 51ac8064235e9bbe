"""submitit asks Slurm for the job, and the job is ours byte for byte; with a submitit that would send another, nothing runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import submitit

from ddp_hpc.base.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.launch.submission.allocate import SUBMITIT_METHOD_NAME, submit_job_script
from ddp_hpc.run.run_dir.paths import RunDir
from tests.made_run import make_run
from tests.unit.fake_slurm import FakeSlurm

SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2\necho ours \xe9\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path)
    run.job_script.write_text(SCRIPT, encoding="utf-8")
    return run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Have a cluster that takes every job, as job 17, and keeps the script."""
    slurm = FakeSlurm(tmp_path)
    slurm.has("srun", "true")
    slurm.has("sbatch", f'cp "$1" {tmp_path}/sent; env > {tmp_path}/environ; echo Submitted batch job 17')
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.setenv("SBATCH_PARTITION", "debug")  # a leftover that sbatch would take for a wish
    return slurm


def here(slurm: FakeSlurm) -> Mapping[str, str]:
    return {**slurm.environ, "SBATCH_PARTITION": "debug"}


def test_sbatch_gets_our_script_alone_and_submitit_keeps_a_handle_of_the_job(
    run: RunDir, slurm: FakeSlurm, tmp_path: Path
) -> None:
    assert submit_job_script(run, here(slurm)) == "17"

    assert (tmp_path / "sent").read_text(encoding="utf-8") == SCRIPT
    assert (run.submitit / "17_submission.sh").read_text(encoding="utf-8") == SCRIPT
    assert submitit.SlurmJob(folder=run.submitit, job_id="17").paths.submission_file.exists()
    assert "SBATCH_PARTITION" not in (tmp_path / "environ").read_text()
    assert len(slurm.orders("sbatch")) == 1


def test_a_submitit_without_the_method_that_we_override_sends_nothing(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(submitit.SlurmExecutor, SUBMITIT_METHOD_NAME)  # its base has an abstract one

    with pytest.raises(ConfigError, match=r"submitit \d\S*: submitit has no method `SlurmExecutor\._make_sub"):
        submit_job_script(run, slurm.environ)

    assert slurm.orders() == []


def test_a_job_that_submitit_sent_past_us_is_cancelled(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a later version that has the method still, for others, and calls another."""

    class Later(submitit.SlurmExecutor):
        def _submit_command(self, command: str) -> Any:
            submitit.core.utils.CommandFunction(["sbatch", str(run.config)], verbose=False)()
            return self.job_class(folder=self.folder, job_id="17", tasks=[0])

    monkeypatch.setattr(submitit, "SlurmExecutor", Later)

    with pytest.raises(ConfigError, match=r"does not call .* cancelled job 17"):
        submit_job_script(run, slurm.environ)

    assert slurm.orders("scancel") == ["scancel 17"]


@pytest.mark.parametrize(
    ("said", "error", "told"),
    [
        ("Unable to contact slurm controller (connect failure)", SlurmUnavailableError, "Slurm does not answer"),
        (
            "Batch job submission failed: Invalid qos specification",
            ConfigError,
            "sbatch refuses the job: .*Invalid qos",
        ),
    ],
)
def test_a_silent_controller_is_no_refusal(
    said: str, error: type[Exception], told: str, run: RunDir, slurm: FakeSlurm
) -> None:
    slurm.has("sbatch", f"echo 'sbatch: error: {said}' >&2; exit 1")

    with pytest.raises(error, match=told):
        submit_job_script(run, slurm.environ)


def test_half_a_slurm_is_named(run: RunDir, slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "bin" / "srun").unlink()

    with pytest.raises(ConfigError, match="`srun`, but PATH on this host has none"):
        submit_job_script(run, {"PATH": str(tmp_path / "bin")})

    assert slurm.orders() == []
