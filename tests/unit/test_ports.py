"""Ports for ranks to meet at."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.cluster.rendezvous.ports import LOWEST_PORT, candidate_ports, ephemeral_low, is_free

LOOPBACK = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """Yield a port that somebody listens at."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        yield listener.getsockname()[1]


@given(st.integers(1, 2**32), st.integers(0, 50))
def test_the_same_job_comes_to_the_same_ports(job_id: int, attempt: int) -> None:
    first = list(islice(candidate_ports(str(job_id), attempt, 32768), 50))
    again = list(islice(candidate_ports(str(job_id), attempt, 32768), 50))

    assert first == again
    assert len(set(first)) == 50
    assert all(LOWEST_PORT <= port < 32768 for port in first)


@given(st.integers(1, 2**32), st.integers(0, 50), st.integers(11_000, 60_000))
def test_adjacent_jobs_never_begin_at_the_same_port(job_id: int, attempt: int, low: int) -> None:
    first, second = (next(candidate_ports(str(number), attempt, low)) for number in (job_id, job_id + 1))

    assert first != second


def test_many_jobs_in_a_row_begin_at_ports_of_their_own() -> None:
    begun = [next(candidate_ports(str(number), 0, 32768)) for number in range(100_000, 110_000)]

    assert len(set(begun)) == len(begun)


def test_the_next_attempt_begins_where_the_last_would_have_gone_on() -> None:
    assert next(candidate_ports("7", 1, 32768)) == list(islice(candidate_ports("7", 0, 32768), 2))[1]


@given(st.integers(1, 19_999))
def test_no_job_begins_at_the_port_that_its_script_would_compute_itself(job_id: int) -> None:
    assert next(candidate_ports(str(job_id), 0, 32768)) != 10_000 + job_id % 20_000


def test_all_ports_have_their_turn() -> None:
    assert sorted(candidate_ports("7", 0, 32768)) == list(range(LOWEST_PORT, 32768))


@pytest.mark.parametrize("low", [1024, 10_000, 10_500])
def test_where_ephemeral_ports_begin_too_low_the_usual_ones_are_spared(low: int) -> None:
    assert LOWEST_PORT <= next(candidate_ports("7", 0, low)) < 32768


def test_a_job_may_have_a_name_for_a_number() -> None:
    assert next(candidate_ports("local-1", 0, 32768)) == next(candidate_ports("local-1", 0, 32768))


def test_the_kernel_says_where_its_own_ports_begin() -> None:
    assert ephemeral_low() > 0
    assert next(candidate_ports("7")) in range(LOWEST_PORT, 65536)


def test_a_port_is_free_until_somebody_listens(taken: int) -> None:
    assert not is_free(LOOPBACK, taken)
    assert not is_free("localhost", taken)


def test_a_port_of_another_host_is_not_ours_to_tell() -> None:
    assert is_free("198.51.100.77", 10_000)
