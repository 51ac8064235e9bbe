"""Watchdogs: they bite a process that stands still, whatever it stands in, and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.run.run_dir.failure_reports import announced_phase, first_failure
from tests.made_run import make_run

PATIENCE_S = 100.0

BEGIN = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from ddp_hpc.train.watchdog import Watchdog, leave_within

def stand_still():
    time.sleep(600)
"""


def run_python(text: str, log: Path) -> int:
    """Run this with its error output in a log, as a rank's is; return the exit code."""
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", BEGIN + text, str(log.with_name("building"))],
            stderr=file,
            stdout=file,
            check=False,
            timeout=PATIENCE_S,
        )
    return done.returncode


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


# --- in processes of their own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "seen"),
    [
        ("stand_still()", "in stand_still"),
        ("lock = threading.Lock(); lock.acquire(); lock.acquire()", "in <module>"),
        ("threading.Thread(target=stand_still).start(); threading.Event().wait()", "in stand_still"),
        ("ctypes.PyDLL(None).sleep(600)", "in <module>"),
        (
            "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); ctypes.PyDLL(None).sleep(600)",
            "in <module>",
        ),
    ],
    ids=["in Python", "at a lock", "in a thread", "in C, with Python's lock", "in C, with all signals blocked"],
)
def test_who_stands_still_dies_and_his_log_has_the_stacks(place: str, seen: str, log: Path) -> None:
    code = run_python(f"Watchdog(1.0).feed()\n{place}", log)

    text = log.read_text()
    assert code == 1
    assert text.startswith("Timeout (0:00:01)!\n")
    assert "(most recent call first):" in text
    assert seen in text


def test_who_is_fed_lives_longer_than_the_timeout(log: Path) -> None:
    code = run_python(
        """
dog, begun = Watchdog(5.0), time.monotonic()
while time.monotonic() - begun < 5.5:
    dog.feed()
    time.sleep(0.05)
print("alive", flush=True)
os._exit(0)
""",
        log,
    )

    assert (code, log.read_text()) == (0, "alive\n")


@pytest.mark.parametrize(
    "then",
    ["Watchdog(None).feed()", "dog = Watchdog(1.0); dog.feed(); dog.dismiss()", "Watchdog(1.0)"],
    ids=["asleep", "dismissed", "never fed"],
)
def test_a_dog_that_sleeps_or_was_dismissed_bites_nobody(then: str, log: Path) -> None:
    code = run_python(f"{then}\ntime.sleep(1.5)\nprint('alive')", log)

    assert (code, log.read_text()) == (0, "alive\n")


@pytest.mark.parametrize(
    "teardown",
    ["stand_still()", "lock = threading.Lock(); lock.acquire(); lock.acquire()"],
    ids=["asleep", "at a lock"],
)
@pytest.mark.parametrize("code", [0, 99])
def test_a_teardown_that_is_wedged_ends_with_the_code_that_was_meant(code: int, teardown: str, log: Path) -> None:
    ended = run_python(f"leave_within(0.2, lambda: os._exit({code}))\n{teardown}", log)

    assert (ended, log.read_text()) == (code, "")


def test_a_teardown_in_time_is_not_cut_short_nor_waited_for(log: Path) -> None:
    code = run_python("leave_within(600.0, lambda: os._exit(7))\nprint('left')", log)

    assert (code, log.read_text()) == (0, "left\n")


SIGN = """
now = 0.0
dog = Watchdog(600.0, touches_log={touches_log}, clock=lambda: now)
for now in {moments}:
    os.utime({log!r}, (0, 0))
    dog.feed()
    print(os.stat({log!r}).st_mtime > 0, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("touches_log", "signs"),
    [(True, [True, False, False, True]), (False, [False] * 4)],
    ids=["rank zero's", "another's"],
)
def test_rank_zeros_dog_renews_the_time_of_its_log_now_and_then(
    touches_log: bool, signs: list[bool], log: Path
) -> None:
    text = SIGN.format(touches_log=touches_log, moments=(0.0, 1.0, 4.9, 5.0), log=str(log))
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", BEGIN + text], stdout=subprocess.PIPE, stderr=file, text=True, check=True
        )

    assert done.stdout.split() == [str(sign) for sign in signs]


def test_a_log_whose_time_cannot_be_renewed_is_no_failure() -> None:
    text = "dog = Watchdog(600.0, touches_log=True)\nos.close(2)\nsys.stderr = open('/dev/full', 'w')\ndog.feed()\nos._exit(5)"

    done = subprocess.run([sys.executable, "-c", BEGIN + text], check=False, capture_output=True)

    assert done.returncode == 5


def test_feeding_again_at_once_is_no_work(log: Path) -> None:
    """By its clock no time passes here, so it sets its timer once."""
    code = run_python("dog = Watchdog(0.5, clock=lambda: 0.0)\nwhile True:\n    dog.feed()\n    time.sleep(0.01)", log)

    assert code == 1
    assert "in feed" in log.read_text() or "in <module>" in log.read_text()


SLOW_JOIN = """
import os, sys, time
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train import worker

def join(*_, **__):
    time.sleep(4.0)
    raise ConfigError("the others have come")

worker._join = join
environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
os._exit(worker.main(sys.argv[1], environ, attempt=0))
"""


@pytest.mark.long
def test_who_waits_for_others_to_start_is_not_bitten(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.config.write_text("name: digits\nrestart: {hang_timeout_s: 1}\n")

    done = subprocess.run([sys.executable, "-c", SLOW_JOIN, str(run.path)], capture_output=True, text=True, check=False)

    assert done.returncode == exit_codes.REFUSED, done.stderr
    assert "the others have come" in run.rank_log(0, 0).read_text()


def test_who_is_allowed_to_stand_still_is_not_ended_for_it_until_he_is_fed_again(log: Path) -> None:
    code = run_python(
        """
allowance = Path(sys.argv[1])
dog = Watchdog(1.0, touches_log=True, allowance=allowance)
dog.feed()
dog.allow(600.0)
print("what a recipe prints dates the log, and nothing else", file=sys.stderr, flush=True)
print(allowance.stat().st_mtime > time.time() + 500, allowance.read_text(), flush=True)
time.sleep(3.0)
dog.feed()
print(allowance.exists(), flush=True)
stand_still()
""",
        log,
    )

    assert code == 1
    assert log.read_text().startswith(
        "what a recipe prints dates the log, and nothing else\nTrue building\nFalse\nTimeout (0:00:01)!\n"
    )


SLOW_BUILD = """
import os, sys, time
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train import worker

def recipe(target, args):
    time.sleep(4.0)
    raise ConfigError("it is built")

worker.build_recipe = recipe
environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
os._exit(worker.main(sys.argv[1], environ, attempt=0))
"""


@pytest.mark.long
def test_a_recipe_that_takes_longer_to_build_than_a_step_may_is_no_hang(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.config.write_text("name: digits\nrestart: {hang_timeout_s: 1}\n")

    done = subprocess.run(
        [sys.executable, "-c", SLOW_BUILD, str(run.path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == exit_codes.REFUSED, done.stderr
    assert "it is built" in run.rank_log(0, 0).read_text()
    failure = first_failure(run, 0)
    assert failure is not None
    assert (failure.phase, failure.is_input_error, announced_phase(run, 0)) == ("building", True, "building")
