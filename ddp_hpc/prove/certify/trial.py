"""One run of the script, watched: started as a user starts it, disturbed by a fault, and started again until it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ddp_hpc.base import processes
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.launch.submission.backend import backend_of
from ddp_hpc.prove.certify.faults import Action, TrialFault, Trigger
from ddp_hpc.prove.certify.file_events import FileEvents, Kind
from ddp_hpc.prove.certify.live_files import LiveFiles, LiveOutput
from ddp_hpc.prove.certify.live_processes import MARK_VARIABLE, VANISH_S, LiveProcesses, end_all_below, end_survivors
from ddp_hpc.prove.certify.records import AttemptRecord, InjectedFault, RunRecord, Save
from ddp_hpc.prove.certify.sandbox import file_stats
from ddp_hpc.prove.certify.saved_files import read_in_copy
from ddp_hpc.run.config.fill_paths import escape_dollars
from ddp_hpc.run.run_dir.failure_reports import read_failures
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import ask_to_stop

TICK_S = 0.01
LOOK_S = 0.2
"""How often to look for the processes, before the fault."""
MOST_ATTEMPTS = 5
MOST_VAIN = 2
"""How many attempts in a row may fail without a fault, before the script does not come back."""
MOST_KILLS = 3
"""How often all is killed until a save was hit in its middle."""
STACKS_S = 3.0
"""How long the ranks get to write their stacks."""
_TAIL, _STACKS_TAIL = 60_000, 1 << 24
"""How much of a rank's log is read, in bytes; the stacks of a hundred threads take more than the rest."""
_ABORT_MESSAGE = "Fatal Python error: Aborted"


@dataclass(kw_only=True)
class Trial:
    """One run: what to run and where, and what is seen of it."""

    name: str
    work_dir: Path
    """Its own copy of the user's working directory."""
    runs_dir: Path
    command: Sequence[str]
    settings: Sequence[str]
    patience_s: float
    environ: Mapping[str, str]
    fault: TrialFault | None = None
    trigger: Trigger | None = None
    save_names: frozenset[str] = frozenset()
    """Names of files that belong to a save, `masked`, as the undisturbed run showed."""
    progress: str | None = None
    """The user's own pattern of saved files."""
    printing_rank: int = 0
    """Whose lines say where the training is."""
    outside: tuple[Path, ...] = ()
    """Paths outside of the copy that the script must not change: its command, its source or a link in the copy names them."""
    apart_from: tuple[Path, ...] = ()
    """Directories below these paths that others change."""
    began: float = field(default_factory=time.monotonic)
    injected: InjectedFault | None = None
    """The newest."""
    begun_names: set[str] = field(default_factory=set)
    """Of all files that were begun, `masked`."""
    _num_injected: int = 0
    written_outside: set[str] = field(default_factory=set)
    """Files outside of its directory that it wrote to."""
    _stacks: dict[int, str] = field(default_factory=dict)
    """Of each rank, once the run hangs."""
    _looked_at: float = 0.0
    _longest_silence_s: float = 0.0

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.runs_dir / self.name)

    def run(self) -> RunRecord:
        """Run the script to its end; return what was seen."""
        before = file_stats(self.work_dir)
        attempts: list[AttemptRecord] = []
        num_vain = 0
        self._events = FileEvents(self.work_dir)
        # What is written at or below a path is seen from there, or from the nearest directory that there is.
        folders = sorted({next(one for one in (path, *path.parents) if one.is_dir()) for path in self.outside})
        self._outer = FileEvents(*folders, only=self.outside, apart_from=self.apart_from)
        try:
            while len(attempts) < MOST_ATTEMPTS:
                attempt = self._run_attempt(len(attempts))
                attempts.append(attempt)
                is_faulty = self.injected is not None and self.injected.attempt == len(attempts) - 1
                num_vain = 0 if is_faulty or attempt.ending == "stopped" else num_vain + 1
                is_over = attempt.ending in {"finished", "hung", "refused", ""} or num_vain >= MOST_VAIN
                if is_over or self.injected is None or self.written_outside:
                    break
        finally:
            self._events.close()
            self._outer.close()
        outcome: Literal["finished", "failed", "hung", "untouched"] = "hung" if self._stacks else "failed"
        if attempts[-1].ending == "finished":
            outcome = "untouched" if self.trigger is not None and self.injected is None else "finished"
        return RunRecord(
            outcome=outcome,
            attempts=tuple(attempts),
            injected=self.injected,
            final={
                path: read_in_copy(self.work_dir, self.work_dir / path)
                for path, look in file_stats(self.work_dir).items()
                if before.get(path) != look
            },
            stacks=self._stacks,
            seconds=time.monotonic() - self.began,
            longest_silence_s=self._longest_silence_s,
        )

    # --- one attempt -----------------------------------------------------------------------------------------------

    def _run_attempt(self, number: int) -> AttemptRecord:
        self._number = number
        self._output = LiveOutput(self.run_dir.rank_log(number, self.printing_rank), self.began)
        self._files = LiveFiles(self.work_dir, self.save_names, self.progress, self.begun_names)
        self._processes = LiveProcesses(self.run_dir)
        self._saves: list[Save] = []
        self._due_at: float | None = None
        self._is_injected = False
        self._alive_at = time.monotonic()
        said = self.runs_dir / f"{self.name}.submit.txt"
        with said.open("ab") as file:
            # In a session of its own: Ctrl-C on the terminal interrupts this process alone, which then ends the run.
            submitted = subprocess.Popen(
                self._argv(),
                cwd=self.work_dir,
                env={**self.environ, "PYTHONFAULTHANDLER": "1", MARK_VARIABLE: str(self.run_dir.path)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=partial(processes.terminate_with_parent, os.getpid()),  # noqa: PLW1509  there are no threads here
            )
            try:
                while submitted.poll() is None and not self.written_outside:
                    self._tick()
                    if self._processes.have_computed():
                        self._alive_at = time.monotonic()
                    if time.monotonic() - self._alive_at > self.patience_s:
                        self._ask_for_stacks()
                        self._cancel()
                        with suppress(subprocess.TimeoutExpired):
                            submitted.wait(VANISH_S)
                        break
            finally:
                left_behind = self._end_processes(submitted)
        self._tick()
        if self._is_injected and self.injected is not None:
            self.injected = self._with_states(self.injected)
        return self._make_record(said, left_behind)

    def _argv(self) -> list[str]:
        where = ["--cluster=local", "--wait"]  # also in a job: this process watches the files of its own node
        # Each attempt is a submission of its own, which is watched from its beginning.
        keys = [
            "restart.in_place=false",
            *self.settings,
            f"name={self.name}",
            f"runs_dir={escape_dollars(self.runs_dir)}",
        ]
        return [sys.executable, "-m", "ddp_hpc", "submit", *where, *keys, "--", *self.command]

    def _tick(self) -> None:
        for kind, path in self._events.wait(TICK_S):
            self._note_event(kind, path)
        self._read_output()
        self.written_outside.update(str(path) for _, path in self._outer.wait(0.0))
        now = time.monotonic()
        if now - self._looked_at > LOOK_S and not (self._is_injected and self._processes.scripts):
            self._looked_at = now
            self._processes.find()
        self._inject_if_due()

    def _note_event(self, kind: Kind, path: Path) -> None:
        """Take a file's event; inject the fault at once where it waits for it."""
        if kind != "read":
            self._alive_at = time.monotonic()
        if self._files.note(kind, path, self._output.has_position):
            self._saves.append(self._observed_save(path, in_place=kind == "done"))
        self._inject_if_due()

    def _observed_save(self, path: Path, *, in_place: bool) -> Save:
        contents, at = None, time.monotonic() - self.began
        if self.fault is None:  # the undisturbed run: what it has saved is what others are compared with
            with suppress(OSError):
                contents = read_in_copy(self.work_dir, path)
        self._read_output()
        num_lines = len(self._output.lines)
        return Save(path=self._files.relative(path), num_lines=num_lines, at=at, contents=contents, in_place=in_place)

    def _read_output(self) -> None:
        has_begun = bool(self._output.lines)
        if self._output.read():
            now = time.monotonic()
            if has_begun:
                self._longest_silence_s = max(self._longest_silence_s, now - self._alive_at)
            self._alive_at = now

    # --- the fault -------------------------------------------------------------------------------------------------

    def _inject_if_due(self) -> None:
        """Inject the fault once its moment has come; a kill within a save also comes again, where no save was hit."""
        fault, trigger = self.fault, self.trigger
        if fault is None or trigger is None or self._is_injected or not self._processes.scripts:
            return
        if self.injected is not None and (
            fault.moment != "in a save" or self.injected.was_in_save or self._num_injected >= MOST_KILLS
        ):
            return
        counts = {"line": len(self._output.lines), "save begun": self._files.num_begun, "save done": len(self._saves)}
        kind, number, then_s = trigger
        if self._due_at is None and counts[kind] >= (number if self._num_injected == 0 else 1):
            self._due_at = time.monotonic() + then_s
        if self._due_at is None or time.monotonic() < self._due_at:
            return
        self._is_injected = True
        self._num_injected += 1
        action = self._processes.action_of(fault.stop_signal) if fault.is_stop else ""
        _ACTIONS[fault.action](self._processes, self._output)
        if fault.is_stop:
            ask_to_stop(self.run_dir)
        at = time.monotonic() - self.began
        self.injected = InjectedFault(attempt=self._number, at_line=counts["line"], at=at, signal_action=action)

    def _with_states(self, injected: InjectedFault) -> InjectedFault:
        """Add what the saved files were when all processes of the attempt had gone."""
        half, whole = self._files.states_now()
        for kind, path in self._events.wait(0.0):
            if kind != "read":  # this process has read them
                self._note_event(kind, path)
        was_in_save, cut_off = bool(half or self._files.being_written), (*half, *self._files.empty_files())
        return replace(injected, half_written=cut_off, present=tuple(whole), was_in_save=was_in_save)

    # --- the end of an attempt -------------------------------------------------------------------------------------

    def _make_record(self, said: Path, left_behind: Sequence[str]) -> AttemptRecord:
        run = self.run_dir
        entry = Ledger.read(run).attempt(self._number)
        failures = read_failures(run, self._number)
        text = said.read_text(encoding="utf-8", errors="replace").strip()
        ending = "" if entry is None or entry.ending is None else str(entry.ending)
        since = self._processes.scripts_since
        return AttemptRecord(
            ending="hung" if self._stacks else ending,
            reason=text[-2000:] if entry is None else entry.reason,
            lines=tuple(self._output.lines),
            logs=self._read_logs(),
            failed_ranks={one.rank: one.exception for one in failures},
            lost_ranks=frozenset(one.rank for one in failures if one.is_secondary),
            reads=tuple(dict.fromkeys(self._files.reads)),
            saves=tuple(self._saves),
            left_behind=tuple(left_behind),
            script_s=0.0 if since is None else time.monotonic() - since,
        )

    def _read_logs(self, tail_bytes: int = _TAIL) -> dict[int, str]:
        paths = self.run_dir.attempt_logs(self._number).glob("rank-*.log")
        tails = ((path, path.read_bytes()[-tail_bytes:]) for path in paths)
        return {int(path.stem.partition("-")[2]): tail.decode("utf-8", errors="replace") for path, tail in tails}

    def _ask_for_stacks(self) -> None:
        """Have each rank print its Python stack, which ends it (SIGABRT, with `PYTHONFAULTHANDLER`), and keep what they print."""
        self._processes.find()
        processes.send_signal(self._processes.scripts, processes.signal_number("ABRT"))
        deadline = time.monotonic() + STACKS_S
        while time.monotonic() < deadline and len(self._stacks) < max(1, len(self._processes.scripts)):
            time.sleep(0.1)
            for rank, text in self._read_logs(_STACKS_TAIL).items():
                _, is_there, stack = text.rpartition(_ABORT_MESSAGE)
                if is_there and stack:
                    self._stacks[rank] = stack
        self._stacks = self._stacks or {-1: "no stack could be read"}

    def _end_processes(self, submitted: subprocess.Popen[bytes]) -> list[str]:
        """Leave no process of the run behind, however this attempt ends; return those that the script has left."""
        # Not by `cancel` alone: it finds no run before the supervisor has taken the lock.
        if submitted.poll() is None:
            end_all_below(submitted.pid)
            submitted.wait()
        self._cancel()
        return end_survivors(self.run_dir, " ".join(self.command))

    def _cancel(self) -> None:
        newest = Ledger.read(self.run_dir).newest
        if newest is None or not newest.is_last:
            with suppress(DdpHpcError, OSError):  # it has not begun; or its records cannot be written
                backend_of(self.run_dir).cancel(self.run_dir, self.environ)


_ACTIONS: Mapping[Action, Callable[[LiveProcesses, LiveOutput], None]] = {
    "stop": lambda live, output: live.ask_to_stop(output.step_s()),
    "stop everything": lambda live, _: live.terminate_everything(),
    "kill a rank": lambda live, _: processes.kill(live.scripts[-1:]),
    "kill all": lambda live, _: processes.kill([*live.scripts, *live.workers, *live.others]),
}
