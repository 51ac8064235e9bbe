"""What the exit codes of several processes mean together."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.base.errors import CheckpointError, ConfigError, DivergedError, FencedError, NotSavedError, exit_code_of
from ddp_hpc.base.exit_codes import (
    DIVERGED,
    FAILED,
    FENCED,
    FINISHED,
    NOT_SAVED,
    PORT_TAKEN,
    RANKS_DIFFER,
    REFUSED,
    STOPPED,
    STOPPED_BEFORE_START,
    combined_exit_code,
    describe_end,
)

KILLED = -9


@pytest.mark.parametrize(
    ("codes", "together"),
    [
        ((FINISHED, FINISHED), FINISHED),
        ((STOPPED, STOPPED), STOPPED),
        ((FINISHED, STOPPED), STOPPED),
        ((FINISHED, FAILED), FAILED),
        ((STOPPED, KILLED), FAILED),
        ((FAILED, REFUSED), REFUSED),
        ((FAILED, DIVERGED), DIVERGED),
        ((REFUSED, DIVERGED), REFUSED),
        ((FAILED, NOT_SAVED), NOT_SAVED),
        ((FENCED, REFUSED), FENCED),
        ((FAILED, FENCED), FENCED),
        ((STOPPED_BEFORE_START, STOPPED_BEFORE_START), FAILED),
        ((PORT_TAKEN, FAILED), FAILED),
        ((), FINISHED),
    ],
)
def test_equals_mean_together_what_the_strongest_of_them_means(codes: tuple[int, ...], together: int) -> None:
    assert {combined_exit_code(order) for order in permutations(codes)} == {together}


@pytest.mark.parametrize(
    ("rank_zero", "other", "together"),
    [
        (STOPPED, FAILED, STOPPED),
        (STOPPED, FENCED, STOPPED),
        (STOPPED_BEFORE_START, FAILED, STOPPED_BEFORE_START),
        (PORT_TAKEN, FAILED, PORT_TAKEN),
        (FENCED, REFUSED, FENCED),
        (DIVERGED, REFUSED, DIVERGED),
        (FINISHED, FAILED, FAILED),
        (FINISHED, STOPPED, STOPPED),
        (REFUSED, FENCED, FENCED),
        (FAILED, REFUSED, REFUSED),
        (FAILED, FINISHED, FAILED),
    ],
)
def test_what_rank_zero_says_of_a_commit_counts_though_others_fail(rank_zero: int, other: int, together: int) -> None:
    assert combined_exit_code([rank_zero, other], rank_zero=rank_zero) == together


@given(st.lists(st.integers(-64, 255), min_size=1))
def test_only_codes_that_are_all_good_are_good_together(codes: list[int]) -> None:
    assert (combined_exit_code(codes) in {FINISHED, STOPPED}) == ({*codes} <= {FINISHED, STOPPED})
    assert combined_exit_code(codes) in {FINISHED, STOPPED, FENCED, REFUSED, DIVERGED, RANKS_DIFFER, NOT_SAVED, FAILED}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no GPU"), REFUSED),
        (FencedError("another attempt"), FENCED),
        (DivergedError("nan"), DIVERGED),
        (CheckpointError("no room"), FAILED),
        (NotSavedError("no room for an hour"), NOT_SAVED),
        (ValueError("theirs"), FAILED),
        (SystemExit(0), FAILED),
    ],
    ids=str,
)
def test_an_error_ends_its_process_with_its_code(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "was killed by signal 9 (SIGKILL)"),
        (137, "was killed by signal 9 (SIGKILL)"),
        (255, "exited unexpectedly with code 255"),  # of Apptainer and ssh
        (129 + 64, "exited unexpectedly with code 193"),
        (1, "exited unexpectedly with code 1"),
    ],
)
def test_a_code_is_called_a_signals_where_a_signal_has_that_number(code: int, said: str) -> None:
    assert describe_end(code) == said
