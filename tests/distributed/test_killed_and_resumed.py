"""A run killed at any moment and submitted again ends with the bits of a run that nothing disturbed."""

from __future__ import annotations

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kill_trials import CONFIG, Case, Outcome, cases_for, run_trial, unbroken_digest
from tests.distributed.whole_runs import Workplace, make_workplace

NUM_TRIALS = 20
NUM_CAMPAIGN_TRIALS = 200


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("killed"), CONFIG)


@pytest.fixture(scope="module")
def unbroken(workplace: Workplace) -> dict[Case, str]:
    """Digests of undisturbed runs, made when they are first needed."""
    return _Unbroken(workplace)


class _Unbroken(dict[Case, str]):
    def __init__(self, workplace: Workplace) -> None:
        super().__init__()
        self._workplace = workplace

    def __missing__(self, case: Case) -> str:
        """Loader processes change nothing, so cases that differ in them alone share a digest."""
        plain = Case(case.world_size, case.accumulation, 0, case.precision)
        self[case] = unbroken_digest(self._workplace, plain) if case == plain else self[plain]
        return self[case]


@pytest.mark.parametrize("trial", range(NUM_TRIALS))
def test_a_killed_run_ends_with_the_same_bits(
    workplace: Workplace, unbroken: dict[Case, str], outcomes: list[Outcome], trial: int
) -> None:
    case = cases_for(NUM_TRIALS)[trial]

    outcome = run_trial(workplace, case, seed=trial)

    outcomes.append(outcome)
    assert outcome.digest == unbroken[case], outcome


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return []


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_two_hundred_killed_runs_end_with_the_same_bits(workplace: Workplace, unbroken: dict[Case, str]) -> None:
    """The campaign: its result so far is written beside the documentation, and every trial's story is printed."""
    cases = cases_for(NUM_CAMPAIGN_TRIALS)
    for case in set(cases):
        unbroken[case]  # made before the trials, which run side by side
    outcomes = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as side_by_side:
        trials = [side_by_side.submit(run_trial, workplace, case, 10_000 + trial) for trial, case in enumerate(cases)]
        for done in as_completed(trials):
            outcome = done.result()
            outcomes.append(outcome)
            _write(_report(outcomes, unbroken))
            verdict = "same bits" if outcome.digest == unbroken[outcome.case] else "OTHER BITS"
            story = f"{outcome.case.name:16s} {verdict}; killed: {'; '.join(outcome.kills)}"
            print(f"{len(outcomes):3d}/{NUM_CAMPAIGN_TRIALS} {story}", flush=True)  # noqa: T201  it lasts half an hour

    report = _report(outcomes, unbroken)
    assert report["different"] == []
    assert report["runs_resumed_twice_in_one_epoch"] >= NUM_CAMPAIGN_TRIALS // 5


def _write(report: dict[str, Any]) -> None:
    path = Path(__file__).parents[2] / "docs" / "results" / "kill-campaign.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _report(outcomes: list[Outcome], unbroken: dict[Case, str]) -> dict[str, Any]:
    """Return the campaign's result as numbers."""
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    return {
        "trials": len(outcomes),
        "same_bits": sum(outcome.digest == unbroken[outcome.case] for outcome in outcomes),
        "different": [outcome.case.name for outcome in outcomes if outcome.digest != unbroken[outcome.case]],
        "kills": len(kills),
        "kills_mid_save": sum("mid-save" in kill for kill in kills),
        "killed": dict(Counter(kill.split()[0] for kill in kills)),
        "runs_resumed_twice_in_one_epoch": sum(outcome.resumes_in_one_epoch >= 2 for outcome in outcomes),
        "trials_by_case": dict(sorted(Counter(outcome.case.name for outcome in outcomes).items())),
    }
