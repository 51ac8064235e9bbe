"""Lists the checkpoints of a run, and verifies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, NewerFormatError, UnreadableError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.run.workload.script_progress import find_saved_files, read_seen_files


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One committed checkpoint; the fields are the keys of `checkpoints --json`."""

    step: int
    path: str
    num_bytes: int | None = None
    world_size: int | None = None
    """Number of workers that wrote it."""
    committed_at: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the evaluation at this step; empty if there was none."""
    problem: str | None = None
    """Why it is damaged, or cannot be read now; None also for what was not checked."""


def list_checkpoints(run: RunDir, *, verify: bool) -> list[CheckpointInfo]:
    """Return the committed checkpoints, newest last; `verify` reads every byte of them."""
    return [_info(run, step, verify=verify) for step in checkpoint_names.committed_steps(run)]


def _info(run: RunDir, step: int, *, verify: bool) -> CheckpointInfo:
    path = checkpoint_names.checkpoint_path(run, step)
    try:
        manifest = checkpoint_store.verify_checkpoint(path) if verify else checkpoint_store.read_manifest(path)
        committed_at = (path / checkpoint_names.MANIFEST_NAME).stat().st_mtime
    except CorruptCheckpointError as error:
        problem = f"{error} ddp-hpc continues no run from this checkpoint."
        return CheckpointInfo(step=step, path=str(path), problem=problem)
    except (NewerFormatError, UnreadableError, OSError) as error:  # the last two also when the run deletes it meanwhile
        return CheckpointInfo(step=step, path=str(path), problem=str(error))
    return CheckpointInfo(
        step=step,
        path=str(path),
        num_bytes=sum(shard.size for shard in manifest.shards),
        world_size=manifest.world_size,
        committed_at=committed_at,
        metrics=manifest.metrics,
    )


def why_without_checkpoint(run: RunDir) -> str:
    """Return why a run has no checkpoint; for a script, which files it saves itself."""
    progress = read_progress(run)
    if progress is None or progress.saves is None:
        return f"{run.name} has no checkpoint yet. A run writes one every `checkpoint.every_steps` steps, and when it stops or ends. `ddp-hpc status {run.word}` shows how far it is."
    pattern = read_seen_files(run).pattern
    files = find_saved_files(pattern, Path("/")) if pattern else {}
    newest_first = sorted(files, key=lambda path: files[path][1], reverse=True)
    saved = (
        f"Files that `script.progress` names: {shorten_names(newest_first, 5)}"
        if files
        else f"No file is there that {pattern} names"
    )
    saved = saved if pattern else "`script.progress` does not say which files it saves"
    return f"{run.name} is a script that has committed no checkpoint by `ddp_hpc.attach`. {saved}."


def choose_step(run: RunDir, step: int | None) -> int:
    """Return `step`, or the newest step, if it has a checkpoint."""
    steps = checkpoint_names.committed_steps(run)
    if not steps:
        raise ConfigError(why_without_checkpoint(run))
    if step is not None and step not in steps:
        raise ConfigError(
            f"Run {run.name!r} has no checkpoint of step {step}. Steps with a checkpoint: {', '.join(map(str, steps))}."
        )
    return steps[-1] if step is None else step


def digest(run: RunDir, step: int) -> str:
    """Return the digest of a checkpoint's whole training state."""
    with _with_advice(run):
        return checkpoint_store.checkpoint_digest(checkpoint_names.checkpoint_path(run, step))


@contextmanager
def _with_advice(run: RunDir) -> Iterator[None]:
    """Add to an error of reading a checkpoint what the user can do."""
    try:
        yield
    except CorruptCheckpointError as error:
        advice = f"`ddp-hpc checkpoints {run.word} --verify` says which checkpoints are sound."
        raise CorruptCheckpointError(f"{error} {advice}") from error
    except UnreadableError as error:
        raise UnreadableError(f"{error} Check that the file system answers and that you may read there.") from error


def export(run: RunDir, step: int, output: Path, *, ema: bool | None) -> tuple[int, bool]:
    """Write a checkpoint's weights, or their moving average, as `export_weights` does."""
    path = checkpoint_names.checkpoint_path(run, step)
    try:
        with _with_advice(run):
            return checkpoint_store.export_weights(path, output, ema=ema)
    except OSError as error:
        raise ConfigError(
            f"The output file {str(output)!r} cannot be written: {error.strerror}. Check the space and the permissions there, or "
            "name another file."
        ) from error
