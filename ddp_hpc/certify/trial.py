"""One run of the script, watched: started as a user starts it, struck by a fault, and started again until it ends."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from ddp_hpc.base import processes
from ddp_hpc.certify.faults import Fault, Trigger
from ddp_hpc.certify.file_events import FileEvent, FileEvents
from ddp_hpc.certify.output_lines import Line, parse, scale_of
from ddp_hpc.certify.records import AttemptRecord, RunRecord, Save, SignalAction, Strike
from ddp_hpc.certify.sandbox import LEFT_OUT, files_in
from ddp_hpc.certify.saved_files import Contents, is_half_written, is_saved_state, read
from ddp_hpc.drill.injector import NodeProcess, processes_by_kind
from ddp_hpc.run_dir.failure_reports import read_failures
from ddp_hpc.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.run_dir.records import ask_to_stop
from ddp_hpc.script.life import LEAST_SHARE, cpu_seconds

TICK_S = 0.01
LOOK_S = 0.2
"""How often to look for the processes, before the fault."""
MOST_ATTEMPTS = 5
MOST_VAIN = 2
"""How many attempts in a row may fail without a fault, before the script does not come back."""
MOST_STRIKES = 3
"""How often all is killed until a save was hit in its middle."""
STACKS_S = 3.0
"""How long the ranks get to write their stacks."""
VANISH_S = 10.0
"""How long killed processes get to vanish."""
_TAIL = 60_000
_ABORTED = "Fatal Python error: Aborted"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one run takes place."""

    work_dir: Path
    """Its own copy of the user's working directory."""
    runs_dir: Path
    name: str

    @property
    def run(self) -> RunDir:
        return RunDir(self.runs_dir / self.name)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to run."""

    command: Sequence[str]
    settings: Sequence[str]
    patience_s: float
    environ: Mapping[str, str]
    fault: Fault | None = None
    trigger: Trigger | None = None
    save_names: frozenset[str] = frozenset()
    """Names of files that belong to a save, `plain`, as the undisturbed run showed."""
    progress: str | None = None
    """The user's own pattern of saved files."""
    outside: tuple[Path, ...] = ()
    """Paths outside of the copy that the script must not change: its command, its source or a link in the copy names them."""
    apart_from: tuple[Path, ...] = ()
    """Directories below these paths that others change."""


def _folder_of(path: Path) -> Path:
    """Return the directory to watch for what is written at or below a path: itself, or the nearest one that there is."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def plain(name: str) -> str:
    """Return a file's name without what changes from save to save: `epoch_#.pt`."""
    return re.sub(r"[0-9]+", "#", name)


@dataclass
class Trial:
    """One run."""

    place: Place
    order: Order
    began: float = field(default_factory=time.monotonic)
    strike: Strike | None = None
    _lines: list[Line] = field(default_factory=list)
    _saves: list[Save] = field(default_factory=list)
    _reads: list[str] = field(default_factory=list)
    _outside: set[str] = field(default_factory=set)
    _open: set[Path] = field(default_factory=set)
    _begun: int = 0
    _done: int = 0
    _due_at: float | None = None
    _strikes: int = 0
    _has_struck: bool = False
    """In this attempt."""
    _log_size: int = 0
    _partial: str = ""
    _scripts: list[int] = field(default_factory=list)
    _others: list[int] = field(default_factory=list)
    _scripts_since: float | None = None
    _looked_at: float = 0.0
    _alive_at: float = 0.0
    _cpu: tuple[float, float] = (0.0, 0.0)
    _longest_silence_s: float = 0.0
    begun_names: set[str] = field(default_factory=set)
    """Of all files that were begun in directories that have saved states."""

    @property
    def is_armed(self) -> bool:
        return self.order.trigger is not None and not self._has_struck and self._may_strike

    @property
    def _may_strike(self) -> bool:
        if self.strike is None:
            return True
        fault = self.order.fault
        in_save = fault is not None and fault.moment == "in a save"
        return in_save and not self.strike.was_in_save and self._strikes < MOST_STRIKES

    def run(self) -> RunRecord:
        """Run the script to its end; return what was seen."""
        before = files_in(self.place.work_dir)
        attempts: list[AttemptRecord] = []
        stacks: Mapping[int, str] = {}
        outcome: Literal["finished", "failed", "hung", "untouched"] = "failed"
        num_vain = 0
        self._events = FileEvents(self.place.work_dir, skipped=LEFT_OUT)
        outside = self.order.outside
        folders = sorted({_folder_of(path) for path in outside})
        self._outer = FileEvents(*folders, skipped=LEFT_OUT, only=outside, apart_from=self.order.apart_from)
        try:
            while len(attempts) < MOST_ATTEMPTS:
                attempt, stacks = self._attempt(len(attempts))
                attempts.append(attempt)
                is_struck = self.strike is not None and self.strike.attempt == len(attempts) - 1
                num_vain = 0 if is_struck or attempt.ending == "stopped" else num_vain + 1
                is_over = attempt.ending in {"finished", "hung", "refused", ""} or num_vain >= MOST_VAIN
                if is_over or self.strike is None or self._outside:
                    outcome = "finished" if attempt.ending == "finished" else "failed"
                    break
        finally:
            self._events.close()
            self._outer.close()
        if self.order.trigger is not None and self.strike is None and outcome == "finished":
            outcome = "untouched"
        elif outcome != "finished":
            outcome = "hung" if stacks else "failed"
        return RunRecord(
            outcome=outcome,
            attempts=tuple(attempts),
            strike=self.strike,
            final=self._final(before),
            stacks=stacks,
            seconds=time.monotonic() - self.began,
            longest_silence_s=self._longest_silence_s,
            outside=tuple(sorted(self._outside)),
        )

    def _final(self, before: Mapping[str, tuple[int, int]]) -> dict[str, Contents]:
        after = files_in(self.place.work_dir)
        return {path: read(self.place.work_dir / path) for path, look in after.items() if before.get(path) != look}

    # --- one attempt -----------------------------------------------------------------------------------------------

    def _attempt(self, number: int) -> tuple[AttemptRecord, Mapping[int, str]]:
        self._lines, self._saves, self._reads, self._open = [], [], [], set()
        self._log_size, self._partial, self._due_at, self._has_struck = 0, "", None, False
        self._begun = self._done = 0
        self._scripts, self._others, self._scripts_since = [], [], None
        now = time.monotonic()
        self._alive_at, self._cpu = now, (now, 0.0)
        output = self.place.runs_dir / f"{self.place.name}.submit.txt"
        stacks: Mapping[int, str] = {}
        with output.open("ab") as file:
            # In a session of its own: Ctrl-C on the terminal interrupts this process alone, which then ends the run.
            submitted = subprocess.Popen(
                self._argv(),
                cwd=self.place.work_dir,
                env={**self.order.environ, "PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=partial(processes.terminate_with_parent, os.getpid()),  # noqa: PLW1509  there are no threads here
            )
            try:
                while submitted.poll() is None and not self._outside:
                    self._tick(number)
                    if self._is_silent():
                        stacks = self._ask_for_stacks(number)
                        self._cancel()
                        with suppress(subprocess.TimeoutExpired):
                            submitted.wait(VANISH_S)
                        break
            finally:
                self._end(submitted)
        self._tick(number)
        if self._has_struck and self.strike is not None:
            self.strike = self._after_strike(self.strike)
        record = self._record(number, output, is_hung=bool(stacks))
        return record, stacks

    def _argv(self) -> list[str]:
        where = [
            "--cluster=local",
            "--wait",
        ]  # also in a job, on whose node this process runs, as it watches that node's files
        keys = [*self.order.settings, f"name={self.place.name}", f"runs_dir={self.place.runs_dir}"]
        return [sys.executable, "-m", "ddp_hpc", "submit", *where, *keys, "--", *self.order.command]

    def _tick(self, number: int) -> None:
        for event in self._events.wait(TICK_S):
            self._note(event)
        self._read_log(number)
        self._outside.update(str(event.path) for event in self._outer.wait(0.0))
        now = time.monotonic()
        if now - self._looked_at > LOOK_S and not (self._has_struck and self._scripts):
            self._looked_at = now
            self._find_processes()
        if self.is_armed and self._is_due():
            self._strike(number)

    def _is_due(self) -> bool:
        trigger = self.order.trigger
        if trigger is None or not self._scripts:
            return False
        if self._due_at is None:
            counts = {"line": len(self._lines), "save begun": self._begun, "save done": self._done}
            needed = trigger.number if self._strikes == 0 else 1
            if counts[trigger.kind] < needed:
                return False
            self._due_at = time.monotonic() + trigger.then_s
        return time.monotonic() >= self._due_at

    def _note(self, event: FileEvent) -> None:
        """Take a file's event; strike at once where the fault waits for it."""
        if event.kind != "read":
            self._alive_at = time.monotonic()
        is_save = self._is_of_save(event.path)
        if event.kind == "read" and is_save and not self._has_position():
            self._reads.append(self._relative(event.path))
        if event.kind == "begun":
            self.begun_names.add(plain(event.path.name))
            if is_save and event.path not in self._open:
                self._open.add(event.path)
                self._begun += 1
        elif event.kind in {"done", "named"}:
            self._open.discard(event.path)
            if self._is_state(event.path):
                self._done += 1
                self._saves.append(self._save(event.path, in_place=event.kind == "done"))
        if self.is_armed and self._is_due():
            self._strike(self._number())

    def _is_state(self, path: Path) -> bool:
        pattern = self.order.progress
        if pattern is not None:
            relative = self._relative(path)
            return fnmatch.fnmatch(relative, pattern) or fnmatch.fnmatch(relative, f"{pattern}/*")
        return is_saved_state(path)

    def _is_of_save(self, path: Path) -> bool:
        if self._is_state(path) or any(is_saved_state(Path(f"x{suffix}")) for suffix in path.suffixes):
            return True
        return plain(path.name) in self.order.save_names

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.place.work_dir).as_posix()

    def _save(self, path: Path, *, in_place: bool) -> Save:
        contents = None
        if self.order.fault is None:  # the undisturbed run: what it has saved is what others are compared with
            with suppress(OSError):
                contents = read(path)
        at = time.monotonic() - self.began
        self._read_log(self._number())
        return Save(path=self._relative(path), num_lines=len(self._lines), at=at, contents=contents, in_place=in_place)

    def _number(self) -> int:
        newest = Ledger.read(self.place.run).newest
        return 0 if newest is None else newest.attempt

    def _has_position(self) -> bool:
        return bool(scale_of(self._lines).unit)

    def _read_log(self, number: int) -> None:
        log = self.place.run.rank_log(number, 0)
        with suppress(OSError):
            if log.stat().st_size == self._log_size:
                return
            with log.open("rb") as file:
                file.seek(self._log_size)
                data = file.read()
            self._log_size += len(data)
            text = self._partial + data.decode("utf-8", errors="replace")
            *whole, self._partial = text.replace("\r", "\n").split("\n")  # progress bars write over their line
            now = time.monotonic()
            if self._lines:
                self._longest_silence_s = max(self._longest_silence_s, now - self._alive_at)
            self._alive_at = now
            self._lines.extend(parse(text, now - self.began) for text in whole if text.strip())

    # --- processes -------------------------------------------------------------------------------------------------

    def _find_processes(self) -> None:
        newest = Ledger.read(self.place.run).newest
        if newest is None or newest.ending is not None:
            return
        listed, parents = [], {}
        with suppress(psutil.Error):
            for each in psutil.Process(newest.pid).children(recursive=True):
                with suppress(psutil.Error):
                    listed.append(NodeProcess(each.pid, each.ppid(), each.cmdline()))
                    parents[each.pid] = each.ppid()
        workers = processes_by_kind([one for one in listed if one.argv], str(self.place.run.path))["worker"]
        children = [[pid for pid, parent in parents.items() if parent == worker] for worker in workers]
        self._scripts = [min(pids) for pids in children if pids]
        if self._scripts and self._scripts_since is None:
            self._scripts_since = time.monotonic()
        self._workers = workers
        self._others = [pid for pid in parents if pid not in self._scripts and pid not in workers]

    def _is_silent(self) -> bool:
        """Tell whether the run has printed nothing, written nothing and computed nothing for too long."""
        now = time.monotonic()
        if now - self._cpu[0] > 1.0:
            newest = Ledger.read(self.place.run).newest
            pids = self._scripts or ([] if newest is None else [newest.pid])
            used = sum(map(cpu_seconds, pids))
            if abs(used - self._cpu[1]) > 2 * LEAST_SHARE * max(1, len(pids)) * (now - self._cpu[0]):
                self._alive_at = now
            self._cpu = (now, used)
        return now - self._alive_at > self.order.patience_s

    # --- the fault -------------------------------------------------------------------------------------------------

    def _strike(self, number: int) -> None:
        fault = self.order.fault
        if fault is None:
            return
        self._has_struck = True
        self._strikes += 1
        action: SignalAction = ""
        if fault.is_stop:
            action = _signal_action(self._scripts[0], fault.stop_signal)
        _ACTIONS[fault.action](self)
        self.strike = Strike(
            attempt=number,
            description=fault.description,
            at_line=len(self._lines),
            at=time.monotonic() - self.began,
            signal_action=action,
        )

    def stop(self) -> None:
        """Ask the ranks to stop, the last one first and rank zero last, as signals arrive at different moments."""
        gap_s = self._step_s()
        for worker in reversed(self._workers):
            processes.request_stop([worker])
            time.sleep(gap_s)
        ask_to_stop(self.place.run)

    def stop_everything(self) -> None:
        """Send SIGTERM to every process of the workers, the processes that they have started included."""
        number = processes.signal_number("TERM")
        below = []
        for script in self._scripts:
            with suppress(psutil.Error):
                below += [one.pid for one in psutil.Process(script).children(recursive=True)]
        processes.send([*below, *self._scripts, *self._workers], number)
        ask_to_stop(self.place.run)

    def kill_a_rank(self) -> None:
        """Kill the script of the last rank."""
        processes.kill(self._scripts[-1:])

    def kill_all(self) -> None:
        """Kill the scripts of all ranks, and the processes that have started them."""
        processes.kill([*self._scripts, *self._workers, *self._others])

    def _step_s(self) -> float:
        """Return how long a step takes, and half a step more, as the newest lines show."""
        newest = self._lines[-5:]
        if len(newest) < 2:
            return 0.05
        return min(0.5, max(0.02, 1.5 * (newest[-1].at - newest[0].at) / (len(newest) - 1)))

    def _after_strike(self, strike: Strike) -> Strike:
        """Add what the saved files were when all processes of the attempt had gone."""
        root = self.place.work_dir
        found = sorted(files_in(root).items(), key=lambda item: item[1][1])
        paths = [path for path, _ in found if self._is_of_save(root / path)]
        half = tuple(path for path in paths if is_half_written(root / path))
        whole = [path for path in paths if path not in half and self._is_state(root / path)]
        contents = {path: read(root / path) for path in whole}
        for event in self._events.wait(0.0):
            if event.kind != "read":  # this process has read them
                self._note(event)
        return replace(
            strike, half_written=half, present=tuple(whole), contents=contents, was_in_save=bool(half or self._open)
        )

    # --- the record ------------------------------------------------------------------------------------------------

    def _record(self, number: int, output: Path, *, is_hung: bool) -> AttemptRecord:
        run = self.place.run
        entry = _entry(run, number)
        logs = {}
        for path in run.attempt_logs(number).glob("rank-*.log"):
            rank = int(path.stem.partition("-")[2])
            logs[rank] = path.read_bytes()[-_TAIL:].decode("utf-8", errors="replace")
        failures = read_failures(run, number)
        said = output.read_text(encoding="utf-8", errors="replace").strip()
        ending = "" if entry is None or entry.ending is None else str(entry.ending)
        return AttemptRecord(
            ending="hung" if is_hung else ending,
            reason=said[-2000:] if entry is None else entry.reason,
            lines=tuple(self._lines),
            logs=logs,
            failed_ranks={one.rank: one.exception for one in failures},
            lost_ranks=frozenset(one.rank for one in failures if one.is_secondary),
            reads=tuple(dict.fromkeys(self._reads)),
            saves=tuple(self._saves),
            num_ranks=len(logs),
            script_s=0.0 if self._scripts_since is None else time.monotonic() - self._scripts_since,
        )

    def _ask_for_stacks(self, number: int) -> Mapping[int, str]:
        """Have each rank print its Python stack, which ends it; return what they printed."""
        self._find_processes()
        processes.send(self._scripts, processes.signal_number("ABRT"))
        deadline = time.monotonic() + STACKS_S
        stacks: dict[int, str] = {}
        while time.monotonic() < deadline and len(stacks) < max(1, len(self._scripts)):
            time.sleep(0.1)
            for path in self.place.run.attempt_logs(number).glob("rank-*.log"):
                _, _, stack = path.read_text(encoding="utf-8", errors="replace").rpartition(_ABORTED)
                if stack and stack != path.read_text(encoding="utf-8", errors="replace"):
                    stacks[int(path.stem.partition("-")[2])] = stack
        return stacks or {-1: "no stack could be read"}

    def _end(self, submitted: subprocess.Popen[bytes]) -> None:
        """Leave no process of the run behind, however this attempt ends; most have ended already."""
        # Not by `cancel` alone: it finds no run before the supervisor has taken the lock. A process that stands still starts
        # no other, so what is found below is all that there is.
        if submitted.poll() is None:
            halted = _halted(submitted)
            processes.kill(halted)
            submitted.wait()
            deadline = time.monotonic() + VANISH_S
            while any(processes.start_ticks(pid) is not None for pid in halted) and time.monotonic() < deadline:
                time.sleep(TICK_S)
        self._cancel()

    def _cancel(self) -> None:
        run = self.place.run
        newest = Ledger.read(run).newest
        if newest is not None and newest.is_last:
            return
        with suppress(OSError):  # a file system without locks
            if not processes.is_locked(run.lock):
                return
        argv = [sys.executable, "-m", "ddp_hpc", "cancel", str(run.path)]
        subprocess.run(
            argv,
            env=dict(self.order.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            start_new_session=True,
        )


_ACTIONS: Mapping[str, Callable[[Trial], None]] = {
    "stop": Trial.stop,
    "stop everything": Trial.stop_everything,
    "kill a rank": Trial.kill_a_rank,
    "kill all": Trial.kill_all,
}


def _halted(process: subprocess.Popen[bytes]) -> list[int]:
    """Stop a process of ours and all below it (SIGSTOP); return their pids, the upper ones first."""
    number = processes.signal_number("STOP")
    processes.send([process.pid], number)
    halted = [process.pid]
    while True:
        with suppress(psutil.Error):
            new = [one.pid for one in psutil.Process(process.pid).children(recursive=True) if one.pid not in halted]
            if new:
                processes.send(new, number)
                halted += new
                continue
        return halted


def _entry(run: RunDir, number: int) -> Attempt | None:
    return next((one for one in Ledger.read(run).attempts if one.attempt == number), None)


def _signal_action(pid: int, name: str) -> SignalAction:
    """Return what a process does with a signal (proc(5), SigIgn and SigCgt)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    bit = processes.signal_number(name) - 1
    if int(fields["SigIgn"], 16) >> bit & 1:
        return "ignored"
    return "caught" if int(fields["SigCgt"], 16) >> bit & 1 else "default"
