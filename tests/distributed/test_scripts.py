"""Scripts of users, run as they are: beside torchrun, killed and resumed, stopped, and in a plain Python's surroundings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ddp_hpc.run.run_dir.failure_reports import first_failure
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.paths import RunDir

SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE_S = 90.0
TWO = ("resources.workers_per_node=2",)
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
EPOCHS = 4


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this should have come about by now"
        time.sleep(0.02)


@dataclass(frozen=True)
class Place:
    """A directory with scripts, as a user has it."""

    path: Path

    def run(self, name: str) -> RunDir:
        return RunDir(self.path / "runs" / name)

    def ddp_hpc(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "ddp_hpc", *words]
        return subprocess.run(
            argv, cwd=self.path, env=ENVIRON, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )

    def submit(self, settings: Sequence[str], *command: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        options = ["--cluster", "local", *(["--wait"] if wait else [])]
        return self.ddp_hpc("submit", *options, *settings, "--", *command)

    def attempts(self, name: str) -> list[Attempt]:
        return list(Ledger.read(self.run(name)).attempts)

    def console(self, name: str) -> str:
        return self.run(name).console.read_text(errors="replace")

    def log(self, name: str, rank: int = 0, attempt: int = 0) -> str:
        return self.run(name).rank_log(attempt, rank).read_text(errors="replace")

    def script_processes(self, name: str) -> list[psutil.Process]:
        """Return the processes of the ranks' scripts, by rank."""
        supervisor = psutil.Process(self.attempts(name)[-1].pid)
        workers = [worker for agent in supervisor.children() for worker in agent.children()]
        return [script for worker in workers for script in worker.children()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)
    return Place(tmp_path)


def weights(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(path)["MODEL_STATE"]
    return state


@pytest.mark.parametrize("settings", [(), pytest.param(TWO, marks=pytest.mark.long)], ids=["one worker", "two workers"])
def test_a_script_that_dies_at_its_first_line_fails_the_command_that_submits_it(
    settings: Sequence[str], place: Place
) -> None:
    (place.path / "boom.py").write_text("raise RuntimeError('no such thing')\n")

    submitted = place.submit(settings, "python", "boom.py", wait=False)

    assert submitted.returncode == 1, submitted
    assert "the last lines of" in submitted.stderr
    assert "  RuntimeError: no such thing" in submitted.stderr.splitlines()
    assert "boom failed" in submitted.stdout


@pytest.mark.long
def test_a_script_that_lives_on_is_left_alone_by_the_command_that_submits_it(place: Place) -> None:
    (place.path / "lives.py").write_text("import time\ntime.sleep(100)\n")

    submitted = place.submit((), "python", "lives.py", wait=False)

    assert (submitted.returncode, submitted.stderr) == (0, "")
    assert "lives running" in submitted.stdout
    place.ddp_hpc("cancel", "lives")
    until(lambda: place.attempts("lives")[-1].is_last)


def are_equal(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- training ----------------------------------------------------------------------------------------------------------


def train_by_torchrun(place: Place) -> None:
    """Train the tutorial's script as its own users do, to `torchrun.pt`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["multinode.py", str(EPOCHS), "--snapshot", "torchrun.pt"]
    subprocess.run([*torchrun, *command], cwd=place.path, env=ENVIRON, check=True, capture_output=True)


@pytest.mark.long
def test_the_tutorials_script_trains_to_the_bits_that_torchrun_gives(place: Place) -> None:
    train_by_torchrun(place)
    script = ("python", "multinode.py", str(EPOCHS), "--snapshot", "ours.pt")

    done = place.submit((*TWO, "script.progress=*.pt", "name=ours"), *script)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "ours finished" in done.stdout
    assert "saved" in done.stdout
    assert are_equal(place.path / "torchrun.pt", place.path / "ours.pt")
    assert f"[RANK 0] Epoch {EPOCHS - 1}" in place.console("ours")
    assert "[RANK 1]" not in place.console("ours")
    assert f"[RANK 1] Epoch {EPOCHS - 1}" in place.log("ours", rank=1)


@pytest.mark.long
def test_it_does_so_killed_and_resumed(place: Place) -> None:
    train_by_torchrun(place)
    killed = ("python", "multinode.py", str(EPOCHS), "--snapshot", "killed.pt", "--hold-at", "2")
    settings = (*TWO, "name=killed", "script.progress=killed.pt", "restart.in_place=false")
    assert place.submit(settings, *killed, wait=False).returncode == 0
    until((place.path / "killed.pt").exists)
    until(lambda: torch.load(place.path / "killed.pt")["EPOCHS_RUN"] == 2)
    place.script_processes("killed")[1].kill()
    until(lambda: place.attempts("killed")[-1].ending is not None)
    failure = first_failure(place.run("killed"), 0)
    assert failure is not None
    assert (failure.rank, failure.signal) == (1, 9)
    (place.path / "go").touch()
    again = place.submit(settings, *killed)

    assert again.returncode == 0, again.stdout + again.stderr
    assert are_equal(place.path / "torchrun.pt", place.path / "killed.pt")
    assert "Resuming training from snapshot at Epoch 2" in place.console("killed")
    first, second = place.attempts("killed")
    assert (first.cause, first.ending, second.cause) == ("worker crashed", "failed", "finished")
    assert 0 == first.first_step < second.first_step < (second.last_step or 0)


# --- surroundings ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("start", ["fork", "exec"])
@pytest.mark.parametrize(
    "command",
    [["surroundings.py", "--a", "b c", ""], ["./inner/surroundings.py"], ["-m", "inner.surroundings", "-x"]],
)
def test_a_script_finds_what_a_plain_python_would_give_it(command: list[str], start: str, place: Place) -> None:
    (place.path / "inner").mkdir()
    shutil.copy(place.path / "surroundings.py", place.path / "inner")
    environ = {**ENVIRON, "PYTHONPATH": "/users/own"}
    argv = [sys.executable, *command]
    subprocess.run(argv, cwd=place.path, env=environ, stdin=subprocess.DEVNULL, check=True, capture_output=True)
    plain = json.loads((place.path / "found-plain.json").read_text())
    submit = [sys.executable, "-m", "ddp_hpc", "submit", "--cluster", "local", "--wait", f"script.start={start}"]

    done = subprocess.run(
        [*submit, "--", "python", *command], cwd=place.path, env=environ, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((place.path / "found-0.json").read_text())
    assert {key: (plain[key], found[key]) for key in plain if plain[key] != found[key]} == {}
    assert "the thread has ended\nthe exit function was called\n" in place.log("surroundings")


@pytest.mark.long
def test_a_script_that_must_come_before_torch_starts_as_a_new_process_and_the_log_says_why(place: Place) -> None:
    source = (
        "import os, sys\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nassert 'torch' not in sys.modules\nimport torch\n"
    )
    (place.path / "early.py").write_text(source)

    done = place.submit((), "python", "early.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "because line 2 of the script sets CUDA_VISIBLE_DEVICES before it imports torch" in place.console("early")


def test_ranks_without_a_seed_draw_other_numbers_each(place: Place) -> None:
    source = "import random, uuid\nimport numpy as np\nimport torch\n"
    source += "print(torch.initial_seed(), torch.randperm(99)[:9].tolist(), np.random.rand(), random.random(), uuid.uuid4(), sep='|')\n"
    (place.path / "draws.py").write_text(source)

    done = place.submit(TWO, "python", "draws.py")

    assert done.returncode == 0, done.stdout + done.stderr
    drawn = [place.log("draws", rank).split("|") for rank in range(2)]
    assert len(drawn[0]) == 5
    assert not {*drawn[0]} & {*drawn[1]}


COMPILED = """
import gc
import sys, torch, torch.distributed as dist
import nets
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(nets.made(torch.nn.Linear(4, 4), is_compiled="compiled" in sys.argv))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4) * dist.get_rank()).sum().backward()
    optimizer.step()
was_imported = "torch._" + "dynamo.eval_frame" in sys.modules
print([value.hex() for weight in model.parameters() for value in weight.flatten().tolist()], was_imported, flush=True)
del model, optimizer
gc.collect()  # what still uses a group keeps its threads alive, which may end torchrun's process with SIGABRT
dist.destroy_process_group()
"""
NETS = """
import torch
def made(net, is_compiled):
    return torch.compile(net, backend="eager") if is_compiled else net
"""


@pytest.mark.long
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_script_whose_module_compiles_finds_the_compiler_and_one_that_does_not_goes_without(
    is_compiled: bool, place: Place
) -> None:
    (place.path / "compiled.py").write_text(COMPILED)
    (place.path / "nets.py").write_text(NETS)
    words = ["compiled.py", *(["compiled"] if is_compiled else [])]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    plain = subprocess.run(torchrun, cwd=place.path, env=ENVIRON, check=True, capture_output=True, text=True)

    done = place.submit(TWO, "python", *words)

    assert done.returncode == 0, done.stdout + done.stderr
    weights, _, was_imported = place.log("compiled").splitlines()[-1].rpartition(" ")
    assert was_imported == str(is_compiled)
    assert f"{weights} True" in plain.stdout


# --- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "number", "code", "settings"),
    [
        pytest.param("handles", "TERM", 0, (), marks=pytest.mark.long),
        ("handles", "USR1", 99, ("script.stop_signal=USR1",)),
        pytest.param(
            *("handles", "USR2", 42, ("script.stop_signal=USR2", "script.resume_exit_codes=[42]")),
            marks=pytest.mark.long,
        ),
        pytest.param("default", "TERM", 0, (), marks=pytest.mark.long),
    ],
)
def test_a_stop_reaches_the_script_alone_and_it_comes_back(
    how: str, number: str, code: int, settings: tuple[str, ...], place: Place
) -> None:
    assert place.submit((*TWO, *settings), "python", "signals.py", how, number, str(code), wait=False).returncode == 0
    until(lambda: all((place.path / f"ready-{rank}").exists() for rank in range(2)))

    assert place.ddp_hpc("stop", "signals").returncode == 0
    until(lambda: place.attempts("signals")[-1].ending is not None)

    (only,) = place.attempts("signals")
    assert (only.ending, only.cause, only.exit_code) == ("stopped", "stop asked", 99)
    if how == "handles":
        assert [place.log("signals", rank) for rank in range(2)] == ["signalled; my child runs\n"] * 2
    shown = place.ddp_hpc("status", "signals").stdout
    assert "stopped" in shown
    assert "step" not in shown


@pytest.mark.long
def test_a_script_that_ignores_its_signal_is_killed_after_the_time_that_it_is_given(place: Place) -> None:
    settings = ("script.stop_within_s=1",)
    assert place.submit(settings, "python", "signals.py", "ignores", "TERM", "0", wait=False).returncode == 0
    until((place.path / "ready-0").exists)

    assert place.ddp_hpc("stop", "signals").returncode == 0
    until(lambda: place.attempts("signals")[-1].ending is not None)

    failure = first_failure(place.run("signals"), 0)
    assert failure is not None
    assert "did not exit within 1 s after SIGTERM (`script.stop_within_s`)" in failure.exception


# --- ends --------------------------------------------------------------------------------------------------------------


CODES = """
import os, sys
how = sys.argv[1]
if how == "binary":
    sys.stdout.buffer.write(bytes(range(256)) + b"\\n")
    sys.stdout.flush()
    sys.exit(5)
if how == "raises":
    def inner(): raise ValueError("the data are odd")
    inner()
if how == "os._exit":
    os._exit(97)
if how == "text":
    sys.exit("no data here")
sys.exit(int(how))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "state", "expected"),
    [
        ("0", "finished", ""),
        ("2", "failed", "the script exited with code 2 and printed nothing"),
        ("99", "failed", "asked to be started again; 3 attempts in a row failed (each failure counts, because"),
        ("os._exit", "failed", "the script exited with code 97 and printed nothing"),
        ("text", "failed", "the script exited with code 1; its last line: no data here"),
        ("raises", "failed", "ValueError: the data are odd"),
        ("binary", "failed", "the script exited with code 5; its last line: "),
    ],
)
def test_each_end_of_a_script_has_a_clear_word_in_status(how: str, state: str, expected: str, place: Place) -> None:
    (place.path / "ends.py").write_text(CODES)

    done = place.submit((), "python", "ends.py", how)

    shown: dict[str, Any] = json.loads(place.ddp_hpc("status", "ends", "--json").stdout)
    assert shown["state"] == state, done.stdout + done.stderr
    assert expected in shown["reason"]
    if how == "raises":
        trace = place.log("ends").splitlines()
        assert trace[0] == "Traceback (most recent call last):"
        assert trace[1].strip() == f'File "{place.path}/ends.py", line 10, in <module>'  # none of ours before it


ENDS_LATER = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 0:
    Path("zero").write_text(str(os.getpid()))
dist.barrier()
if dist.get_rank() == 1:
    zero = Path("/proc", Path("zero").read_text(), "cmdline")
    while zero.exists() and zero.read_bytes():
        time.sleep(0.02)
    time.sleep(1)
    store.set("late", "x")
    dist.new_group([1], use_local_synchronization=True)
    Path("done").touch()
    if sys.argv[1:] and not os.fork():
        Path("left").write_text(str(os.getpid()))
        time.sleep(600)  # with the store's socket
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.parametrize("arguments", [(), ("leaves a process with the store's socket",)])
def test_the_store_lives_until_the_last_rank_has_ended_as_under_torchrun(
    arguments: Sequence[str], place: Place
) -> None:
    (place.path / "later.py").write_text(ENDS_LATER)

    done = place.submit(TWO, "python", "later.py", *arguments)

    assert done.returncode == 0, done.stdout + done.stderr
    assert (place.path / "done").exists()
    if (left := place.path / "left").exists():
        psutil.Process(int(left.read_text())).kill()


IN_PARTS = """
import sys
from pathlib import Path
parts = len([*Path().glob("part-*")])
Path(f"part-{parts}").touch()
sys.exit(99 if parts < 4 else 0)
"""


@pytest.mark.long
def test_a_script_that_asks_to_be_started_again_finishes_part_by_part_without_slurm(place: Place) -> None:
    (place.path / "parts.py").write_text(IN_PARTS)

    done = place.submit(("script.progress=part-*",), "python", "parts.py")

    assert done.returncode == 0, done.stdout + done.stderr
    ends = [(one.cause, one.next) for one in place.attempts("parts")]
    assert ends == [*[("script asked", "in place")] * 4, ("finished", "")]
    assert "there already" not in done.stdout
    other = place.submit(("script.progress=part-*", "name=other"), "python", "parts.py")
    assert f"{place.path}/part-0, " in other.stdout
    assert "and 2 more: there already; if the script looks for that, it goes on from it" in other.stdout


@pytest.mark.long
def test_a_script_that_is_submitted_again_from_another_directory_is_said_to_start_over(place: Place) -> None:
    elsewhere = Place(place.path / "elsewhere")
    elsewhere.path.mkdir()
    for one in (place, elsewhere):
        (one.path / "saves.py").write_text("open('state.pt', 'w').write('1')\nraise SystemExit(1)\n")
    environ = {"DDP_HPC__RUNS_DIR": str(place.path / "runs"), "SAVED_AS": "state"}
    settings = ("script.progress=$SAVED_AS.pt", "name=saves", "restart.max_no_progress=1")

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setitem(ENVIRON, name, value)
        first, again = (one.submit(settings, "python", "saves.py") for one in (place, elsewhere))

    assert "starts over" not in first.stdout
    assert f"saved to {place.path}/state.pt, and this time to {elsewhere.path}/state.pt: it starts over" in again.stdout


KILLED = """
import os, signal, sys, time
from pathlib import Path
done = len([*Path().glob("part-*")])
print("goes on after", done, flush=True)
Path("seen.txt").write_text(Path("/proc/self/cmdline").read_text().rstrip("\\0"))
time.sleep(0.2)
if done < 2:
    Path(f"part-{done}").touch()
if done < 3:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_script_that_is_killed_is_started_again_here_while_it_advances_and_is_called_what_it_is(place: Place) -> None:
    (place.path / "dies.py").write_text(KILLED)

    done = place.ddp_hpc(
        "submit", "--cluster", "local", "--follow", "script.progress=part-*", "--", "python", "dies.py", "--lr", "0.1"
    )

    assert done.returncode == 1
    ends = [(one.cause, one.next) for one in place.attempts("dies")]
    assert ends == [*[("worker crashed", "in place")] * 2, ("worker crashed", "")]
    lines = done.stdout.splitlines()
    assert [line for line in lines if "goes on" in line] == [f"goes on after {number}" for number in range(3)]
    assert (place.path / "seen.txt").read_text() == "python dies.py --lr 0.1"


STARTS_OVER = """
import os, time
from pathlib import Path
Path("last.pt").write_text(str(time.time()))
time.sleep(0.2)
os.link("last.pt", "checkpoint-0.pt")  # the first attempt has made it
raise RuntimeError("the loader is gone")
"""


@pytest.mark.long
def test_a_script_that_saves_the_same_file_again_and_fails_again_ends(place: Place) -> None:
    (place.path / "over.py").write_text(STARTS_OVER)

    done = place.ddp_hpc(
        "submit", "--cluster", "local", "--follow", "script.progress=last.pt", "--", "python", "over.py"
    )

    assert done.returncode == 1
    ends = [(one.cause, one.next) for one in place.attempts("over")]
    assert ends == [*[("worker crashed", "in place")] * 4, ("worker crashed", "")]
    assert "4 attempts in a row failed in the same way" in place.attempts("over")[-1].why_last


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "nowhere.py"], "nowhere.py does not exist"),
        (["./multinode.py"], "is not an executable file"),
        (["no-such-program"], "PATH has no such program"),
    ],
)
def test_a_command_that_cannot_start_is_refused_at_submission_and_leaves_no_run(
    command: list[str], expected: str, place: Place
) -> None:
    done = place.submit((), *command)

    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert not (place.path / "runs").exists() or not list((place.path / "runs").iterdir())


@pytest.mark.long
def test_a_shell_script_gets_the_ranks_and_what_it_leaves_running_when_it_fails_is_killed(place: Place) -> None:
    (place.path / "train.sh").write_text(
        "#!/bin/sh\nsleep 600 &\necho $! > child\necho rank $RANK of $WORLD_SIZE\nexit 3\n"
    )
    (place.path / "train.sh").chmod(0o755)

    done = place.submit((), "./train.sh")

    assert done.returncode == 1, done.stdout + done.stderr
    assert "its last line: rank 0 of 1" in done.stdout + done.stderr
    assert "because `script.command` starts no Python script" in place.console("train")
    until(lambda: not psutil.pid_exists(int((place.path / "child").read_text())))


@pytest.mark.long
def test_a_training_behind_a_shell_ends_when_another_rank_has_failed(place: Place) -> None:
    (place.path / "train.sh").write_text(
        "#!/bin/sh\nif [ $RANK = 1 ]; then until [ -s child ]; do sleep 0.1; done; exit 3; fi\n"
        "sh -c 'echo $$ > child; exec sleep 600'\necho it has ended\n"
    )
    (place.path / "train.sh").chmod(0o755)

    done = place.submit(["resources.workers_per_node=2"], "./train.sh")

    assert done.returncode == 1, done.stdout + done.stderr
    assert not psutil.pid_exists(int((place.path / "child").read_text()))


@pytest.mark.long
def test_one_key_has_the_libraries_log_into_the_run_directory(place: Place) -> None:
    code = "import os; print({name: os.environ.get(name) for name in ('NCCL_DEBUG', 'NCCL_DEBUG_FILE', 'TORCH_DISTRIBUTED_DEBUG')})"
    (place.path / "show.py").write_text(code, encoding="utf-8")

    done = place.submit(["name=shown", "debug.nccl=info", "env.NCCL_DEBUG=WARN"], "python", "show.py")

    assert done.returncode == 0, done.stdout + done.stderr
    folder = place.run("shown").nccl_logs
    log = place.run("shown").rank_log(0, 0).read_text(encoding="utf-8")
    assert f"'NCCL_DEBUG_FILE': '{folder}/%h-%p.log'" in log
    assert "'TORCH_DISTRIBUTED_DEBUG': 'INFO'" in log
    assert "'NCCL_DEBUG': 'WARN'" in log  # what the user sets wins
    assert folder.is_dir()


@pytest.mark.long
def test_a_run_that_a_rank_submits_begins_as_from_a_shell(place: Place) -> None:
    (place.path / "train.py").write_text(
        "import json, os, subprocess, sys\n"
        "if os.environ['RANK'] == '0' and len(sys.argv) > 1:\n"
        "    more = ['name=child', *sys.argv[1:], '--', 'python', 'train.py']\n"
        "    subprocess.run([sys.executable, '-m', 'ddp_hpc', 'submit', '--cluster', 'local', '--wait', *more], check=True)\n"
        "names = ('MASTER_PORT', 'TORCHELASTIC_RUN_ID', '_DDP_HPC_CPUS_BEFORE')\n"
        "print(json.dumps([os.environ[name] for name in names]))\n"
    )

    done = place.submit(["name=outer", *TWO], "python", "train.py", *TWO)

    assert done.returncode == 0, done.stderr
    outer, child = (json.loads(place.log(name).splitlines()[-1]) for name in ("outer", "child"))
    assert child[0] != outer[0]
    assert child[1:] == ["child", outer[2]]
