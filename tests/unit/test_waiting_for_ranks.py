"""Ranks that never join are named while the others wait for them."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_hpc.base.record import write_record
from ddp_hpc.job.ending import network_probe
from ddp_hpc.job.missing_ranks import ABSENT_AFTER_S, NAMED_AFTER_S, JoiningRanks
from ddp_hpc.run.run_dir.joined_ranks import MissingRanks, forget_missing, read_missing, write_missing
from ddp_hpc.run.run_dir.network import NetworkFindings, PairFault, read_network
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, write_progress
from ddp_hpc.train.process_group import report_missing_ranks
from tests.unit.made_job import Make

CARRIES = NetworkFindings(at=0.0, seconds=3.0, address="10.2.0.1", num_nodes=2, num_pairs=1)
CUT = NetworkFindings(
    at=0.0,
    seconds=3.0,
    address="10.2.0.1",
    num_nodes=2,
    num_pairs=1,
    pairs=(PairFault(nodes=("node1", "node2"), fault="nothing passes"),),
)


def start(run: RunDir, attempt: int, rank: int) -> None:
    """Have a rank open its log, as its process does first."""
    log = run.rank_log(attempt, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        (
            CARRIES,
            "node2 reaches the node of rank zero; all 2 nodes that were probed reach each other on the network of 10.2.0.1",
        ),
        (CUT, "on the network of 10.2.0.1, no packet passes between node1 and node2"),
    ],
)
def test_a_rank_whose_process_never_starts_is_named_with_its_node_and_the_network_is_probed(
    supervised: Make,
    capsys: pytest.CaptureFixture[str],
    findings: NetworkFindings,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, asked = supervised(), []

    def probe(nodes: Sequence[str], address: str) -> NetworkFindings:
        asked.append((*nodes, address))
        return findings

    attempt = one.begin()
    monkeypatch.setattr(network_probe, "probe_network", probe)
    joining = JoiningRanks(context=one.context, attempt=attempt, met_at="10.2.0.1")
    joining.name_missing(0.0)  # nobody is there yet
    start(one.run, attempt, 0)
    joining.name_missing(100.0)
    early = capsys.readouterr().err
    write_missing(one.run, attempt, [1], workers_per_node=1)  # as rank zero does
    joining.name_missing(100.0 + NAMED_AFTER_S)
    joining.name_missing(105.0 + NAMED_AFTER_S)

    said = capsys.readouterr().err
    assert early == ""
    assert said.count("rank 1 on node2 (its process has not started)") == 1
    assert f"note: {verdict}\n" in said
    assert asked == [("node1", "node2", "10.2.0.1")]
    assert read_network(one.run, attempt) == findings
    assert NAMED_AFTER_S + 5 < 60


def test_where_rank_zero_does_not_start_the_record_names_it(supervised: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = supervised()
    attempt = one.begin()
    monkeypatch.setattr(network_probe, "probe_network", lambda *_: CARRIES)
    joining = JoiningRanks(context=one.context, attempt=attempt, met_at="10.2.0.1")
    start(one.run, attempt, 1)

    joining.name_missing(0.0)
    joining.name_missing(NAMED_AFTER_S)
    early = read_missing(one.run, attempt)
    joining.name_missing(ABSENT_AFTER_S)

    assert early is None  # the directory as this node sees it may be a minute old
    missing = read_missing(one.run, attempt)
    assert missing is not None
    assert (missing.ranks, missing.node_of(0, one.context.nodes)) == ((0,), "node1")


def test_no_rank_is_missed_where_the_directory_of_logs_is_stale_or_cannot_be_read(
    supervised: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, probed = supervised(), list[str]()
    attempt = one.begin()
    start(one.run, attempt, 0)  # rank 1 has started, too, and this node does not see it yet

    def probe(nodes: Sequence[str], _address: str) -> NetworkFindings:
        probed.extend(nodes)
        return CARRIES

    monkeypatch.setattr(network_probe, "probe_network", probe)
    joining = JoiningRanks(context=one.context, attempt=attempt, met_at="10.2.0.1")
    joining.name_missing(0.0)
    joining.name_missing(NAMED_AFTER_S)
    write_progress(one.run, Progress(attempt=attempt, step=3))
    joining.name_missing(ABSENT_AFTER_S)  # it trains, whatever the directory says
    write_record(one.run.progress, Progress(attempt=attempt - 1, step=3))

    def fail(_path: Path) -> Iterator[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "iterdir", fail)
    joining.name_missing(ABSENT_AFTER_S)

    assert capsys.readouterr().err == ""
    assert probed == []
    assert read_missing(one.run, attempt) is None


def test_a_rank_that_has_no_log_for_longer_than_a_directory_is_stale_is_named_without_rank_zeros_record(
    supervised: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervised()
    attempt = one.begin()
    start(one.run, attempt, 0)
    monkeypatch.setattr(network_probe, "probe_network", lambda *_: CARRIES)
    joining = JoiningRanks(context=one.context, attempt=attempt, met_at="10.2.0.1")

    joining.name_missing(0.0)
    joining.name_missing(ABSENT_AFTER_S)

    assert "rank 1 on node2 (its process has not started)" in capsys.readouterr().err


def test_a_rank_that_runs_but_does_not_reach_rank_zero_is_named_by_rank_zeros_record(
    supervised: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervised()
    attempt = one.begin()
    for rank in (0, 1):
        start(one.run, attempt, rank)
    monkeypatch.setattr(network_probe, "probe_network", lambda *_: CUT)
    joining = JoiningRanks(context=one.context, attempt=attempt, met_at="10.2.0.1")
    joining.name_missing(0.0)
    joining.name_missing(NAMED_AFTER_S)
    before = capsys.readouterr().err

    write_missing(one.run, attempt, [1], workers_per_node=1)
    joining.name_missing(NAMED_AFTER_S + 5)
    named = capsys.readouterr().err
    write_missing(one.run, attempt, [], workers_per_node=1)
    joining.name_missing(NAMED_AFTER_S + 10)
    all_there = capsys.readouterr().err
    forget_missing(one.run, attempt)
    joining.name_missing(NAMED_AFTER_S + 15)

    assert before == ""
    assert "rank 1 on node2 (its process runs, but has not reached rank zero)" in named
    assert "all ranks have reached rank zero, but they have not all connected to each other" in all_there
    assert "no packet passes" not in all_there  # it is probed once
    assert capsys.readouterr().err == ""


def test_a_damaged_record_is_none(supervised: Make) -> None:
    run = supervised().run
    write_missing(run, 0, [3, 4], workers_per_node=2)

    assert isinstance(read_missing(run, 0), MissingRanks)
    for text in ("", "[]", "{}", '{"ranks": 3}', '{"ranks": ["a"], "workers_per_node": 1, "at": 0}'):
        run.missing_ranks(0).write_text(text)
        assert read_missing(run, 0) is None


def test_rank_zero_reports_who_has_not_reached_the_store() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    reports: list[Sequence[int]] = []

    def connect() -> dist.Store:
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    for rank in (0, 2):
        server.set(f"here/{rank}", "")
    with report_missing_ranks(connect, 3, reports.append, first_look_s=0.0):
        while not reports:
            time.sleep(0.01)

    assert reports == [[1]]


def test_ranks_that_join_soon_are_not_reported() -> None:
    reports: list[Sequence[int]] = []

    with report_missing_ranks(dist.HashStore, 2, reports.append):
        pass

    assert reports == []


def test_where_joining_fails_the_report_stays() -> None:
    store = dist.HashStore()
    reports: list[Sequence[int]] = []

    def fail() -> None:
        with report_missing_ranks(lambda: store, 2, reports.append, first_look_s=0.0):
            while not reports:
                time.sleep(0.01)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert reports == [[0, 1]]


def test_a_search_for_missing_ranks_that_fails_ends_no_attempt(
    supervised: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(nodes: Sequence[str], address: str) -> NetworkFindings:
        raise ValueError(f"a bug in the probe of {nodes} at {address}")

    one = supervised()
    attempt = one.begin()
    start(one.run, attempt, 0)
    monkeypatch.setattr(network_probe, "probe_network", probe)
    joining = JoiningRanks(context=one.context, attempt=attempt, met_at="10.2.0.1")

    for now in (0.0, NAMED_AFTER_S, ABSENT_AFTER_S, ABSENT_AFTER_S + 5):
        joining.name_missing(now)

    assert capsys.readouterr().err.count("could not examine which ranks have joined and continues without it") == 1
