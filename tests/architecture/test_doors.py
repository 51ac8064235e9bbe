"""Each outside thing has one door a wing; this reads the source and says who used another."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ddp_hpc

PACKAGE = Path(ddp_hpc.__file__).parent
ROOMS = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

DOORS: dict[str, set[str]] = {
    "os.environ": {
        "train/attached/run.py",  # it is called in the user's own process
        "cli/__init__.py",
        "prove/drill/injector.py",
        "job/node/agent.py",
        "job/node/check_users_part.py",
        "job/node/join.py",
        "job/node/join_node.py",
        "job/node/spawned_worker.py",
        "job/supervisor.py",
        "job/node/task.py",
        "job/node/torchrun_node.py",
        "job/node/unpack.py",
        "job/preflight.py",
        "cluster/machine/sampler.py",
        "cluster/node_checks/gather.py",
        "cluster/rendezvous/interfaces.py",
        "cluster/rendezvous/links/probe.py",
        "job/script/sealed_objects.py",  # the script may change where it meets others
        "job/script/interpreter.py",  # it makes this process what a new Python would be
        "job/script/worker.py",
        "launch/api.py",
        "launch/sweep/task.py",
        "train/recording/follower.py",
    },
    "subprocess": {
        "prove/certify/trial.py",
        "job/wire/subprocesses.py",
        "job/node/start_sampler.py",
        "job/node/torchrun_node.py",
        "job/node/unpack.py",
        "job/notifier.py",
        "job/notify.py",
        "prove/replay/private_run.py",
        "cluster/slurm/client.py",
        "launch/submission/image_build.py",
        "watch/diagnose/image_probe.py",
        "watch/diagnose/doctor/quota.py",
        "launch/submission/submit_checks/users_part.py",
        "launch/submission/snapshot.py",
        "launch/submission/local.py",
        "train/recording/beside.py",
    },
    # One reads them, one drops what is inherited, one refuses that a run sets them, and one only asks whether this is a job.
    "SLURM_": {
        "cluster/slurm/allocation.py",
        "cluster/slurm/client.py",
        "run/spec/launch.py",
        "run/config/sources.py",
    },
    "signal": {
        "base/processes.py",
        "prove/drill/injector.py",
        "base/exit_codes.py",
        "run/run_dir/failure_reports.py",
        "job/node/agent.py",
        "launch/submission/local.py",
        "launch/submission/submit_checks/users_part.py",
        "train/stop.py",
    },
}
"""Outside thing to the modules that may touch it: `processes` for everybody, else one a wing, if any."""

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
SHELLS = {"popen", "system"}


def uses(source: str) -> set[str]:
    """Return which of the guarded things this source text touches."""
    return {thing for node in ast.walk(ast.parse(source)) for thing in touched_by(node)}


def touched_by(node: ast.AST) -> set[str]:
    """Return which of the guarded things this one node touches."""
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr=name):
            return of_os(name)
        case ast.Import(names=names):
            return {alias.name.partition(".")[0] for alias in names} & DOORS.keys()
        case ast.ImportFrom(module="os", names=names):
            return {thing for alias in names for thing in of_os(alias.name)}
        case ast.ImportFrom(module=str(module), level=0):
            return {module.partition(".")[0]} & DOORS.keys()
        case ast.Constant(value=str(text)) if text.startswith("SLURM_"):
            return {"SLURM_"}
    return set()


def of_os(name: str) -> set[str]:
    """Return the guarded thing that `os.<name>` is."""
    if name in ENVIRONMENT:
        return {"os.environ"}
    return {"subprocess"} if name in SHELLS else set()


def test_outside_things_are_touched_at_their_doors_only() -> None:
    trespasses = {
        (room, thing)
        for room in ROOMS
        for thing in uses((PACKAGE / room).read_text(encoding="utf-8"))
        if room not in DOORS[thing]
    }

    assert trespasses == set(), f"the doors are {DOORS}"


@pytest.mark.parametrize("thing", DOORS)
def test_every_door_leads_somewhere(thing: str) -> None:
    """A door nobody uses any more is closed, not left ajar."""
    unused = [room for room in sorted(DOORS[thing]) if thing not in uses((PACKAGE / room).read_text(encoding="utf-8"))]

    assert unused == []


@pytest.mark.parametrize(
    ("thing", "source"),
    [
        ("os.environ", "import os\nos.environ['HOME']"),
        ("os.environ", "import os\ndef f():\n    return os.getenv('HOME')"),
        ("os.environ", "from os import environ"),
        ("os.environ", "from os import getenv as read"),
        ("subprocess", "import subprocess"),
        ("subprocess", "def f():\n    from subprocess import run"),
        ("subprocess", "import os\nos.system('true')"),
        ("signal", "import signal as s"),
        ("signal", "from signal import SIGUSR1"),
        ("SLURM_", "x = 'SLURM_PROCID'"),
        ("SLURM_", "x = lambda name: f'SLURM_{name}'"),
    ],
)
def test_the_guard_sees_each_kind_of_use(thing: str, source: str) -> None:
    """A guard that cannot fail guards nothing."""
    assert uses(source) == {thing}


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.getpid()",
        "'''What SLURM_PROCID is for.'''",
        "from ddp_hpc.train import signal_names",
        "x = 'signal'",
    ],
)
def test_the_guard_lets_other_things_pass(source: str) -> None:
    assert uses(source) == set()


PROGRAMS = {
    "cluster/machine/sampler.py",
    "cluster/node_checks/gather.py",
    "cluster/rendezvous/interfaces.py",
    "cluster/rendezvous/links/probe.py",
    "job/guardian.py",
    "job/node/agent.py",
    "job/node/join.py",
    "job/node/join_node.py",
    "job/node/spawned_worker.py",
    "job/node/task.py",
    "job/node/torchrun_node.py",
    "job/node/unpack.py",
    "job/preflight.py",
    "job/supervisor.py",
    "launch/sweep/task.py",
    "prove/drill/injector.py",
    "train/recording/follower.py",
}
"""Programs of their own, started by `python -m`, which read the words they are started with."""


def test_below_the_command_line_only_programs_of_their_own_know_argparse() -> None:
    """What a command was asked goes down as a value of its own, such as a `SubmitRequest`."""
    texts = {room: (PACKAGE / room).read_text(encoding="utf-8") for room in ROOMS if not room.startswith("cli/")}

    assert {
        room for room, text in texts.items() if re.search(r"^\s*(import|from) argparse\b", text, re.MULTILINE)
    } == PROGRAMS
    assert all('\nif __name__ == "__main__":\n' in texts[room] for room in PROGRAMS)


READERS_OF_RUNS = ("prove/replay", "run/run_dir", "watch")
"""Packages that read what a run has written. At any path there may be something else than a file."""
NO_RECORDS = {
    ("prove/replay/history.py", "read_bytes"),  # the user's code
    ("run/run_dir/software_versions.py", "read_text"),  # /proc, PyTorch's version
}


def test_records_of_runs_are_read_by_one_door_that_waits_for_no_pipe() -> None:
    """`base/durable.py` has it: open_record, record_bytes, record_text, read_json, read_json_lines."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), node.func.attr)
        for package in READERS_OF_RUNS
        for path in (PACKAGE / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr in {"read_text", "read_bytes"} or (node.func.attr == "open" and _opens_to_read(node)))
    }

    assert found == NO_RECORDS


def _opens_to_read(call: ast.Call) -> bool:
    modes = [one.value for one in call.args if isinstance(one, ast.Constant)]
    is_of_os = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "os"
    return not is_of_os and (not modes or any("r" in str(mode) for mode in modes))
