"""Makes the deaths of one machine: each in a folder of its own, which is not made again once it is whole.

    python -m tests.campaigns.deaths.on_machine FOLDER [PATTERN]

Needs root: a death by a full disk has a small tmpfs, one by memory a cgroup of version 1 or 2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.campaigns.command_line import asked_deaths
from tests.campaigns.deaths.table import NUM_RANKS, ON_MACHINE, Death
from tests.campaigns.written import stamp

HERE = Path(__file__).parent
CGROUPS = Path("/sys/fs/cgroup")
MEMORY_BYTES = 5 << 28
PATIENCE_S = 240.0
WHOLE = "whole"
"""A file that says that the death has happened, and at which commit."""
COPIED = ("ways_to_end.py", "ending_recipe.py", "ending_script.py")
CONFIG = """
recipe: {target: "ending_recipe:build"}
train: {epochs: 9, max_steps: 12, global_batch_size: 12, lr: 0.01}
"""
SETTINGS = ("restart.max_no_progress=1", "restart.hang_timeout_s=15", "name=dying")


def words_of(death: Death) -> list[str]:
    """Return what is typed after `ddp-hpc submit`, without where it runs."""
    if death.workload in {"recipe", "loaders"}:
        loaders = ["data.num_workers=1"] if death.workload == "loaders" else []
        how = [f"recipe.args.how={death.how}", f"recipe.args.rank={death.victim}"]
        return ["dying.yaml", *SETTINGS, *how, *loaders]
    start = "exec" if death.workload == "process" else "fork"
    return [*SETTINGS, f"script.start={start}", "--", sys.executable, "ending_script.py", death.how, str(death.victim)]


def prepare(folder: Path) -> None:
    """Put the programs and the configuration into a fresh folder."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name in COPIED:
        shutil.copy(HERE / name, folder)
    (folder / "dying.yaml").write_text(CONFIG)


def happen(death: Death, folder: Path) -> None:
    """Run it to its end in this folder, unless that was done."""
    if (folder / WHOLE).exists():
        return
    prepare(folder)
    typed = words_of(death)
    typed[1:1] = ["--wait", f"resources.workers_per_node={NUM_RANKS}"]
    with _small_disk(folder, death) as disk, _memory(death) as inside:
        run_in(folder, typed, inside, {"SMALL_DISK": str(disk)})
    (folder / WHOLE).write_text(stamp()["commit"])


def run_in(
    folder: Path, typed: Sequence[str], inside: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> None:
    """Submit a run that must end badly, and wait for its end."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(variables or {})}
    argv = [*inside, sys.executable, "-m", "ddp_hpc", "submit", *typed]
    ended = subprocess.run(
        argv, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    (folder / "said").write_text(ended.stdout + ended.stderr)
    assert ended.returncode != 0, ended.stdout


@contextlib.contextmanager
def _small_disk(folder: Path, death: Death) -> Iterator[Path]:
    disk = folder / "disk"
    disk.mkdir()
    if death.how != "disk":
        yield disk
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@contextlib.contextmanager
def _memory(death: Death) -> Iterator[list[str]]:
    """Yield the beginning of a command that runs in a cgroup with little memory."""
    if death.how != "cgroup":
        yield []
        return
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if is_v2 else CGROUPS / "memory") / f"why-{os.getpid()}-{death.name}"
    group.mkdir()
    (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(MEMORY_BYTES))
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        end = time.monotonic() + 30
        while (group / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.1)
        with contextlib.suppress(OSError):
            group.rmdir()


def main(argv: Sequence[str] | None = None) -> int:
    """Make all, or those whose name fits a pattern."""
    folder, chosen = asked_deaths("tests.campaigns.deaths.on_machine", __doc__, ON_MACHINE, argv)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell starts what it sends to the background without it
    hangs = [death for death in chosen if death.failure.startswith("hang")]
    others = [death for death in chosen if death not in hangs]
    with ThreadPoolExecutor(3) as busy, ThreadPoolExecutor(4) as idle:  # a hang is waited for, and computes nothing
        ways = ((idle, hangs), (busy, others))
        said = [pool.submit(_said, death, folder) for pool, deaths in ways for death in deaths]
        for one in as_completed(said):
            print(one.result(), flush=True)  # noqa: T201  it is watched
    return 0


def _said(death: Death, folder: Path) -> str:
    begin = time.monotonic()
    try:
        happen(death, folder / death.name)
        said = "done"
    except (AssertionError, subprocess.TimeoutExpired) as error:
        said = f"NOT DONE: {error}"[:300]
    return f"{death.name} {time.monotonic() - begin:.1f} s {said}"


if __name__ == "__main__":
    sys.exit(main())
