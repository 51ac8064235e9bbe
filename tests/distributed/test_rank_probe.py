"""A process answers questions about itself over its socket, and what does not answer is said to be unknown."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_hpc.cluster.rank_probe.client import NoAnswerError, RankProbe
from ddp_hpc.cluster.rank_probe.collect import merged_flight_record
from ddp_hpc.cluster.rank_probe.deadlines import Deadline, deadline_file
from ddp_hpc.cluster.rank_probe.folder import ProbeFolder, make_folder, socket_of
from ddp_hpc.cluster.rank_probe.server import serve, serve_at_rendezvous
from ddp_hpc.run.run_dir.hang_records import read_hang_records
from ddp_hpc.run.run_dir.paths import RunDir
from tests.distributed.skips import has_record_of_gloo
from tests.unit.test_worker_env import free_port

assert torch.distributed.is_available()


@pytest.fixture
def folder() -> Iterator[ProbeFolder]:
    made = make_folder()
    assert made is not None
    yield made
    made.close()


@contextmanager
def process(work: Callable[[], object], *, errors: Path | None = None) -> Iterator[int]:
    """Run `work` in a forked process, and kill that one at the end; what it prints as errors goes to a file."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            if errors is not None:
                os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            work()
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def answering(probe: RankProbe) -> int:
    """Wait until somebody answers; return its process id."""
    ends_at = time.monotonic() + 60
    while True:
        try:
            return probe.ping()
        except NoAnswerError:
            assert time.monotonic() < ends_at
            time.sleep(0.02)


def refusal(probe: RankProbe) -> NoAnswerError | None:
    """Return how it does not answer."""
    try:
        probe.ping()
    except NoAnswerError as error:
        return error
    return None


@has_record_of_gloo
def test_a_rank_gives_its_stacks_and_flight_record_and_prints_nothing(folder: ProbeFolder, tmp_path: Path) -> None:
    def work() -> None:
        assert serve(socket_of(folder.path, 3)) == ""
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(7))
        (tmp_path / "reduced").touch()
        sleep_for_good()

    def sleep_for_good() -> None:
        time.sleep(600)

    with process(work, errors=tmp_path / "errors") as pid:
        probe = RankProbe(path=socket_of(folder.path, 3), answer_s=30)
        assert answering(probe) == pid
        ends_at = time.monotonic() + 60
        while not ((tmp_path / "reduced").exists() and "sleep_for_good" in probe.stacks()):
            assert time.monotonic() < ends_at
        [entry] = probe.flight_record()["entries"]
        assert entry["input_sizes"] == [[7]]
    assert "WorkerServer" not in (tmp_path / "errors").read_text()
    assert folder.path.stat().st_mode & 0o777 == 0o700


@has_record_of_gloo
def test_a_rank_that_holds_the_interpreter_gives_no_stacks_but_all_else_and_a_stopped_one_gives_nothing(
    folder: ProbeFolder, tmp_path: Path
) -> None:
    def work() -> None:
        serve(socket_of(folder.path, 0))
        (tmp_path / "holds").touch()
        ctypes.PyDLL(None).sleep(600)

    with process(work) as pid:
        probe = RankProbe(path=socket_of(folder.path, 0), answer_s=30)
        answering(probe)
        ends_at = time.monotonic() + 60
        while not (tmp_path / "holds").exists():
            assert time.monotonic() < ends_at
        time.sleep(0.2)  # until its main thread is in the C function

        with pytest.raises(NoAnswerError, match=r"no answer to dump_traceback within 0\.5 s"):
            RankProbe(path=socket_of(folder.path, 0), answer_s=0.5).stacks()
        assert probe.ping() == pid
        assert "version" in probe.flight_record()
        os.kill(pid, signal.SIGSTOP)
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < ends_at + 60
        with pytest.raises(NoAnswerError) as silent:
            RankProbe(path=socket_of(folder.path, 0), answer_s=0.3).ping()
        assert silent.value.pid == pid


def test_a_process_that_executes_another_program_or_has_ended_is_not_taken_for_one_that_is_silent(
    folder: ProbeFolder,
) -> None:
    probe = RankProbe(path=socket_of(folder.path, 0))
    go_read, go_write = os.pipe()

    def work() -> None:
        serve(socket_of(folder.path, 0))
        os.read(go_read, 1)
        os.execv("/bin/sleep", ["sleep", "600"])  # noqa: S606

    with process(work):
        answering(probe)
        os.write(go_write, b"x")
        ends_at = time.monotonic() + 60
        said = None
        while said is None or "refused" not in str(said):  # at first the connection may be cut in the middle
            assert time.monotonic() < ends_at
            said = refusal(probe)
    assert said.pid is None
    with pytest.raises(NoAnswerError, match="No such file"):
        RankProbe(path=socket_of(folder.path, 1)).ping()


@pytest.mark.long
def test_a_script_that_forks_before_and_after_it_meets_others_answers_itself_and_ends_as_ever(
    folder: ProbeFolder, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "import torch.distributed as dist\n"
        "from ddp_hpc.cluster.rank_probe.server import serve_at_rendezvous\n"
        "assert serve_at_rendezvous(Path(sys.argv[1])) == ''\n"
        "def fork():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os._exit(5)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5\n"
        "fork()\n"
        "assert len(os.listdir('/proc/self/task')) == 1 or sys.version_info < (3, 12)\n"
        f"dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{free_port()}', rank=0, world_size=1)\n"
        "fork()\n"
        "assert Path(sys.argv[1]).is_socket()\n"
        "dist.destroy_process_group()\n"
        "sys.exit(7)\n"
    )

    done = subprocess.run(
        [sys.executable, script, socket_of(folder.path, 0)], capture_output=True, text=True, check=False, timeout=120
    )

    said = [
        line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")
    ]  # gloo of PyTorch 2.9 counts its peers
    assert (done.returncode, said) == (7, []), done.stderr
    assert "WorkerServer" not in done.stderr


def _reply(path: Path, reply: bytes) -> None:
    """Answer one connection with these bytes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def work() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(reply)
                    connection.recv(4096)

        thread = threading.Thread(target=work)
        thread.start()
        with pytest.raises(NoAnswerError) as error:
            RankProbe(path=path, answer_s=5, most_bytes=1000).flight_record()
        thread.join()
    raise error.value


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (_HEAD % 5000 + b"x" * 5000, "more than 1000 bytes"),
        (_HEAD % 5 + b"{\xff}} ", "not JSON"),
        (_HEAD % 2 + b"[]", "not a JSON object"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"\x00\x01garbage\r\n", "no answer to fr_trace_json"),
    ],
)
def test_an_answer_that_is_too_large_or_unreadable_is_no_answer(reply: bytes, said: str, folder: ProbeFolder) -> None:
    with pytest.raises(NoAnswerError, match=said):
        _reply(socket_of(folder.path, 0), reply)


def test_what_a_killed_maker_left_is_removed_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    living, killed = make_folder([str(tmp_path)]), make_folder([str(tmp_path)])
    assert living is not None
    assert killed is not None
    for one in (living, killed):
        os.utime(one.path, (1, 1))
    os.close(killed.lock_fd)

    newest = make_folder([str(tmp_path / "missing"), str(tmp_path)])

    assert newest is not None
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, newest.path.name}
    living.close()
    newest.close()
    assert not any(tmp_path.iterdir())


def test_a_directory_that_ddp_hpc_has_not_made_stays_whatever_its_name(tmp_path: Path) -> None:
    """A user's data, an environment, a link, a copy of a directory of ours into which a script has put something."""
    made = make_folder([str(tmp_path)])
    assert made is not None
    prefix = made.path.name[:-8]
    (made.path / "shard-0.tar").touch()
    for number, names in enumerate(
        [["imagenet/shard-0.tar"], [], ["rank-0", "rank-1.deadline"], ["rank-0/checkpoint"]]
    ):
        for start in {"ddp-hpc-", prefix}:
            folder = tmp_path / f"{start}user{number:04}"
            folder.mkdir(mode=0o700)
            for name in names:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).touch()
    (tmp_path / f"{prefix}linked00").symlink_to(tmp_path / "ddp-hpc-user0002")
    for folder in tmp_path.iterdir():
        os.utime(folder, (1, 1), follow_symlinks=False)
    before = {*tmp_path.rglob("*")}
    os.close(made.lock_fd)

    newest = make_folder([str(tmp_path)])
    assert newest is not None
    newest.close()

    assert {*tmp_path.rglob("*")} == before


def test_a_directory_with_sockets_and_deadlines_is_removed_by_its_maker_or_by_the_next_one(tmp_path: Path) -> None:
    closed, killed = make_folder([str(tmp_path)]), make_folder([str(tmp_path)])
    assert closed is not None
    assert killed is not None
    for one in (closed, killed):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(socket_of(one.path, 3)))
        Deadline(deadline_file(one.path, 3)).put_off(60)
    os.utime(killed.path, (1, 1))
    os.close(killed.lock_fd)
    closed.close()
    assert [*tmp_path.iterdir()] == [killed.path]

    newest = make_folder([str(tmp_path)])

    assert newest is not None
    newest.close()
    assert not any(tmp_path.iterdir())


def test_without_pytorchs_server_a_process_goes_on_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as without:
        without.delattr(sys.modules["torch._C._distributed_c10d"], "_WorkerServer")
        assert "has no worker server" in serve(tmp_path / "socket")
        without.delitem(sys.modules, "torch.distributed.rendezvous")
        assert "no table" in serve_at_rendezvous(tmp_path / "socket")
    assert "did not start" in serve(tmp_path / ("x" * 120))


SCARCE = """
import os, resource, sys, time
from pathlib import Path
import torch
import torch.distributed
from ddp_hpc.cluster.rank_probe.server import serve

resource.setrlimit(resource.RLIMIT_NPROC, (6, 6))
os.setgid(54321)
os.setuid(54321)
print(serve(Path(sys.argv[1])), flush=True)
time.sleep(0.5)  # until the server's thread has started its others, or has ended this process
print("goes on")
"""


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user that has no process")
def test_where_threads_are_scarce_a_rank_goes_on_without_the_server_and_says_why() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # that user must be able to enter it
        os.chown(place, 54321, 54321)

        done = subprocess.run(
            [sys.executable, "-c", SCARCE, f"{place}/rank-0"], capture_output=True, text=True, check=False, timeout=120
        )

    assert (done.returncode, done.stderr) == (0, "")
    assert "`ulimit -u` (6) leaves room for 0 threads" in done.stdout
    assert done.stdout.endswith("goes on\n")


def test_each_rank_of_a_node_needs_room_of_its_own(folder: ProbeFolder) -> None:
    enough = 4 * (1 + max(8, (os.cpu_count() or 1) - 1)) + 256

    assert "a limit" in serve(socket_of(folder.path, 0), num_ranks=2, room=(enough, "a limit"))
    assert "there is room for" in serve(socket_of(folder.path, 0), num_ranks=1, room=(enough - 1, "a limit"))


def test_the_server_of_another_process_is_not_taken_over_and_one_that_has_ended_is(folder: ProbeFolder) -> None:
    probe = RankProbe(path=socket_of(folder.path, 0))

    def work() -> None:
        serve(socket_of(folder.path, 0))
        time.sleep(600)

    with process(work) as outer:
        assert answering(probe) == outer
        assert "another process answers" in serve(socket_of(folder.path, 0))
        assert probe.ping() == outer
    with process(work) as next_one:
        assert answering(probe) == next_one


def test_while_the_server_starts_standard_error_stays_what_it_is(
    monkeypatch: pytest.MonkeyPatch, folder: ProbeFolder
) -> None:
    seen = []

    def server(path: str, port: int) -> object:
        assert (path, port) == (str(socket_of(folder.path, 0)), -1)
        seen.append(os.fstat(2).st_ino)
        return object()

    monkeypatch.setattr(sys.modules["torch._C._distributed_c10d"], "_WorkerServer", server)

    assert serve(socket_of(folder.path, 0)) == ""
    assert seen == [os.fstat(2).st_ino]


ALONE = """
import os, sys, time
from pathlib import Path
from ddp_hpc.cluster.rendezvous.worker_env import probe_variables
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.watchdog import Watchdog
from ddp_hpc.train.worker import _serve_rank_probe

folder, run = Path(sys.argv[1]), RunDir(Path(sys.argv[2]))
deadline = _serve_rank_probe(run, 0, 3, probe_variables(folder, is_alone=True))
Watchdog(4.0, deadline=deadline).feed()

def stand_still():
    time.sleep(600)

stand_still()
"""


@pytest.mark.long
def test_a_recipes_rank_beside_which_no_agent_runs_asks_itself_before_its_watchdog_ends_it(
    folder: ProbeFolder, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")

    done = subprocess.run(
        [sys.executable, "-c", ALONE, folder.path, run.path], capture_output=True, text=True, check=False, timeout=120
    )

    assert (done.returncode, done.stderr[:7]) == (1, "Timeout"), done.stderr
    [record] = read_hang_records(run, 0)
    assert (record.rank, record.answers) == (3, True)
    assert "stand_still" in (record.stacks or "")


@contextmanager
def replies(path: Path, by_handler: Mapping[str, object]) -> Iterator[None]:
    """Answer each question by JSON; None is no answer, and what is not there is not found."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            name = self.path.rpartition("/")[2]
            answer = by_handler.get(name, "")
            if answer is None:
                self.rfile.read()  # until the other end gives up
                return
            body = json.dumps(answer).encode()
            self.send_response(200 if name in by_handler else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

        def address_string(self) -> str:
            return ""

    with ThreadingUnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


GLOO = {"entries": [{"n": 1, "time_created_ns": 1}, {"n": 3, "time_created_ns": 3}], "pg_config": {"1": {}}}
NCCL = {"entries": [{"n": 2, "time_created_ns": 2}], "pg_config": {"0": {}}}


def test_in_a_hang_the_collectives_of_gloo_and_nccl_are_joined_and_none_is_known_without_the_others(
    folder: ProbeFolder,
) -> None:
    path = socket_of(folder.path, 0)
    probe = RankProbe(path=path, answer_s=0.3)

    with replies(path, {"fr_trace_json": GLOO, "dump_nccl_trace_json": NCCL}):
        both = merged_flight_record(probe)
        periodic = probe.flight_record_text()
    path.unlink()
    with replies(path, {"fr_trace_json": GLOO}):  # a PyTorch without NCCL
        alone = merged_flight_record(probe)
    path.unlink()
    with (
        replies(path, {"fr_trace_json": GLOO, "dump_nccl_trace_json": None}),  # CUDA hangs
        pytest.raises(NoAnswerError, match="dump_nccl_trace_json"),
    ):
        merged_flight_record(probe)

    assert [entry["n"] for entry in both["entries"]] == [1, 2, 3]
    assert both["pg_config"].keys() == {"0", "1"}
    assert json.loads(periodic) == alone == GLOO  # what is asked while the rank trains does not touch CUDA
