"""`ddp_hpc.attach`: a few lines in a user's own script that give it agreed stops, committed checkpoints and our data order.

Under ddp-hpc, `attach` finds the run by a variable that the worker sets. Elsewhere (torchrun, a plain Python) there is no run: then the
same calls work on a directory of checkpoints, and `report` does nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from ddp_hpc.base.durable import make_directories
from ddp_hpc.base.errors import CheckpointError, ConfigError, DdpHpcError, FencedError, UnreadableError
from ddp_hpc.base.exit_codes import FENCED, STOPPED
from ddp_hpc.base.patience import await_answer, is_there
from ddp_hpc.base.processes import SLURMS_SIGNALS, signal_number
from ddp_hpc.cluster.rank_probe.folder import socket_of
from ddp_hpc.cluster.rank_probe.server import serve
from ddp_hpc.cluster.rendezvous.worker_env import ATTACH_VARIABLE, PROBE_FOLDER
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import prune_checkpoints
from ddp_hpc.run.checkpoints.foreign_files import commit_files, flush_files, newest_whole_step, step_in_name
from ddp_hpc.run.run_dir.ownership import is_fenced, next_attempt, release_claim, renew_claim
from ddp_hpc.run.run_dir.paths import RunDir, RunPath
from ddp_hpc.run.run_dir.records import read_rendezvous_token
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.attached.ranks import ScriptRanks, has_group, rank_info_of_script
from ddp_hpc.train.attached.report import ScriptReport
from ddp_hpc.train.attached.step_sampler import StepSampler
from ddp_hpc.train.data.sample_order import SampleOrder
from ddp_hpc.train.process_group import leave_process_group
from ddp_hpc.train.stop import StopConsensus, StopFlag

DEFAULT_DIR = "checkpoints"
"""Where checkpoints are outside of ddp-hpc, below the working directory."""
WAIT_NOTE_S = 30.0
"""After how long a rank says which call it waits in."""
_pid_and_run: tuple[int, AttachedRun] | None = None
"""This process's run and its process id: a forked process is another one."""


class _CheckpointDir(RunDir):
    """A directory of checkpoints without a run."""

    checkpoints = RunPath("")


def attach(checkpoint_dir: str | Path | None = None, *, stop_signals: Sequence[str] = ()) -> AttachedRun:
    """Return the run that this script belongs to; call it on every rank, in the main thread.

    From then on, or where the script makes its process group later, from the first `should_stop` on, stop signals (SIGTERM, SIGUSR2,
    `script.stop_signal` and `stop_signals`, such as `USR1`) only set a flag that `should_stop` reads; before, they end the rank. `checkpoint_dir`
    counts outside of ddp-hpc (default: `checkpoints`). A second call returns the same run.

    Raises:
        ConfigError: if it is called in another thread than the main one, or a signal does not exist.
    """
    global _pid_and_run  # noqa: PLW0603  a process has one set of signal handlers
    if _pid_and_run is None or _pid_and_run[0] != os.getpid():
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "`attach` was called in a thread, but only the main thread can handle signals. Call it there."
            )
        facts: dict[str, Any] = json.loads(os.environ.get(ATTACH_VARIABLE) or "{}")  # what the worker says of the run
        names = {*stop_signals, facts["stop_signal"]} if facts else {*stop_signals}
        try:
            signals = {*SLURMS_SIGNALS, *(signal_number(str(name).removeprefix("SIG")) for name in names)}
        except ValueError as error:
            raise ConfigError(
                f"`attach` got the stop signal {error.args[0]!r}, but there is none of that name."
            ) from error
        run = RunDir(Path(facts["run"])) if facts else _CheckpointDir(Path(checkpoint_dir or DEFAULT_DIR).absolute())
        flag = StopFlag(run.stop_request if facts else None, signals)
        attached = AttachedRun(run, flag, facts, os.environ)
        if attached.world_size == 1 or has_group():  # else a rank could wait for others that the signal ended
            flag.listen()
        _pid_and_run = os.getpid(), attached
        # A script that is a new process has not been started as one that answers.
        if folder := os.environ.get(PROBE_FOLDER):
            num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            serve(socket_of(Path(folder), int(os.environ["RANK"])), num_ranks=num_ranks)
    return _pid_and_run[1]


class AttachedRun:
    """The run of a user's script, as one of its ranks sees it."""

    def __init__(self, run: RunDir, flag: StopFlag, facts: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        info = rank_info_of_script(environ)
        self._run = run
        self._flag = flag
        self._is_managed = bool(facts)
        self.attempt: int = facts["attempt"] if facts else info.restart
        """How many attempts there were before this one."""
        self.stop_exit_code: int = facts["stop_exit_code"] if facts else STOPPED
        """The exit code that says: saved, start me again."""
        is_distributed = info.world_size > 1 and self._is_managed
        token = read_rendezvous_token(run.rendezvous_token(self.attempt)) if is_distributed else ""
        self._ranks = ScriptRanks(info, token, is_managed=self._is_managed)
        fenced = (lambda: is_fenced(run, self.attempt)) if facts else (lambda: False)
        self._consensus = StopConsensus(self._ranks, flag, is_fenced=fenced)
        self._num_calls = 0
        self._is_stopping = False
        self._report = ScriptReport(run=run, attempt=self.attempt) if self._is_managed else None
        if self._report:
            atexit.register(self._report.write_last)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._ranks.rank_info.world_size

    @property
    def local_world_size(self) -> int:
        """How many ranks this host has."""
        return self._ranks.rank_info.local_world_size

    @property
    def num_nodes(self) -> int:
        """How many hosts there are, with equally many ranks each."""
        return self._ranks.rank_info.num_nodes

    # --- stopping ------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take the stop signals again, where a library has put handlers of its own in the place of `attach`'s."""
        self._flag.listen()

    def should_stop(self, step: int) -> bool:
        """Tell, after the same step on all ranks, whether any of them was asked to stop; then save, commit and exit.

        All ranks call it once after each step. They exchange a word about every half second; in between, a call costs one
        comparison.
        """
        if self._is_stopping:
            return True
        # Counted here, not by `step`: a script may begin its steps anew in each epoch.
        self._num_calls += 1
        if self._num_calls < self._consensus.next_step:
            return False
        try:
            self._is_stopping = self._consensus.agree_to_stop(self._num_calls)
        except FencedError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(FENCED)
        if not self._flag.is_listening and threading.current_thread() is threading.main_thread():
            self._flag.listen(keeps_newer=True)
        if self._is_stopping and self._ranks.rank_info.is_rank_zero:
            if self._report:
                self._report.take_values({"step": int(step)}, now=True)
            sys.stderr.write(f"note: the ranks were asked to stop; all of them stop after step {step}\n")
        return self._is_stopping

    def exit_for_requeue(self) -> NoReturn:
        """Exit with the code that means: saved, start me again (`stop_exit_code`)."""
        # At the end of the interpreter, when nothing of the script refers to its DDP model any more.
        atexit.register(leave_process_group)
        sys.exit(self.stop_exit_code)

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_dir(self) -> Path:
        """Where committed checkpoints are; write new ones below it, in a directory whose name ends with `.tmp`."""
        make_directories(self._run.checkpoints)
        return self._run.checkpoints

    def latest(self, *, verify: bool = True) -> Path | None:
        """Return the newest committed checkpoint's directory, the same on every rank; None where there is none.

        Rank zero compares every byte with its checksum, or without `verify` the files' sizes. A damaged checkpoint is renamed, and the
        one before counts.

        Raises:
            UnreadableError: if the file system does not answer.
        """
        step, error = -1, None
        if self._ranks.rank_info.is_rank_zero:
            try:
                found = await_answer(
                    str(self._run.checkpoints),
                    lambda: newest_whole_step(self._run, reads_all=verify, on_progress=self._ranks.send_heartbeat),
                )
                step = -1 if found is None else found
            except (DdpHpcError, OSError) as one:
                step, error = -2, one
        step = self._ranks.broadcast_from_rank_zero(step)
        if error is not None:
            raise error
        if step == -1:
            return None
        if step < 0:
            raise UnreadableError("Rank zero could not read the newest checkpoint; its log says why.")
        path = checkpoint_path(self._run, step)
        await_answer(str(path), lambda: _require_visible(path))
        return path

    def commit(
        self, folder: str | Path, *, step: int | None = None, keeps_folder: bool = False, keep_last: int | None = None
    ) -> Path:
        """Publish what the ranks have written into a directory as the checkpoint of a step; return its new directory.

        All ranks call it, after each has written its files. The step is the number at the end of the directory's name, unless
        `step` says another. The files are flushed, listed with checksums, and renamed at once, so `latest` finds all of them or none. With
        `keeps_folder` they stay where they are, and copies are committed. With `keep_last`, older checkpoints are deleted then.

        Raises:
            ConfigError: on rank zero, if there is nothing to commit, no step, or a `manifest.json` that is not ddp-hpc's.
            CheckpointError: on the others, if a rank has failed.
        """
        folder, info = Path(folder).resolve(), self._ranks.rank_info  # of a link, what it leads to
        step = step_in_name(folder) if step is None else step
        if step is None or step < 0:
            raise ConfigError(
                f"`commit` got the directory {folder.name!r}, whose name does not end with a step. Name it `step-120.tmp`, or pass `step=120`."
            )
        step = int(step)  # which may be NumPy's
        with _note_long_wait(
            f"rank {info.rank} has waited for {WAIT_NOTE_S:.0f} s in `commit` of step {step}. All ranks must call it"
        ):
            self._ranks.sum(torch.zeros(1))  # each has written its files
            problem = _error_of(lambda: flush_files(folder)) if info.local_rank == 0 else None
            num_problems = self._ranks.sum(torch.tensor([int(problem is not None)], dtype=torch.int64)).item()
            if info.is_rank_zero and not num_problems:
                problem = _error_of(lambda: self._publish(folder, step, keeps_folder=keeps_folder, keep_last=keep_last))
            num_problems += self._ranks.broadcast_from_rank_zero(int(problem is not None))
        if problem is not None:
            raise problem
        if num_problems:
            raise CheckpointError(
                f"The checkpoint of step {step} was not committed: another rank has failed. Its log says why."
            )
        return checkpoint_path(self._run, step)

    def _publish(self, folder: Path, step: int, *, keeps_folder: bool, keep_last: int | None) -> None:
        run, attempt, world_size = self._run, self.attempt, self._ranks.rank_info.world_size
        if not self._is_managed:  # no supervisor has claimed the directory
            make_directories(run.checkpoints)
            attempt = next_attempt(run)
            renew_claim(run, attempt)
        commit_files(run, folder, step, attempt=attempt, world_size=world_size, keeps_folder=keeps_folder)
        later = [one for one in committed_steps(run) if one > step]
        if later:
            sys.stderr.write(
                f"note: step {step} is committed, but {run.checkpoints} has a checkpoint of step {later[-1]}, which `latest` returns. "
                "If this training starts over, give it a directory of its own\n"
            )
        elif keep_last is not None:
            prune_checkpoints(run, attempt=attempt, keep=CheckpointSpec(keep_last=max(keep_last, 1)))
        if not self._is_managed:
            release_claim(run, attempt)
        if self._report:
            at = (checkpoint_path(run, step) / "manifest.json").stat().st_mtime
            self._report.take_values({"last_checkpoint": step, "last_checkpoint_at": at}, now=True)

    # --- reporting and data --------------------------------------------------------------------------------------------

    def report(self, step: int, *, loss: Any = None, samples: float | None = None, **metrics: Any) -> None:
        """Say how far the training is: `ddp-hpc status` shows it. Rank zero's word counts; others may call it, too.

        `samples` is how many samples the step has used, over all ranks. `metrics` are numbers of an evaluation. A call between two writes, two
        seconds apart, costs some microseconds, and does not read a tensor's value from its device.
        """
        if self._report is not None and self._ranks.rank_info.is_rank_zero:
            self._report.take_values({"step": int(step), "loss": loss, "metrics": metrics}, samples=samples)

    def order(self, dataset: Sized | int, *, batch_size: int, seed: int = 0, drop_last: bool = False) -> StepSampler:
        """Return the order of a data set's samples as a `batch_sampler`; `batch_size` counts the samples of one rank.

        It follows from (seed, epoch, step), so a run resumes in the middle of an epoch with the very samples that come next.
        """
        info = self._ranks.rank_info
        order = SampleOrder(
            num_samples=dataset if isinstance(dataset, int) else len(dataset),
            seed=seed,
            global_batch_size=batch_size * info.world_size,
            micro_batch_size=batch_size,
            world_size=info.world_size,
            drop_last=drop_last,
        )
        if batch_size < 1 or not order.samples_per_epoch:
            raise ConfigError(
                f"`order` got batch_size={batch_size} and {order.num_samples} samples for {info.world_size} ranks, so an epoch has no step. "
                "Use a smaller batch, or drop_last=False."
            )
        return StepSampler(order, info.rank)


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except (OSError, DdpHpcError) as error:
        return error
    return None


def _require_visible(path: Path) -> None:
    if not is_there(path):
        raise UnreadableError(f"{path} is committed, but this host does not see it yet.")


@contextmanager
def _note_long_wait(text: str) -> Iterator[None]:
    timer = threading.Timer(WAIT_NOTE_S, lambda: sys.stderr.write(f"note: {text}\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
