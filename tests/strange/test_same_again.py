"""Failures that look like a poisoned sample, and poisoned samples that look like something else."""

from __future__ import annotations

import http.client
import io
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ddp_hpc.base.durable import append_json_line
from ddp_hpc.job.ending.attempt_end import conclude_attempt
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.error_fingerprint import affected_entity
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure, make_failure, write_failure
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.train.data.loader import SampleError, SeededDataset, raise_if_error
from ddp_hpc.train.data.sample_order import MicroBatch
from tests.made_run import add_checkpoint, add_failure, make_run
from tests.unit import conftest
from tests.unit.made_job import CRASHED, Make, Supervised

slurm, supervised = conftest.slurm, conftest.supervised
POISONED: dict[str, Any] = {
    "exception": "SampleError: `train_data[17]` raised ValueError: bad header",
    "exception_type": "SampleError",
    "entity": "train_data[17]",
    "entity_version": "3 bytes, sha256 1",
    "may_recover": False,
    "place": "data.py in __getitem__",
}


def fails(one: Supervised, *reports: dict[str, Any]) -> None:
    """Begin an attempt in which these ranks fail."""
    attempt = one.begin()
    for rank, report in enumerate(reports):
        add_failure(one.run, attempt, rank=rank, at=1.0 + rank, **report)
    conclude_attempt(one.context, attempt, CRASHED)


def test_the_same_sample_twice_ends_the_job(supervised: Make) -> None:
    one = supervised()

    fails(one, POISONED)
    fails(one, POISONED)

    assert [attempt.next for attempt in Ledger.read(one.run).attempts] == ["in place", ""]
    assert one.last.reason.count("train_data[17]") == 2


@pytest.mark.parametrize(
    ("why", "second"),
    [
        ("the same sample, another exception", {"exception": "SampleError: `train_data[17]` raised KeyError: 'x'"}),
        ("the same sample, raised elsewhere", {"place": "labels.py in read"}),
        ("a signal, after which no process knows a sample", {"exception": "killed by SIGKILL", "signal": 9, "entity": "", "entity_version": "", "may_recover": True}),
        ("a report of an older version", {"entity_version": ""}),
        ("an earlier sample failed, and a later step", {"step": 8}),
    ],
)  # fmt: skip
def test_what_is_not_the_same_gets_another_attempt(supervised: Make, why: str, second: dict[str, Any]) -> None:
    one = supervised()

    fails(one, POISONED)
    fails(one, POISONED | second)

    assert one.last.next == "in place", why


def test_a_ledger_of_yesterday_ends_nothing_early_and_todays_lines_follow_in_it(supervised: Make) -> None:
    one = supervised()
    one.begin()
    yesterday = {"attempt": 0, "ending": "failed", "exit_code": 1, "reason": POISONED["exception"], "cause": "worker crashed",
                 "last_step": 0, "next": "in place", "failed_nodes": [], "ended_at": 2.5}  # fmt: skip
    append_json_line(one.run.attempts, yesterday)

    fails(one, POISONED)
    after_one = one.last
    fails(one, POISONED)

    assert (after_one.next, after_one.root.entity) == ("in place", "train_data[17]")
    assert one.last.next == ""
    assert Ledger.read(one.run).attempts[0].root.may_recover


def test_a_line_of_another_version_with_odd_values_is_skipped_and_ends_nothing_early(supervised: Make) -> None:
    one = supervised()
    fails(one, POISONED)
    lines = [json.loads(line) for line in one.run.attempts.read_text().splitlines() if line.strip()]
    lines[-1]["may_recover"] = "no"
    one.run.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    fails(one, POISONED)

    assert one.last.next == "in place"


def test_a_file_system_that_does_not_show_checkpoints_ends_nothing_early(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervised()
    fails(one, POISONED)
    monkeypatch.setattr(type(one.context.workload), "progress_on_disk", lambda *_: None)

    fails(one, POISONED)

    assert one.last.next == "in place"


def test_a_checkpoint_that_another_attempt_has_committed_meanwhile_is_progress(supervised: Make) -> None:
    one = supervised()
    fails(one, POISONED)
    ownership.release_claim(one.run, 0)
    add_checkpoint(one.run, 4)

    fails(one, POISONED)

    assert (one.last.next, one.last.last_step) == ("in place", 4)


def test_two_bad_samples_in_one_batch_take_the_general_budget(supervised: Make) -> None:
    one = supervised()
    for _ in range(3):
        fails(one, POISONED, POISONED | {"entity": "train_data[42]"})

    attempts = Ledger.read(one.run).attempts
    assert [attempt.next for attempt in attempts] == ["in place", "in place", ""]
    assert "3 attempts in a row" in one.last.why_last


def test_a_message_of_a_million_characters_is_compared_and_recorded(supervised: Make) -> None:
    one = supervised()
    long = POISONED | {"exception": POISONED["exception"] + " '/a" * 250_000}

    fails(one, long)
    fails(one, long)

    assert one.last.next == ""
    assert one.last.reason.endswith(one.last.why_last)
    assert len(one.last.reason) < 5000  # each command reads the ledger


def test_an_entity_with_a_new_line_escape_codes_and_what_looks_like_a_secret_is_never_recorded(tmp_path: Path) -> None:
    texts = ["bad 'x/\x1b[2Ja\n.json'", "bad 'https://me:hunter2@host/x.json?token=abc'", "bad 's3://bucket/AKIA/x.json'"]  # fmt: skip
    errors = [json.JSONDecodeError(text, "{", 0) for text in texts]

    found = [affected_entity(error) for error in errors]

    assert [(one.entity, one.version) for one in found] == [("", "")] * 3


# --- data sets ---------------------------------------------------------------------------------------------------------


class Strange(Dataset[Any]):
    """Samples of which some fail; `read` says how."""

    def __init__(self, read: Callable[[int], Any], num: int = 8) -> None:
        self.read = read
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read(index)
        return torch.ones(1)


def failure(read: Callable[[int], Any], *, index: int = 3, num: int = 8, in_process: bool = False) -> WorkerFailure:
    """Return the report of a rank that fails to fetch a sample."""
    fetch = SeededDataset(Strange(read, num), seed=0)
    batch = MicroBatch(epoch=0, indices=(index,), num_real=1)
    loader: Iterator[Any] = iter(
        DataLoader(fetch, batch_sampler=[[batch]], num_workers=int(in_process), collate_fn=lambda one: one)
    )
    with pytest.raises(SampleError) as info:
        raise_if_error(next(loader))
    return make_failure(info.value, rank=0, log=Path("rank-0.log"))


class Stored:
    """Samples in files of their own, of which some are damaged, all written long ago; `decode` reads one."""

    def __init__(self, folder: Path, *wrong: int, num: int = 8, text: str = "{") -> None:
        self.folder = folder
        for index in range(num):
            self.write(index, text if index in wrong else "[1]")

    def __call__(self, index: int) -> None:
        json.loads(self.path(index).read_text())

    def path(self, index: int) -> Path:
        return self.folder / f"{index}.json"

    def write(self, index: int, text: str, *, age_s: float = 1e6) -> None:
        self.path(index).write_text(text)
        written = time.time() - age_s
        os.utime(self.path(index), (written, written))


def bad(*wrong: int, kind: Callable[[str], Exception] = ValueError) -> Callable[[int], None]:
    def read(index: int) -> None:
        if index in wrong:
            raise kind("bad header")

    return read


@pytest.mark.parametrize("in_process", [False, True])
def test_one_damaged_sample_among_good_ones_is_proved_also_in_a_loader_process(
    tmp_path: Path, *, in_process: bool
) -> None:
    found = failure(Stored(tmp_path, 3), in_process=in_process)

    assert (found.entity, found.may_recover, found.place) == ("train_data[3]", False, "decoder.py in raw_decode")
    assert found.entity_version.startswith("1 bytes, sha256 ")
    assert found.exception.startswith("SampleError: `train_data[3]` raised JSONDecodeError: Expecting property name")
    assert "in __call__" in found.traceback  # of the loader process, too


def test_a_damaged_image_among_good_ones_is_proved(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    stored = Stored(tmp_path)
    for index in range(8):
        image.new("RGB", (64, 64)).save(stored.path(index), "JPEG")
    stored.path(3).write_bytes(stored.path(3).read_bytes()[:600])
    os.utime(stored.path(3), (1000, 1000))

    found = failure(lambda index: image.open(io.BytesIO(stored.path(index).read_bytes())).load())

    assert (found.entity, found.may_recover) == ("train_data[3]", False), found.exception


def test_a_file_that_grows_between_two_attempts_is_another_content(tmp_path: Path) -> None:
    stored = Stored(tmp_path, 3, text="[1")
    before = failure(stored)

    stored.write(3, "[1, 2")

    after = failure(stored)
    assert before.entity_version
    assert after.entity_version
    assert before.entity_version != after.entity_version


def test_a_file_that_was_written_in_the_last_hour_may_still_be_written(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    stored.write(3, "[1", age_s=1800)

    assert failure(stored).may_recover


class HidesOutage(Stored):
    """A reader that returns nothing where the file system fails, as some libraries do."""

    def __call__(self, index: int) -> None:
        try:
            if index == 3:
                raise OSError(116, "Stale file handle")  # noqa: TRY301  as the file system does
            text = self.path(index).read_text()
        except OSError:
            text = ""
        struct.unpack("1s", text[:1].encode())


class HidesMissing(Stored):
    """The same for a file that is not there."""

    def __call__(self, index: int) -> None:
        try:
            text = (self.folder / ("none" if index == 3 else f"{index}.json")).read_text()
        except OSError:
            text = ""
        struct.unpack("1s", text[:1].encode())


class FromServer(Stored):
    """The labels come from a file, the image from a server, over a connection that is kept open."""

    server: Any = None

    def __call__(self, index: int) -> None:
        self.path(index).read_text()
        if self.server is None:
            self.server = http.client.HTTPConnection("127.0.0.1", 1)
            self.server.sock = SimpleNamespace(sendall=lambda _: None)
        self.server.send(b"x")
        json.loads("502 Bad Gateway" if index == 3 else "[1]")


class TwoFiles(Stored):
    """Two files, of which one is in order."""

    def __call__(self, index: int) -> None:
        self.path(0).read_text()
        super().__call__(index)


class OwnLabel(Stored):
    """The user's code rejects a label; it may come from anywhere."""

    def __call__(self, index: int) -> None:
        self.path(index).read_text()
        if index == 3:
            raise ValueError("label 99 is unknown")


class InMemory(Stored):
    """Read when the process began, perhaps while the file was written."""

    def __call__(self, index: int) -> None:
        json.loads("{" if index == 3 else "[1]")


@pytest.mark.parametrize("kind", [HidesOutage, HidesMissing, FromServer, TwoFiles, OwnLabel, InMemory])
def test_a_sample_whose_bytes_are_not_known_to_be_those_of_one_readable_file_may_recover(
    tmp_path: Path, kind: type[Stored]
) -> None:
    found = failure(kind(tmp_path, *([3] if kind is TwoFiles else [])))

    assert (found.entity, found.may_recover) == ("train_data[3]", True), found.exception


def test_one_damaged_sample_where_no_other_can_be_read_may_recover(tmp_path: Path) -> None:
    assert failure(Stored(tmp_path, *range(8))).may_recover
    assert failure(Stored(tmp_path, 0, num=1), index=0, num=1).may_recover


class Flaky:
    """Fails the first time only."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, index: int) -> None:
        self.num += index == 3
        if index == 3 and self.num == 1:
            raise ValueError("a torn read")


class Moody:
    """Fails in another way each time."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, index: int) -> None:
        if index == 3:
            self.num += 1
            raise (ValueError if self.num % 2 else KeyError)("moody")


def wraps_an_error_of_the_disk(index: int) -> None:
    if index == 3:
        try:
            raise OSError(5, "Input/output error")  # noqa: TRY301  as a library does
        except OSError:
            raise ValueError("bad image") from None


@pytest.mark.long
@pytest.mark.parametrize(
    ("why", "read", "num"),
    [
        ("no sample can be read: a server answers with error pages", bad(*range(8)), 8),
        ("the whole data set is one sample", bad(0), 1),
        ("it can be read the second time", Flaky, 8),
        ("it fails in another way the second time", Moody, 8),
        ("the decoder hides an error of the disk", wraps_an_error_of_the_disk, 8),
        ("memory ran out", bad(3, kind=MemoryError), 8),
        ("a device failed", bad(3, kind=lambda text: RuntimeError(f"CUDA error: {text}")), 8),
        ("a peer of the data set is gone", bad(3, kind=EOFError), 8),
        ("the file is not there (yet)", bad(3, kind=lambda text: FileNotFoundError(2, text, "x.png")), 8),
    ],
)
@pytest.mark.parametrize("in_process", [False, True])
def test_a_sample_that_may_be_read_another_time_is_named_and_may_recover(
    why: str, read: Callable[[int], Any], num: int, *, in_process: bool
) -> None:
    index = 3 % num

    found = failure(read() if isinstance(read, type) else read, index=index, num=num, in_process=in_process)

    assert (found.entity, found.may_recover) == (f"train_data[{index}]", True), why


def test_a_loader_process_that_is_killed_names_no_sample() -> None:
    def read(_: int) -> None:
        if get_worker_info() is not None:
            os.kill(os.getpid(), 9)

    with pytest.raises(RuntimeError) as info:
        failure(read, in_process=True)

    assert affected_entity(info.value).may_recover


class WithNotesError(Exception):
    """An exception of a user that takes several arguments, which `torch._utils.ExceptionWrapper` cannot make again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} is not {two}")


@pytest.mark.parametrize("in_process", [False, True])
def test_an_exception_of_the_users_own_class_is_named_and_may_recover(*, in_process: bool) -> None:
    found = failure(bad(3, kind=lambda _: WithNotesError(1, 2)), in_process=in_process)

    assert "`train_data[3]` raised WithNotesError: 1 is not 2" in found.exception
    assert (found.entity, found.may_recover) == ("train_data[3]", True)


def test_a_report_is_written_and_read_with_all_of_this(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    failed = failure(Stored(tmp_path, 3))
    write_failure(run.rank_error(0, 0), failed)

    record = json.loads(run.rank_error(0, 0).read_text())
    assert (record["entity"], record["may_recover"]) == ("train_data[3]", False)
    assert record["entity_version"] == failed.entity_version
