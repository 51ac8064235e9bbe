"""Real trainings with a slow rank: what the log, the status and the records say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.timeline import read_alarms
from tests.slow_ranks.cases import Case, train


@pytest.mark.long
def test_the_log_and_the_records_of_a_training_name_the_rank_that_loads_slowly_and_the_cause(tmp_path: Path) -> None:
    run, printed = train(Case(where="data", slow=1, delay=0.3, base=0.3), tmp_path)

    [alarm] = read_alarms(run)
    assert (alarm.rank, alarm.cause, alarm.num_waiting) == (1, "data", 2)
    assert printed.count(alarm.sentence()) == 1
    assert alarm.since_step is not None
    assert alarm.ended_at is not None
    status = subprocess.run(
        [sys.executable, "-m", "ddp_hpc", "status", str(run.path), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(status.stdout)["slow_ranks"] == []  # it has ended


@pytest.mark.long
def test_a_script_that_knows_nothing_of_ddp_hpc_has_its_slow_rank_named(tmp_path: Path) -> None:
    run, printed = train(Case(where="backward", slow=2, delay=0.3, base=0.3, is_script=True), tmp_path)

    [alarm] = read_alarms(run)
    assert (alarm.rank, alarm.cause, alarm.since_step) == (2, "", None)
    assert "rank 2 on" in printed
