"""A script of the user's own, as launching sees it: which module runs it, when a run is done, and what it reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.base.patience import await_answer
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.workload.protocol import UsersCode, Workload
from ddp_hpc.run.workload.script_progress import look, read_seen_files

LISTING_PATIENCE_S = 10.0
"""How long to ask a file system for the saved files, before the run's records are used instead."""


class ScriptWorkload(Workload):
    """A script of the user's own.

    Its ranks may run on without a limit: rank zero alone evaluates and saves at the end of many scripts. The process that ddp-hpc has
    beside each script gets `stop_signal`, and sends the script its own (`script.stop_signal`).
    """

    worker = "ddp_hpc.job.script.worker"
    goes_on_here = True
    """As a user of torchrun expects it (`--max-restarts`)."""

    @property
    def cpus_per_worker(self) -> int:
        """One, if the user has not set it: nothing says how many loader processes a script starts."""
        return self.spec.resources.cpus_per_worker or 1

    @property
    def goal(self) -> Mapping[str, Any]:
        """Another command is another thing to do."""
        return {"command": list(self.spec.script.command)}

    def progress(self, run: RunDir, ledger: Ledger, *, is_patient: bool = True) -> int:
        """Return how often the files of `script.progress` have changed, plus the newest step that the script has committed."""
        # Each of them only grows, so their sum does.
        files, wait_s = self.spec.script.progress or str(run.checkpoints), LISTING_PATIENCE_S if is_patient else 0.0
        try:
            return await_answer(files, lambda: self._num_changes(run), patience_s=wait_s)
        except UnreadableError as error:
            sys.stderr.write(f"note: {error} ddp-hpc takes the script's progress from the run's ledger instead.\n")
            return max((one.last_step or one.first_step for one in ledger.attempts), default=0)

    def _num_changes(self, run: RunDir) -> int:
        pattern = self.spec.script.progress
        committed = max(checkpoint_names.committed_steps(run), default=0)
        return committed + (0 if pattern is None else look(read_seen_files(run), pattern, Path.cwd()).num_changes)

    def progress_on_disk(self, run: RunDir) -> int | None:
        """Return the same; None also where neither the key names the files that the script saves, nor has it committed one."""
        try:
            count = self._num_changes(run)
        except (OSError, UnreadableError):
            return None
        return None if self.spec.script.progress is None and not count else count

    @property
    def counts_files(self) -> bool:
        return self.spec.script.progress is not None

    @property
    def without_progress(self) -> str:
        """Name the key by which ddp-hpc sees what a script saves."""
        pattern = self.spec.script.progress
        if pattern is None:
            return "failed (each failure counts, because `script.progress` does not say which files the script saves)"
        return f"ended without a new file of `script.progress` ({pattern!r})"

    def users_code(self, import_paths: Sequence[Path]) -> UsersCode | None:
        """Return the directory of the script; for a module, the one that it is imported from; None for other programs.

        The script is looked for where the user's command finds it: below the first path, the working directory.
        """
        program = self.spec.script.program
        if program.module is not None:
            module = Path(*program.module.split("."))
            files = (module.with_suffix(".py"), module / "__main__.py")
            found = ((path, file) for path in import_paths for file in files if (path / file).is_file())
            return next((UsersCode(path.absolute(), file) for path, file in found), None)
        word = program.script or program.words[0]
        is_path = program.script is not None or "/" in word
        if not is_path or not import_paths or not (file := import_paths[0] / word).is_file():
            return None
        return UsersCode(file.absolute().parent, Path(file.name))

    def input_paths(self, work_dir: Path) -> Iterator[Path]:
        """Yield the absolute paths among the command's words, `--data=/path` included."""
        del work_dir
        for word in self.spec.script.command:
            value = word.partition("=")[2] if word.startswith("-") else word
            if value.startswith("/"):
                yield Path(value)


workload = ScriptWorkload
