"""Try every Python that we support: an environment of its own, the tests without a cluster, and a run to its bits, unbroken and resumed.

    python -m tests.campaigns.pythons [3.10 3.12 3.11+torch2.6]

With `+torch2.6`, the environment has that PyTorch instead of the one that is pinned. A Python that is not on this machine is named and left
out. Each environment takes about 6 GB and is removed afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.written import RESULTS, ROOT, add_row, stamp

TESTS = ("tests/unit", "tests/distributed", "tests/cli")
RECIPE = ROOT / "tests" / "slurm" / "faulty_recipe.py"
CONFIG = """\
recipe: {target: "faulty_recipe:build"}
train: {epochs: 3, global_batch_size: 24}
checkpoint: {every_steps: 10, keep_best: 0}
resources: {workers_per_node: 2, cpus_per_worker: 1}
"""
"""60 steps."""
PATIENCE_S = 600.0


class CampaignError(Exception):
    """What could not be done, with the output of what failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 where a Python fails, or two of them come to other bits."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.pythons", description=__doc__)
    parser.add_argument("versions", nargs="*", default=supported(), metavar="VERSION", help="all that we support")
    parser.add_argument("--keep", action="store_true", help="leave the environments (.venv-python3.12 ...)")
    arguments = parser.parse_args(argv)
    rows = []
    for version in arguments.versions:
        python = find(version.partition("+")[0])
        if python is None:
            say(f"Python {version}: not on this machine, so it is left out")
            continue
        say(f"Python {version}: {python}")
        rows.append(try_python(version, python, keep=arguments.keep))
        add_row(
            RESULTS / "pythons.json", rows[-1], key="version", order=lambda text: [*map(int, re.findall(r"\d+", text))]
        )
        say(told(rows[-1]))
    return int(not rows or any(row["verdict"] != "PASS" for row in rows) or bool(other_bits(rows)))


def supported() -> list[str]:
    """Return the versions that the package says it works with."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def find(version: str) -> str | None:
    """Return a Python of that version which runs: pyenv has a word on PATH for those that it does not let run, too."""
    on_path = shutil.which(f"python{version}")
    own = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in [*([on_path] if on_path else []), *map(str, own)]:
        done = subprocess.run(
            [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.strip() == version:
            return python
    return None


def try_python(version: str, python: str, *, keep: bool) -> dict[str, Any]:
    """Return what came of it, as a row of the results."""
    env, began = ROOT / f".venv-python{version}", time.monotonic()
    row: dict[str, Any] = {"version": version, "verdict": "FAIL", **stamp()}
    try:
        make(env, python, version.partition("+torch")[2])
        row |= facts(env)
        row["tests"] = tests(env)
        row |= bits(env)
        is_good = row["tests"]["exit_code"] == 0 and row["digest"] == row["digest_resumed"]
        row["verdict"] = "PASS" if is_good else "FAIL"
    except CampaignError as error:
        row["problem"] = str(error)
    finally:
        if not keep:
            shutil.rmtree(env, ignore_errors=True)
    return row | {"seconds": round(time.monotonic() - began)}


def make(env: Path, python: str, torch: str) -> None:
    """Make an environment with all that tests need, of the pinned versions; beside a PyTorch of another version, as far as it allows."""
    run([str(ROOT / "envs" / "make-venv"), str(env), python], ROOT)
    pip = [str(env / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    pins = (ROOT / "envs" / "constraints.txt").read_text().splitlines()
    if torch:
        run([*pip, "install", "-qq", f"torch=={torch}.*", "torchvision"], ROOT)
        there = run([*pip, "freeze", "--exclude-editable"], ROOT).splitlines()
        pins = [*there, *(pin for pin in pins if name_of(pin) not in {*map(name_of, there)})]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins))
        file.flush()
        run([*pip, "install", "-qq", "-c", file.name, "-e", f"{ROOT}[dev]"], ROOT)


def name_of(pin: str) -> str:
    """Return a package's name, as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>!~ ;@]", pin, maxsplit=1)[0]).lower()


def facts(env: Path) -> dict[str, str]:
    """Return what the environment has."""
    code = "import platform, numpy, torch; print(platform.python_version(), torch.__version__, numpy.__version__)"
    names = ("python", "torch", "numpy")
    return dict(zip(names, run([str(env / "bin" / "python"), "-c", code], ROOT).split(), strict=True))


def tests(env: Path) -> dict[str, Any]:
    """Return how the tests ended; each that fails is tried once more by itself, on a machine that may be busy."""
    first, lines = pytest(env, "-n", "2", *TESTS)
    found = {"of": [*TESTS], "exit_code": first, "summary": lines[-1].strip("= ") if lines else ""}
    failed = [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if failed:
        again = [name for name in failed if pytest(env, name)[0]]
        found |= {"exit_code": int(bool(again)), "failed_beside_others": failed, "failed_alone": again}
    return found


def pytest(env: Path, *what: str) -> tuple[int, list[str]]:
    """Run tests in an environment; return the exit code, and what was printed, by lines."""
    argv = [str(env / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *what]
    done = subprocess.run(argv, cwd=ROOT, env=surroundings(), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip().splitlines() or [done.stderr[-2000:]]


def bits(env: Path) -> dict[str, str]:
    """Return the digests of two runs of the same training: one unbroken, one stopped in its midst and resumed."""
    with folder() as place:
        hold = place / "hold"
        command = [str(env / "bin" / "ddp-hpc")]
        submit = [*command, "submit", "run.yaml", "--cluster", "local"]
        run([*submit, "name=unbroken", "--wait"], place)
        hold.touch()
        run([*submit, "name=resumed", f"recipe.args.slow_while={hold}"], place)
        await_checkpoint(place / "runs" / "resumed")
        run([*command, "stop", "resumed"], place)
        hold.unlink()
        await_end(place / "runs" / "resumed")
        if (place / "runs" / "resumed" / "DONE").exists():
            raise CampaignError("the run that was to be stopped had finished before")
        run([*submit, "name=resumed", f"recipe.args.slow_while={hold}", "--wait"], place)
        names = {"digest": "unbroken", "digest_resumed": "resumed"}
        return {key: run([*command, "checkpoints", name, "--digest"], place).strip() for key, name in names.items()}


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Yield a directory with the recipe and its configuration."""
    with tempfile.TemporaryDirectory(prefix="ddp_hpc-pythons-") as name:
        place = Path(name)
        shutil.copy(RECIPE, place)
        (place / "run.yaml").write_text(CONFIG)
        yield place


def await_checkpoint(run_path: Path) -> None:
    """Return once a run has committed a checkpoint."""
    await_(lambda: any(run_path.glob("checkpoints/step-*")), "the first checkpoint", run_path)


def await_end(run_path: Path) -> None:
    """Return once the ledger says that the run's first attempt has ended."""
    ledger = run_path / "attempts.jsonl"
    await_(lambda: '"ending"' in ledger.read_text(), "the run to stop", run_path)


def await_(condition: Any, what: str, run_path: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            console = run_path / "logs" / "console.log"
            raise CampaignError(f"waited in vain for {what}:\n{console.read_text() if console.exists() else ''}")
        time.sleep(0.2)


def run(argv: Sequence[str], cwd: Path) -> str:
    """Run a command; return its output.

    Raises:
        CampaignError: where it fails.
    """
    done = subprocess.run(argv, cwd=cwd, env=surroundings(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CampaignError(f"{' '.join(argv)!r} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def surroundings() -> dict[str, str]:
    """Return the environment without what belongs to the Python that runs this."""
    return {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}


def other_bits(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the versions of torch with which two Pythons came to other bits, and say so."""
    by_torch: dict[str, dict[str, str]] = {}
    for row in rows:
        if "digest" in row:
            by_torch.setdefault(row["torch"], {})[row["version"]] = row["digest"]
    found = {torch: sorted(ones) for torch, ones in by_torch.items() if len({*ones.values()}) > 1}
    for torch, versions in found.items():
        say(f"torch {torch}: Python {', '.join(versions)} came to different bits")
    return found


def told(row: dict[str, Any]) -> str:
    """Return a row in words."""
    known = [row["verdict"], row.get("python", ""), row.get("tests", {}).get("summary", ""), row.get("problem", "")]
    return f"Python {row['version']}: {'; '.join(part for part in known if part)} ({row['seconds']} s)"


def say(text: str) -> None:
    """Print a line at once: it lasts a while."""
    print(text, flush=True)  # noqa: T201  its output


if __name__ == "__main__":
    sys.exit(main())
