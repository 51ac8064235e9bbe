"""One call of a back end in words: `python -m tests.contract.driver slurm submit CONFIG NAME key=value ...` prints JSON.

Tests on the cluster call it on a login node, the others in their own process (`perform`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.launch.submission import removal
from ddp_hpc.launch.submission.backend import Backend, Submission, load_backend
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.run.config.resolve import resolve
from ddp_hpc.run.run_dir.paths import RunDir


def perform(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what a call came to: `value`, or `error` (the exception's name) and `message`."""
    backend, function, config, name, *settings = words
    try:
        return {"value": _called(load_backend(backend), function, [config, name, *settings], environ)}
    except DdpHpcError as error:
        return {"error": type(error).__name__, "message": str(error), "exit_code": error.exit_code}


def _called(backend: Backend, function: str, words: Sequence[str], environ: Mapping[str, str]) -> Any:
    config, name, *settings = words
    folder = Path(config).parent
    run = RunDir(folder / "runs" / name)
    match function:
        case "describe" | "prepare" | "submit":
            resolved = resolve(Path(config), [f"name={name}", f"runs_dir={folder / 'runs'}", *settings], environ)
            request = SubmitRequest(resolved=resolved, import_paths=[folder], environ=environ)
            if function == "describe":
                described = backend.describe(request)
                return {"command": list(described.command), "script": described.script}
            return _as_dict(backend.submit(request)) if function == "submit" else backend.prepare(request)
        case "wait":
            return asdict(backend.wait(run, int(settings[0]), environ))
        case "find_job":
            found = backend.find_job(run, environ)
            return found and _as_dict(found)
        case "delete":
            return removal.delete_run(run, environ)
    return {"stop": backend.stop, "cancel": backend.cancel}[function](run, environ)


def _as_dict(submission: Submission) -> dict[str, Any]:
    return {**asdict(submission), "run": str(submission.run.path)}


if __name__ == "__main__":
    print(json.dumps(perform(sys.argv[1:], dict(os.environ))))  # noqa: T201  the answer
