"""Have a process of its own check the user's part of a run before it is queued: script, recipe, first weights."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.durable import replace_text
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.job.node.python_environ import IMPORT_PATH_NAME, SAFE_PATH_ENVIRON
from ddp_hpc.run.config.resolve import Resolved, flat_spec, render_resolved
from ddp_hpc.run.config.sources import DEFAULT
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.protocol import UsersCode
from ddp_hpc.run.workload.table import workload_of

NO_BYTECODE_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}
"""A dry run leaves nothing behind."""
DEADLINE_S = 15.0
"""How long the check may take: a first import of PyTorch from a slow file system takes longer."""


def check_users_part(specs: Sequence[RunSpec], code: UsersCode | None, environ: Mapping[str, str]) -> list[str]:
    """Check a run, or the points of a sweep; return a line for each thing that could not be checked on this host."""
    spec, workload = specs[0], workload_of(specs[0])
    paths = {} if code is None else {IMPORT_PATH_NAME: str(code.directory)}
    try:
        with tempfile.TemporaryDirectory(prefix="ddp-hpc-") as folder:
            answer, configs = Path(folder, "answer.json"), [Path(folder, f"{one}.yaml") for one in range(len(specs))]
            for config, one in zip(configs, specs, strict=True):
                text = render_resolved(Resolved(one, dict.fromkeys(flat_spec(one), DEFAULT.source)))
                replace_text(config, text, is_secret=True)
            argv = [
                sys.executable,
                "-m",
                "ddp_hpc.job.node.check_users_part",
                workload.worker,
                str(answer),
                *map(str, configs),
            ]
            ended = _run_check(argv, {**SAFE_PATH_ENVIRON, **NO_BYTECODE_ENV, **environ, **spec.environ, **paths})
            refused, unchecked = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else ("", [ended])
    except OSError as error:  # such as a full /tmp, which says nothing of the run
        refused, unchecked = "", [str(error)]
    if refused:
        raise ConfigError(refused)
    notes = [f"note: only the job can check this: {' '.join(text.split())}" for text in unchecked]
    return [*notes, *_note_on_hydra(spec.script.command, code)]


def _note_on_hydra(command: Sequence[str], code: UsersCode | None) -> Iterator[str]:
    """Yield a note where Hydra makes a new directory at each start, in which no attempt finds what the one before has saved."""
    if code is None or code.needed is None or any(word.lstrip("+").startswith("hydra.run.dir=") for word in command):
        return
    with suppress(OSError):
        source = (code.directory / code.needed).read_bytes()
        if re.search(rb"^(?:import|from) hydra\b.*^@(?:\w+\.)?main\b", source, re.MULTILINE | re.DOTALL):
            yield (
                "note: Hydra gives each start of the script another directory (outputs/DATE/TIME). If the script saves there, it starts over "
                "after each requeue: add `hydra.run.dir=out/NAME` to its words, unless Hydra's own configuration has a fixed one."
            )


def _run_check(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a command within the deadline; return how it ended."""
    process = subprocess.Popen(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"the user's code was not imported within {DEADLINE_S:.0f} s on this host; the job tries it again"
    finally:
        with suppress(ProcessLookupError):  # with what the user's code has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"the import of the user's code ended this host's Python with code {code}; the job tries it again"
