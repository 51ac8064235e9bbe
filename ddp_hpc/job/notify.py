"""Starts the user's own command at events of a run (`notify.command`): once for each event, and never waits long for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ddp_hpc.base.durable import append_json_line, read_json_lines
from ddp_hpc.base.record import try_read_record
from ddp_hpc.job.ending.attempt_end import Conclusion
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.job.notifier import TIMEOUT_S
from ddp_hpc.run.run_dir.ledger import Ending, Ledger
from ddp_hpc.run.run_dir.records import Progress, failed_save, read_progress, read_queued_job
from ddp_hpc.run.spec.launch import NotifyEvent

PATIENCE_S = 5.0
"""How long a job that goes back into the queue waits for the command: Slurm ends the job, and so the command, when it is requeued."""
_SLACK_S = 5.0
_MAX_REASON_CHARACTERS = 4000
"""Characters: the kernel limits the length of a variable (execve(2), MAX_ARG_STRLEN)."""
_GOOD_ENDINGS = frozenset({Ending.FINISHED, Ending.STOPPED, Ending.CANCELLED})


@dataclass(kw_only=True)
class Notifier:
    """Of one job."""

    context: JobContext
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _seen: set[tuple[str, int]] = field(default_factory=set)

    def notify_start(self, attempt: int) -> None:
        """Note the start of an attempt: the first of the user's submission is the run's start."""
        run, is_in_job = self.context.run, self.context.allocation is not None
        queued, before = read_queued_job(run), Ledger.read(run).newest_before(attempt)
        if is_in_job or before is None or not before.next:  # else it goes on after a supervisor that died
            self._start_command("start", attempt, number=queued.since if is_in_job and queued else attempt)

    def notify_silence(self, attempt: int, silence_s: float) -> None:
        """Note that no worker has made progress for some time."""
        reason = (
            f"no worker has made progress for {silence_s:.0f} s; after `restart.hang_timeout_s`, ddp-hpc restarts them"
        )
        self._start_command("no_progress", attempt, reason=reason)

    def notify_failed_save(self, attempt: int) -> None:
        """Note the first save of an attempt that fails."""
        if not self._is_wanted("save_failed", attempt):
            return
        progress = try_read_record(self.context.run.progress, Progress, may_have_nan=True)
        if progress is not None and progress.attempt == attempt and progress.save_error:
            self._start_command("save_failed", attempt, reason=failed_save(progress.save_error))

    def notify_end(self, conclusion: Conclusion) -> None:
        """Note the end of an attempt. One that was stopped and goes on does not count."""
        number, end = conclusion.attempt, conclusion.end
        if end.ending == Ending.FENCED:
            return  # a newer start of the run says what becomes of it
        if end.ending not in _GOOD_ENDINGS:
            self._start_command("failure", number, state=end.ending, reason=end.reason, follows=end.next)
        elif not end.next:
            self._start_command("end", number, state=end.ending, reason=end.reason)

    def wait_for_commands(self, *, goes_on: bool) -> None:
        """Wait for the commands that still run, before this process ends or gives its job back."""
        deadline = time.monotonic() + (PATIENCE_S if goes_on else TIMEOUT_S + _SLACK_S)
        for process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0.0))

    def _start_command(self, event: NotifyEvent, attempt: int, *, number: int | None = None, **more: str) -> None:
        """Start the command, once for each event and number: that of the attempt, or another one."""
        number = attempt if number is None else number
        if not self._is_wanted(event, number):
            return
        self._seen.add((event, number))
        try:
            if not self._record_if_first(event, number):
                return
            environ = {**self.context.environ, **self._variables(event, attempt, **more)}
            self._running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "ddp_hpc.job.notifier", *self.context.spec.notify.command],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a stop signal for this process group is not for the command
                )
            )
        except Exception as error:  # noqa: BLE001  no command of the user's may end the run
            sys.stderr.write(f"note: ddp-hpc could not start `notify.command` for the event {event}: {error}\n")

    def _is_wanted(self, event: NotifyEvent, number: int) -> bool:
        spec = self.context.spec.notify
        return bool(spec.command) and event in spec.on and (event, number) not in self._seen

    def _record_if_first(self, event: str, number: int) -> bool:
        """Write down that the command is started for an event; return False where it was before, also in an earlier job."""
        # First the record, then the command: it is never started twice, and not at all if this process dies in between.
        file = self.context.run.notified
        key = {"event": event, "number": number}
        if any({name: line.get(name) for name in key} == key for line in read_json_lines(file, on_odd=lambda _: None)):
            return False
        append_json_line(file, {**key, "at": time.time()})
        return True

    def _variables(
        self, event: str, attempt: int, *, state: str = "running", reason: str = "", follows: str = ""
    ) -> Mapping[str, str]:
        context = self.context
        progress = read_progress(context.run)
        values = {
            "EVENT": event,
            "RUN": context.run.name,
            "RUN_DIR": str(context.run.path),
            "STATE": state,
            "REASON": reason[:_MAX_REASON_CHARACTERS],
            "NEXT": follows,
            "ATTEMPT": str(attempt),
            "STEP": "" if progress is None else str(progress.step),
            "JOB_ID": "" if context.allocation is None else context.allocation.scontrol_id,
        }
        told = {f"DDP_HPC_{name}": value.replace("\0", "") for name, value in values.items()}
        return {**told, "DDP_HPC_JSON": json.dumps({name.lower(): value for name, value in values.items()})}
