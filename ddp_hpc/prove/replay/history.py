"""Which attempt of a run computed which steps, and with what. Pure, except `read_history`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import xxhash

from ddp_hpc.base.durable import read_json_lines, record_text
from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, UnreadableError
from ddp_hpc.run.checkpoints import checkpoint_store
from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path, committed_steps
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.run.run_dir.replays import AttemptInputs, read_inputs
from ddp_hpc.run.run_dir.software_versions import read_environment

_NUMERIC_PREFIXES = ("OMP_", "MKL_", "CUBLAS_", "PYTHONHASHSEED")
"""Prefixes of variables that decide in which order numbers are added or sets are gone through; the replay gets those of the run."""

StepRange = tuple[int, int, AttemptInputs]
"""Steps that were computed alike: those after the first number, up to and with the second, and with what."""


@dataclass(frozen=True, kw_only=True)
class History:
    """What a run's directory says of its steps."""

    run: RunDir
    begun: Sequence[tuple[int, AttemptInputs]]
    """Of each attempt that trained, oldest first: the step that it went on from, and what it computed with."""
    committed: Sequence[int]
    last_step: int
    """The newest step of which there is a record."""
    uses_gpus: bool = False
    numerics: Mapping[int, Mapping[str, str] | None] = field(default_factory=dict)
    """By attempt, the variables that decide in which order numbers are added; None where that was not recorded."""
    notes: Sequence[str] = ()

    def sound_checkpoint(self, step: int) -> tuple[int, list[str]]:
        """Read the newest checkpoints up to `step` until one is sound; return its step, 0 without one, and notes on the others."""
        notes = []
        for one in sorted((one for one in self.committed if one <= step), reverse=True):
            try:
                checkpoint_store.verify_checkpoint(checkpoint_path(self.run, one))
            except (CorruptCheckpointError, UnreadableError, OSError) as error:
                notes.append(f"the checkpoint of step {one} cannot be used: {error}")
            else:
                return one, notes
        return 0, notes

    def inputs_at(self, step: int) -> AttemptInputs:
        """Return what the attempt that took this step last computed with."""
        taken = [inputs for first, inputs in self.begun if first < step]
        return (taken or [self.begun[0][1]])[-1]

    def ranges_computed_alike(self, start: int, end: int) -> list[StepRange]:
        """Return the steps after `start` up to `end`, in parts that were computed alike.

        A resume is exact, so attempts with equal inputs and equal numbers of threads are one part.
        """
        cuts = sorted({start, *(first for first, _ in self.begun if start < first < end), end})
        parts: list[StepRange] = []
        for low, high in pairwise(cuts):
            inputs = self.inputs_at(low + 1)
            if parts and self._what_decides_numbers(parts[-1][2]) == self._what_decides_numbers(inputs):
                parts[-1] = (parts[-1][0], high, parts[-1][2])
            else:
                parts.append((low, high, inputs))
        return parts

    def _what_decides_numbers(self, inputs: AttemptInputs) -> tuple[AttemptInputs, Mapping[str, str]]:
        """Return all that decides which numbers an attempt computes."""
        return replace(inputs, attempt=0), self.numerics.get(inputs.attempt) or {}


def read_history(run: RunDir) -> History:
    """Read which attempts trained, from where on, and with what; refuse a run of a script, and one that has not trained."""
    spec = load_resolved(run.config)
    if spec.script.is_set:
        raise ConfigError(
            f"{run.name} runs a script, whose steps only the script knows. Only runs of a recipe can be computed again."
        )
    attempts = Ledger.read(run).attempts
    begun = [(one.first_step, inputs) for one in attempts if (inputs := read_inputs(run, one.attempt)) is not None]
    notes = []
    if not begun:
        number = attempts[-1].attempt if attempts else 0
        newest = AttemptInputs(attempt=number, world_size=spec.resources.world_size, config=record_text(run.config))
        begun = [(0, newest)]
        notes.append(
            f"{run.name} has no record of what its attempts computed with (`logs/attempt-*/inputs.json`), so its newest configuration is used"
        )
    committed, progress = committed_steps(run), read_progress(run)
    logged = (line.get("step") for line in read_json_lines(run.metrics))
    steps = [*committed, *(step for step in logged if isinstance(step, int)), progress.step if progress else 0]
    if not (last := max(steps, default=0)):
        raise ConfigError(f"{run.name} has no record of a step yet. `ddp-hpc status {run.word}` shows how far it is.")
    return History(
        run=run,
        begun=begun,
        committed=committed,
        last_step=last,
        uses_gpus=spec.resources.num_gpus > 0,
        numerics={inputs.attempt: numeric_variables(run, inputs) for _, inputs in begun},
        notes=notes,
    )


def unchanged_content(path: Path, seal: str) -> bytes | None:
    """Return a file's content; None if it is no more what an attempt has imported."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return content if xxhash.xxh3_64_hexdigest(content) == seal else None


def environ_of(numeric: Mapping[str, str] | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the variables by which an attempt added its numbers, and without others of their kind; as it is if that was not recorded."""
    if numeric is None:
        return {**environ}
    return {**{name: value for name, value in environ.items() if not name.startswith(_NUMERIC_PREFIXES)}, **numeric}


def numeric_variables(run: RunDir, inputs: AttemptInputs) -> dict[str, str] | None:
    """Return the variables by which an attempt added its numbers in one order and not in another; None where that was not recorded."""
    recorded = read_environment(run, inputs.attempt)
    if recorded is None:
        return None
    return {name: value for name, value in recorded.variables.items() if name.startswith(_NUMERIC_PREFIXES)}
