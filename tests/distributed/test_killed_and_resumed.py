"""A run killed at any moment and submitted again ends with the bits of a run that nothing disturbed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kill_trials import CONFIG, MAX_KILLS, Case, Outcome, cases_for, run_trial, unbroken_digest
from tests.distributed.whole_runs import Workplace, cases_of, make_workplace

NUM_TRIALS = 20
QUICK_TRIALS = {5: 2}
"""Of these, in `make test`: two workers with accumulation, loaders and bf16. Trial -> how many kills; the others have more."""
NUM_CAMPAIGN_TRIALS = 200


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("killed"), CONFIG)


class _SideBySide:
    """Trials, and the undisturbed runs that they are held against, as many at a time as there are cores."""

    def __init__(self, workplace: Workplace, cases: Mapping[int, Case]) -> None:
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        self._unbroken: dict[Case, Future[str]] = {}
        self.outcomes: dict[int, Future[Outcome]] = {}
        """By seed; they begin in the order of `cases`."""
        for seed, case in cases.items():
            plain = self._plain(case)
            if plain not in self._unbroken:
                self._unbroken[plain] = self._pool.submit(unbroken_digest, workplace, plain)
            num_kills = QUICK_TRIALS.get(seed, MAX_KILLS)
            self.outcomes[seed] = self._pool.submit(run_trial, workplace, case, seed, num_kills)

    def close(self) -> None:
        """Begin no more of them; return once those under way have ended."""
        self._pool.shutdown(cancel_futures=True)

    @staticmethod
    def _plain(case: Case) -> Case:
        """Return the case that another shares its digest with: loader processes change nothing."""
        return Case(case.world_size, case.accumulation, 0, case.precision)

    def unbroken(self, case: Case) -> str:
        return self._unbroken[self._plain(case)].result()

    def is_same(self, outcome: Outcome) -> bool:
        return outcome.digest == self.unbroken(outcome.case)


@pytest.fixture(scope="module")
def trials(workplace: Workplace, request: pytest.FixtureRequest) -> Iterator[_SideBySide]:
    """Begin all trials of this session, in the order in which their tests wait for them."""
    wanted: list[int] = cases_of(test_a_killed_run_ends_with_the_same_bits, "trial", request)
    cases = cases_for(NUM_TRIALS)
    with closing(_SideBySide(workplace, {trial: cases[trial] for trial in wanted})) as trials:
        yield trials


@pytest.mark.parametrize(
    "trial",
    [pytest.param(trial, marks=[] if trial in QUICK_TRIALS else pytest.mark.long) for trial in range(NUM_TRIALS)],
)
def test_a_killed_run_ends_with_the_same_bits(trials: _SideBySide, trial: int) -> None:
    outcome = trials.outcomes[trial].result()

    assert outcome.digest == trials.unbroken(outcome.case), outcome


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_two_hundred_killed_runs_end_with_the_same_bits(workplace: Workplace) -> None:
    """The campaign: its result so far is written beside the documentation, and every trial's story is printed."""
    cases = cases_for(NUM_CAMPAIGN_TRIALS)
    outcomes = []
    with closing(_SideBySide(workplace, {10_000 + trial: case for trial, case in enumerate(cases)})) as trials:
        for done in as_completed(trials.outcomes.values()):
            outcome = done.result()
            outcomes.append(outcome)
            _write(_report(outcomes, trials))
            verdict = "same bits" if trials.is_same(outcome) else "OTHER BITS"
            story = f"{outcome.case.name:16s} {verdict}; killed: {'; '.join(outcome.kills)}"
            print(f"{len(outcomes):3d}/{NUM_CAMPAIGN_TRIALS} {story}", flush=True)  # noqa: T201  it lasts half an hour

    report = _report(outcomes, trials)
    assert report["different"] == []
    assert report["runs_resumed_twice_in_one_epoch"] >= NUM_CAMPAIGN_TRIALS // 5


def _write(report: dict[str, Any]) -> None:
    path = Path(__file__).parents[2] / "docs" / "results" / "kill-campaign.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _report(outcomes: list[Outcome], trials: _SideBySide) -> dict[str, Any]:
    """Return the campaign's result as numbers."""
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    return {
        "trials": len(outcomes),
        "same_bits": sum(trials.is_same(outcome) for outcome in outcomes),
        "different": [outcome.case.name for outcome in outcomes if not trials.is_same(outcome)],
        "kills": len(kills),
        "kills_mid_save": sum("mid-save" in kill for kill in kills),
        "killed": dict(Counter(kill.split()[0] for kill in kills)),
        "runs_resumed_twice_in_one_epoch": sum(outcome.resumes_in_one_epoch >= 2 for outcome in outcomes),
        "trials_by_case": dict(sorted(Counter(outcome.case.name for outcome in outcomes).items())),
    }
