"""Computes steps of a run again in a run directory of its own, by the same supervisor, agent and workers.

The run itself is only read. Its checkpoint is reached by a link, and nothing of it is locked, renamed or deleted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ddp_hpc.base import processes
from ddp_hpc.base.durable import make_directories, replace_text
from ddp_hpc.base.errors import ConfigError, DdpHpcError, NotReplayedError, UnreadableError
from ddp_hpc.base.record import write_record
from ddp_hpc.cluster.machine.gpus import visible_gpus
from ddp_hpc.launch.submission import local
from ddp_hpc.prove.replay.history import History, StepRange, environ_of, unchanged_content
from ddp_hpc.prove.replay.record import StepRecords, recorded_steps, replay_step_records
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path
from ddp_hpc.run.config.resolve import Resolved, flat_spec, load_resolved, render_resolved
from ddp_hpc.run.run_dir.ledger import Ending, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import AttemptInputs, ReplayRequest
from ddp_hpc.run.spec import RunSpec

IN_REPLAY_VARIABLE = "DDP_HPC_REPLAY"
"""Is `1` in the environment of a replay's workers, for a recipe that must know."""
_LARGEST_INT = 2**31 - 1
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class WantedSteps:
    """Steps to compute again: those after `start`, up to and with the end of the request."""

    history: History
    start: int
    request: ReplayRequest
    """What to record besides what the run itself has on record."""
    world_size: int | None = None
    """Ranks; None: as many as the run had."""
    code: Path | None = None
    """Import the user's code from here, instead of where the run did."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Once it is set, the private run is cancelled: a thread gets no KeyboardInterrupt."""


@dataclass
class Replayed:
    """A replay that came to its end."""

    run: RunDir
    started_at: int
    """The step of the checkpoint that it began with; 0: the beginning."""
    stretches: Sequence[StepRange]
    world_sizes: list[int]
    """Ranks of each stretch."""
    notes: list[str]
    is_on_other_device: bool = False

    def record(self, start: int, end: int) -> StepRecords:
        """Return what it has recorded of the steps after `start` up to `end`."""
        return replay_step_records(self.run, max(self.world_sizes), start, end)


@contextmanager
def private_folder(*, is_kept: bool = False) -> Iterator[Path]:
    """Yield a directory for private runs. It stays where it is to be kept, or workers failed: the error names the log there."""
    folder = Path(tempfile.mkdtemp(prefix="ddp-hpc-replay-"))
    try:
        yield folder
    except NotReplayedError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not is_kept:
        shutil.rmtree(folder, ignore_errors=True)


def num_gpus_here(environ: Mapping[str, str], *, proc: Path = Path("/proc")) -> int:
    """Return how many GPUs of NVIDIA this process may use."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus = len(list((proc / "driver/nvidia/gpus").glob("*")))
    # Some machines do not list them (WSL2, some containers): then what the variable names counts.
    return len(visible_gpus(visible, num_gpus or (0 if visible is None else visible.count(",") + 1)))


def compute_again(
    wanted: WantedSteps, environ: Mapping[str, str], *, folder: Path, say: Callable[[str], object]
) -> Replayed:
    """Compute the steps, one stretch after the other, from the newest sound checkpoint on, with all that is on record.

    The private run holds metrics, samples and traces.
    """
    history, end = wanted.history, wanted.request.end_step
    begin, damage = history.sound_checkpoint(wanted.start)
    stretches = history.ranges_computed_alike(begin, end)
    # A run that was moved may have any name; that of the private run is checked as that of a new one.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", history.run.name).lstrip("._-")[:128]
    worlds = [wanted.world_size or inputs.world_size for *_, inputs in stretches]
    replayed = Replayed(RunDir(folder / (name or "run")), begin, stretches, worlds, damage)
    first = f"the checkpoint of step {begin}" if begin else "the beginning"
    say(f"{history.run.name}: from {first} to step {end}, in {folder}")
    make_directories(replayed.run.console.parent)
    make_directories(replayed.run.checkpoints)
    if begin:
        source = checkpoint_path(history.run, begin).resolve()
        link = replayed.run.checkpoints / source.name
        link.symlink_to(source)
        if not link.exists():
            raise UnreadableError(
                f"The checkpoint of step {begin} of {history.run.name} was deleted meanwhile: a training run keeps only its newest checkpoints. Give the same command again."
            )
    request = replace(
        wanted.request,
        state_steps=tuple(step for step in history.committed if begin < step <= end),
        digest_steps=tuple(recorded_steps(history.run, begin, end).digests),
    )
    for (low, high, inputs), world in zip(stretches, worlds, strict=True):
        write_record(replayed.run.replay_request, replace(request, start_step=low, end_step=high, commits=high < end))
        try:
            _compute(wanted, replayed, inputs, world, environ)
        except NotReplayedError as error:  # what has changed since may be why
            raise NotReplayedError("\n".join([str(error), *(f"note: {note}" for note in replayed.notes)])) from error
        say(f"steps {low + 1} to {high} of {history.run.name} computed again")
    return replayed


def _compute(
    wanted: WantedSteps, replayed: Replayed, inputs: AttemptInputs, world: int, environ: Mapping[str, str]
) -> None:
    """Run one attempt of the private run, to the end of a stretch."""
    run, original = replayed.run, wanted.history.run
    replace_text(run.config, inputs.config, is_secret=True)
    spec = load_resolved(run.config)
    gpus = world if spec.resources.num_gpus and num_gpus_here(environ) >= world else 0
    if spec.resources.num_gpus and not gpus:
        replayed.is_on_other_device = True
        replayed.notes.append(
            f"the run used GPUs, and this machine does not have {world}, so the steps are computed on CPUs"
        )
    spec = replay_spec(spec, run, runs_dir=original.path.parent, world=world, gpus=gpus)
    replace_text(run.config, render_resolved(Resolved(spec, dict.fromkeys(flat_spec(spec), "replay"))), is_secret=True)
    import_paths = [str(wanted.code.absolute())] if wanted.code else list(inputs.import_paths)
    imported = {} if wanted.code else inputs.code
    if edited := [path for path, seal in imported.items() if unchanged_content(Path(path), seal) is None]:
        replayed.notes.append(
            f"{', '.join(edited)} has changed since, or was deleted, and a run on this machine keeps no copy of its code: give a directory with the old code as `--code`"
        )
    place = inputs.work_dir if inputs.work_dir and Path(inputs.work_dir).is_dir() else None
    if inputs.work_dir and place is None:
        replayed.notes.append(f"the run's working directory {inputs.work_dir} is missing here")
    numeric = wanted.history.numerics.get(inputs.attempt)
    given = {**environ_of(numeric, environ), "PYTHONSAFEPATH": "ddp_hpc", IN_REPLAY_VARIABLE: "1"}
    _run_supervised(run, import_paths, given, place, wanted.ended)
    run.done.unlink(missing_ok=True)


def _run_supervised(
    run: RunDir, import_paths: Sequence[str], environ: Mapping[str, str], place: str | None, ended: threading.Event
) -> None:
    """Start the guardian, and wait for its end."""
    guardian: subprocess.Popen[bytes] | None = None
    try:
        with processes.signals_held_back():
            guardian = local.start_guardian(run, import_paths, environ, place=place)
        while guardian.poll() is None:
            if ended.wait(_POLL_S):
                raise KeyboardInterrupt  # noqa: TRY301  it is one, of another thread
    except BaseException:
        if guardian is not None:
            _cancel_run(guardian, run, environ)
        raise
    newest = Ledger.read(run).newest
    if newest is None or newest.ending != Ending.FINISHED:
        reason = newest.reason if newest else "no attempt began"
        raise NotReplayedError(
            f"The steps could not be computed again: {reason or 'the attempt did not finish'}\n"
            f"The replay's log is {run.console}.\n{run.path.parent} is kept, so that you can read it; delete it afterwards."
        )


def _cancel_run(guardian: subprocess.Popen[bytes], run: RunDir, environ: Mapping[str, str]) -> None:
    """Cancel the private run; where its records cannot be read or written, such as on a full disk, kill its guardian and supervisor."""
    while guardian.poll() is None:
        try:
            local.cancel(run, environ)
        except ConfigError:
            pass  # the supervisor has not started yet
        except (DdpHpcError, OSError):
            with suppress(psutil.Error):
                supervisors = [child.pid for child in psutil.Process(guardian.pid).children()]
                processes.kill([guardian.pid, *supervisors])  # in this order: a guardian starts another supervisor
        with suppress(subprocess.TimeoutExpired):
            guardian.wait(_POLL_S)


def replay_spec(spec: RunSpec, run: RunDir, *, runs_dir: Path, world: int, gpus: int) -> RunSpec:
    """Return the spec of a replay in `run`: it trains as the run did, and does nothing else. `runs_dir` is where the run itself lies.

    No evaluation, no periodic checkpoint, no notification, no profile, no second attempt.
    """
    init_from = spec.train.init_from
    # It may name a run beside, and `runs_dir` is another one here.
    if init_from is not None and (runs_dir / init_from).exists():
        init_from = str((runs_dir / init_from).absolute())
    return replace(
        spec,
        name=run.name,
        runs_dir=str(run.path.parent),
        launcher="agent",
        resources=replace(
            spec.resources,
            nodes=1,
            workers_per_node=world,
            gpus_per_node=gpus,
            time_limit_min=None,
            cpus_per_worker=None,
        ),
        restart=replace(spec.restart, in_place=False, max_no_progress=1),
        notify=replace(spec.notify, command=()),
        train=replace(spec.train, init_from=init_from),
        eval=replace(spec.eval, every_epochs=_LARGEST_INT),
        checkpoint=replace(spec.checkpoint, every_steps=None, keep_last=_LARGEST_INT, keep_best=0),
        integrity=replace(spec.integrity, every_steps=None),
        log=replace(spec.log, recorders=()),
        profile=replace(spec.profile, kind="off"),
    )
