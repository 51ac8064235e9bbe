"""Check and measure on one GPU what cannot be known without one, in two parts of under five minutes each.

    python benchmarks/gpu_check.py                      # both parts, on a machine with a GPU
    python benchmarks/gpu_check.py --part 1             # what could be wrong
    python benchmarks/gpu_check.py --part 2             # what is slow
    python benchmarks/gpu_check.py --only save loader   # these
    python benchmarks/gpu_check.py --device cpu --tiny  # without a GPU: proves the checks, its rates mean nothing

It needs PyTorch 2.6 or newer and our runtime dependencies, which may come by PYTHONPATH; no installation. Each check is a process of its
own, with a deadline. The file of results is complete after each check; the logs of failed ones lie beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a plain checkout will do

from benchmarks.gpu.place import Figures, Place, SkippedError
from benchmarks.gpu.table import CHECKS, Check, Verdict, judge
from benchmarks.rounds import surroundings
from ddp_hpc.base import processes
from ddp_hpc.base.durable import replace_text

RESULTS = Path(__file__).resolve().parent / "results"
WHOLE_S = 280.0
"""What a part may take in all; what has not begun by then is not begun, and what still runs is ended."""
FIGURES = "figures.json"


def run_here(check: Check, place: Place) -> int:
    """Run one check in this process, and write its figures; end all that it has started."""
    processes.adopt_orphans()  # so that also what a run leaves in the background stays below this process
    try:
        content: dict[str, Any] = {"figures": check.run(place)}
    except SkippedError as skipped:
        content = {"skipped": str(skipped)}
    except Exception as error:  # noqa: BLE001  whatever it dies of, the check has failed
        traceback.print_exc()
        content = {"error": f"{type(error).__name__}: {error}"}
    replace_text(place.path / FIGURES, json.dumps(content, default=str), durable=False)
    while left := psutil.Process().children(recursive=True):
        processes.kill(one.pid for one in left)
        processes.reap_children()
    return 0


def verdict_of(check: Check, content: dict[str, Any] | None, device: str) -> tuple[Verdict, Figures]:
    """Judge what a check has written; one that has written nothing has failed."""
    if content is None:
        return Verdict("failed", "it ended without figures: see its log"), {}
    if "skipped" in content:
        return Verdict("skipped", content["skipped"]), {}
    if "figures" not in content:
        return Verdict("failed", content["error"]), {}
    figures = content["figures"]
    return judge(check, {**figures, "device": device}), figures


class Runner:
    """Runs checks side by side, and keeps the file of results complete after each."""

    def __init__(self, arguments: argparse.Namespace, machine: dict[str, Any], folder: Path) -> None:
        self._arguments = arguments
        self._machine = machine
        self._folder = folder
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._records: list[dict[str, Any]] = []
        self._pids: set[int] = set()
        self._is_over = False

    def run(self, checks: Sequence[Check], *, whole_s: float, jobs: int) -> bool:
        """Run the checks, those that want the machine alone at the end; return whether none has failed."""
        end = time.monotonic() + whole_s
        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(lambda check: self._one(check, end), [one for one in checks if not one.is_alone]))
                for check in checks:
                    if check.is_alone:
                        self._one(check, end)
            except BaseException:
                self._is_over = True  # what waits in the pool does not begin
                processes.kill_all_below([*self._pids])
                raise
        return all(record["outcome"] != "failed" for record in self._records)

    def _one(self, check: Check, end: float) -> None:
        began = time.monotonic()
        place = Place(
            self._folder / re.sub(r"[^a-z0-9]+", "-", check.name.lower()), self._arguments.device, self._arguments.tiny
        )
        if check.on == "cuda" and not place.has_cuda:
            verdict, figures = Verdict("skipped", "needs a GPU"), Figures()
        elif self._is_over or began >= end:
            verdict, figures = Verdict("failed", "not begun: the time was over"), {}
        else:
            verdict, figures = self._judged(check, place, limit_s=min(check.limit_s, end - began))
        record = {"check": check.name, "family": check.family, "part": check.part, **asdict(verdict)}
        # A log's text says where it was made; it is kept where it says what is wrong.
        kept = {name: one for name, one in figures.items() if verdict.outcome == "failed" or not isinstance(one, str)}
        record |= {"seconds": round(time.monotonic() - began, 1), "figures": kept}
        with self._lock:
            self._records.append(record)
            content = {**self._machine, "seconds": round(time.monotonic() - self._began, 1), "checks": self._records}
            replace_text(self._arguments.output, json.dumps(content, indent=1) + "\n")
            missed = [goal for goal, is_met in verdict.goals.items() if not is_met]
            more = f"  (goal missed: {'; '.join(missed)})" if missed else ""
            print(
                f"{verdict.outcome:8s}{record['seconds']:6.1f} s  {check.name}: {verdict.reason[:300]}{more}",
                flush=True,
            )

    def _judged(self, check: Check, place: Place, *, limit_s: float) -> tuple[Verdict, Figures]:
        """Run a check in a process of its own; end it, and all that it has started, when its time is over."""
        place.path.mkdir()
        log = place.path / "check.log"
        argv = [sys.executable, __file__, "--here", check.name, "--folder", str(place.path), "--device", place.device]
        with log.open("w") as output:
            child = subprocess.Popen(
                [*argv, *(["--tiny"] if place.tiny else [])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self._pids.add(child.pid)
            try:
                child.wait(limit_s)
            except subprocess.TimeoutExpired:
                output.write(f"\nended after {limit_s:.0f} s\n")
            finally:
                self._pids.discard(child.pid)
                processes.kill_all_below([child.pid])
                child.wait()
        path = place.path / FIGURES
        verdict, figures = verdict_of(check, json.loads(path.read_text()) if path.exists() else None, place.device)
        if verdict.outcome == "failed":
            shutil.copy(log, self._arguments.output.with_name(f"{self._arguments.output.stem}.{place.path.name}.log"))
        return verdict, figures


def machine_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    found = {
        **surroundings(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "tiny": arguments.tiny,
        "device": "cpu",
    }
    if arguments.device == "cpu":
        return found
    # Asked in another process: the one that waits for checks should hold no memory of the GPU.
    code = "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps({'device': p.name, 'device_memory_gib': round(p.total_memory / 2**30, 1), 'cuda': torch.version.cuda, 'cudnn': torch.backends.cudnn.version(), 'nccl': '.'.join(map(str, torch.cuda.nccl.version()))}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"error: `--device` is cuda, but PyTorch sees no GPU here: {done.stderr.strip().splitlines()[-1]}. Run this on a "
            "machine with one, or prove the checks themselves with `--device cpu --tiny`."
        )
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = (
        subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() if shutil.which(ask[0]) else ""
    )
    return {**found, **json.loads(done.stdout), "driver": driver}


def chosen(arguments: argparse.Namespace) -> list[Check]:
    """Return the checks that are asked for, in the table's order."""
    if arguments.only:
        return [check for check in CHECKS if {check.name, check.family} & {*arguments.only}]
    parts = [arguments.part] if arguments.part else [1, 2]
    return [check for check in CHECKS if check.part in parts]


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; refuse what cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", type=int, choices=(1, 2), help="1: what could be wrong; 2: what is slow; default: both"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these checks or families (see --list)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes that go, to prove the checks")
    parser.add_argument(
        "--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="checks at the same time"
    )
    parser.add_argument("--whole-s", type=float, default=WHOLE_S, help="seconds for a part (default: %(default)g)")
    parser.add_argument("--output", type=Path, help="the JSON file; default: benchmarks/results/gpu_check-DEVICE.json")
    parser.add_argument("--list", action="store_true", help="print the checks and run none")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    known = {name for check in CHECKS for name in (check.name, check.family)}
    if unknown := [name for name in arguments.only if name not in known]:
        parser.error(f"`--only` is {unknown[0]!r}, but must be a check or a family: {', '.join(sorted(known))}")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("`--device` is cpu, but the full sizes are for a GPU. Add `--tiny`.")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; return 1 if a check has failed."""
    arguments = parsed(argv)
    if arguments.list:
        print("\n".join(f"part {check.part}  {check.family:10s}  {check.name}" for check in CHECKS))
        return 0
    if arguments.here:
        (check,) = (check for check in CHECKS if check.name == arguments.here)
        return run_here(check, Place(arguments.folder, arguments.device, arguments.tiny))
    machine = machine_of(arguments)
    slug = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    arguments.output = (
        arguments.output or RESULTS / f"gpu_check-{slug}{'-tiny' if arguments.tiny else ''}.json"
    ).absolute()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    checks = chosen(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder,
        processes.signals_as_ctrl_c(),
    ):
        runner = Runner(arguments, machine, Path(folder))
        is_ok = [
            runner.run(wanted, whole_s=arguments.whole_s, jobs=arguments.jobs)
            for part in (1, 2)
            if (wanted := [check for check in checks if check.part == part])
        ]
    print(f"{machine['device']}; written to {arguments.output}")
    return int(not all(is_ok))


if __name__ == "__main__":
    sys.exit(main())
