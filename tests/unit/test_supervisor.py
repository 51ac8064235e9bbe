"""The supervisor's own end, where it cannot even begin."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc import checkpoint_store, exit_codes
from ddp_hpc.job import supervisor
from ddp_hpc.run_dir import RunDir
from tests.made_run import make_run
from tests.unit.held_signals import signals_held_back


def test_a_disk_without_room_for_an_attempt_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def claim(run: RunDir, attempt: int) -> list[str]:
        raise OSError(errno.ENOSPC, "No space left on device", str(run.checkpoints))

    monkeypatch.setattr(checkpoint_store, "claim", claim)
    run = make_run(tmp_path)

    with signals_held_back():
        code = supervisor.main([str(run.path)])

    said = capsys.readouterr().err
    assert code == exit_codes.FAILED
    assert "No space left on device" in said
    assert "submit digits again" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("words", "heard"), [([], "None"), (["--told"], "SIGUSR2")])
def test_a_supervisor_that_was_told_before_it_could_listen_hears_it(
    tmp_path: Path, words: list[str], heard: str
) -> None:
    run = make_run(tmp_path)
    run.config.write_text("name: [")  # so far, and no further
    script = (
        "import sys; from ddp_hpc.job import supervisor; from ddp_hpc.processes import await_signal;"
        "code = supervisor.main(sys.argv[1:]); number = await_signal(0.0); print(code, number and number.name)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(run.path), *words], capture_output=True, text=True, check=False
    )

    assert done.stdout == f"{exit_codes.REFUSED} {heard}\n", done.stderr
