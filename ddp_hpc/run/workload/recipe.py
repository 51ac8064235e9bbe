"""Training by a recipe, as launching sees it: which module trains, when a run is done, and what its workers read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.base.patience import await_answer
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import newest_committed_step
from ddp_hpc.run.workload.protocol import UsersCode, Workload

LISTING_PATIENCE_S = 10.0
"""How long to ask a file system which checkpoints there are, before the run's records are used instead."""


class RecipeWorkload(Workload):
    """Training by a recipe."""

    worker = "ddp_hpc.train.worker"
    teardown_s = 60.0
    """All ranks finish, or stop after a commit, together: one that does not exit then hangs only on its way out."""
    without_progress = "ended without a new checkpoint"

    @property
    def cpus_per_worker(self) -> int:
        """One, and one more for each loader process, if the user has not set it."""
        return self.spec.cpus_per_task

    @property
    def goal(self) -> Mapping[str, Any]:
        """More epochs or steps than before are more to do."""
        return {"epochs": self.spec.train.epochs, "max_steps": self.spec.train.max_steps}

    @property
    def hash_seed(self) -> int:
        """A model or optimizer may go through a set: the same order in each attempt."""
        return self.spec.seed % 2**32

    @property
    def ends_at_nan(self) -> bool:
        """Not with fp16, whose loss scaler skips such updates while it looks for its scale."""
        return self.spec.train.on_nonfinite == "stop" and self.spec.train.precision != "fp16"

    @staticmethod
    def progress(run: RunDir, ledger: Ledger, *, is_patient: bool = True) -> int:
        """Return the step of the newest checkpoint, 0 without one; if the file system does not answer, what the records say.

        Raises:
            UnreadableError: where the records cannot be read either.
        """
        wait_s = LISTING_PATIENCE_S if is_patient else 0.0
        try:
            steps = await_answer(str(run.checkpoints), lambda: checkpoint_names.committed_steps(run), patience_s=wait_s)
        except UnreadableError as error:
            sys.stderr.write(
                f"note: {error} ddp-hpc takes the newest checkpoint's step from the run's records instead.\n"
            )
        else:
            return steps[-1] if steps else 0
        try:
            return newest_committed_step(run, ledger)
        except OSError as error:
            raise UnreadableError(
                f"The newest checkpoint's step is not known: neither {run.checkpoints} nor {run.progress} can be read "
                f"({type(error).__name__}: {error}). Check that the file system answers and that you may read there."
            ) from error

    def progress_on_disk(self, run: RunDir) -> int | None:
        """Return the step of the newest checkpoint, 0 without one."""
        try:
            return max(checkpoint_names.committed_steps(run), default=0)
        except (OSError, UnreadableError):
            return None

    def users_code(self, import_paths: Sequence[Path]) -> UsersCode | None:
        """Return where the recipe's module is imported from; None for one that is built in or installed."""
        code = code_dir_of(self.spec.recipe.target, import_paths)
        return None if code is None else UsersCode(code, module_path_in(code, self.spec.recipe.target))

    def input_paths(self, work_dir: Path) -> Iterator[Path]:
        """Yield the recipe's arguments that are paths, and what `train.init_from` may mean."""
        for value in self.spec.recipe.args.values():
            if isinstance(value, str) and value.startswith("/"):
                yield Path(value)
        weights = self.spec.train.init_from
        if weights is not None:
            # A path below the working directory, or a run beside this one: the worker decides which of them has the weights.
            below = os.path.expanduser(weights)  # noqa: PTH111  a Path raises an error for `~nobody`
            candidates = (work_dir / below, self.spec.path.parent / weights)
            yield from (Path(os.path.normpath(path)) for path in candidates)


workload = RecipeWorkload


def code_dir_of(target: str, import_paths: Sequence[Path]) -> Path | None:
    """Return the first of `import_paths` that holds the recipe's module; None for one that is installed."""
    module, _, function = target.partition(":")
    if not function:
        return None  # a built-in recipe
    top = module.partition(".")[0]
    return next(
        (path.absolute() for path in import_paths if (path / f"{top}.py").is_file() or (path / top).is_dir()), None
    )


def module_path_in(code: Path, target: str) -> Path | None:
    """Return the recipe's module as a path below the directory it is imported from; None where it has none there."""
    path = Path(*target.partition(":")[0].split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py", path)
    return next((file for file in files if (code / file).exists()), None)
