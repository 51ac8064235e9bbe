"""Give every reader of others' texts what nobody means to write: it reads it, or refuses it by an error of ours.

    python -m tests.campaigns.fuzz [--cases 200000]    # writes docs/results/fuzz.json

Seven of eight cases are answers of Slurm, configurations, headers of tensors and logs: real ones, edited at random. The others are
records of a run that are edited at random, of which `list`, `status`, `why` and `report` read everything. A text in which one part
is there 10,000 and 40,000 times shows whether a reader's time grows faster than its text.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddp_hpc.base import discretion
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.mounts import Mount
from ddp_hpc.base.slurm_times import parse_minutes, parse_seconds, parse_time
from ddp_hpc.cli import main as command
from ddp_hpc.cluster.slurm import framing, queries
from ddp_hpc.cluster.slurm.allocation import read_allocation
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist
from ddp_hpc.run.checkpoints.checkpoint_store import parse_manifest
from ddp_hpc.run.checkpoints.shards import parse_header
from ddp_hpc.run.config.resolve import load_resolved, resolve
from ddp_hpc.run.config.yaml_text import read_yaml
from ddp_hpc.watch.diagnose.doctor import quota
from ddp_hpc.watch.why import exceptions, lines, of_rank
from tests.campaigns.command_line import parser_of
from tests.campaigns.written import RESULTS, add_row, stamp
from tests.made_run import make_run
from tests.strange.test_odd_values import COMMANDS, add_everything, records_of
from tests.unit import test_slurm_queries as of_slurm

RESULT = RESULTS / "fuzz.json"
GROWN = (10_000, 40_000)
SLOW_S = 0.5
"""CPU seconds of the larger text below which its growth is not asked about."""
MOST_GROWTH = 8.0
"""How much longer a text of four times the length may take; twice as much as in linear time."""

MOST_BYTES = 4 << 30
"""Of memory, for all: a reader that needs more fails."""

LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ada/train.py", line 7, in <module>
[rank1]:     main(token="hf_abcdefghijklmnop")
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB
\x1b[31mslurmstepd: error: *** STEP 12.0 ON node1 CANCELLED AT 2026-11-21T07:37:30 DUE TO TIME LIMIT ***\x1b[0m
srun: error: node[1-2]: tasks 0-3: Killed (core dumped)
 10%|#         | 1/10\r 20%|##        | 2/10 https://ada:secret@host/x?key=abc
[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)
"""
CONFIG = yaml.safe_dump(
    {
        "name": "odd",
        "runs_dir": "runs",
        "resources": {"num_nodes": 2, "workers_per_node": 4, "time_min": 60},
        "recipe": {"target": "digits", "args": {"lr": 0.1}},
        "slurm": {"partition": "batch", "extra": {"constraint": "a100"}, "setup": ["module load cuda"]},
        "train": {"max_steps": 100, "precision": "bf16"},
    }
)
ALLOCATION = (
    "SLURM_JOB_ID=12\nSLURM_JOB_NODELIST=node[1-2,4]\nSLURM_TASKS_PER_NODE=4(x2),1\nSLURM_RESTART_COUNT=1\n"
    "SLURM_CPUS_PER_TASK=2\nSLURM_STEP_ID=0\nSLURM_PROCID=1\nSLURM_LOCALID=1\nSLURM_NODEID=0\n"
    "SLURM_STEP_NODELIST=node[1-2]\nSLURM_STEP_TASKS_PER_NODE=4(x2)\nSLURM_JOB_END_TIME=1763700000\n"
)
HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "bias": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
)
PARTS = ("\n", "\r", "\0", "\x1b[", "|", "\x1f", "\x1e", "=", ":", ",", "[", "]", "{", "}", '"', "'", "-", "&a ", "*a", "!!python/name:os.system ",
         "${HOME}", "9" * 400, "9" * 5000, "-1", "1e999", "nan", "null", "true", "é", "\u2028", "\udc80", "  ", "\t", "(null)", "node[0-99999999]",
         "Traceback (most recent call last):\n", "Error: ", "key=")  # fmt: skip


def in_environ(text: str) -> object:
    environ = dict(line.split("=", 1) for line in text.split("\n") if "=" in line)
    return read_allocation(environ)


def in_header(text: str) -> object:
    table = text.encode("utf-8", "surrogateescape")
    header = len(table).to_bytes(8, "little") + table
    return parse_header(Path("model.safetensors"), header, len(header) + 32)


def in_file(text: str) -> object:
    path = Path("odd.yaml")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return resolve(path, [], {}), load_resolved(path)


def in_log(text: str) -> object:
    path = Path("odd.log")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    found = lines.tail(path)
    discretion.escape_controls(discretion.mask_secrets(text))
    return of_rank.matches_in(found), exceptions.tracebacks([line.text for line in found])


READERS: Mapping[str, tuple[Sequence[str], Callable[[str], object]]] = {
    "squeue": ((of_slurm.QUEUE,), queries.parse_queue),
    "scontrol show job": ((of_slurm.JOB, of_slurm.PENDING_JOB), queries.parse_job),
    "sacct": ((of_slurm.ACCOUNTING,), queries.parse_accounting),
    "partitions": ((of_slurm.PARTITIONS,), queries.parse_partitions),
    "scontrol show config": ((of_slurm.CONFIG,), queries.parse_config),
    "sinfo shapes": (
        ("NodeName=n1 CPUTot=4 RealMemory=1000 Gres=gpu:a100:4 Partitions=gpu\n",),
        queries.parse_node_shapes,
    ),
    "sacctmgr": (("lab||high,low|normal\n",), queries.parse_associations),
    "qos": (("high|low|requeue|00:01:00\n",), queries.parse_qos),
    "nodes": (("node1\x1fidle\x1fnone\x1e\nnode2\x1fdrained\x1fbad disk\x1e\n",), queries.parse_nodes),
    "steps": (("12.0\n12.1\n12.batch\n",), queries.parse_steps),
    "sbatch": (("12;cluster\n", "Submitted batch job 12\n"), queries.parse_submitted),
    "sbatch --test-only": ((of_slurm.TEST_ONLY,), lambda text: queries.parse_test_only(0, text)),
    "scontrol ping": (("Slurmctld(primary) at head is UP\n",), queries.parse_ping),
    "times": (
        ("1-00:00:48", "2026-11-21T07:27:30"),
        lambda text: (parse_seconds(text), parse_minutes(text), parse_time(text)),
    ),
    "host lists": (("node[1-2,07-09],gpu-a[0-3]-[1-2]x",), expand_hostlist),
    "environment of a job": ((ALLOCATION,), in_environ),
    "answers of nodes": (
        (framing.framed({"a": [1, 2.5, "b" * 200]}, node="node1", mark="m"),),
        lambda text: framing.read_answers(text, "m"),
    ),
    "quota": (
        ("/dev/sda1 5000000 0 5000000 0 10 0 100 0\n",),
        lambda text: quota.parse(text, Mount(point="/home", fs_type="nfs", source="/dev/sda1")),
    ),
    "YAML": ((CONFIG,), lambda text: read_yaml(text, "odd.yaml")),
    "configuration": ((CONFIG,), in_file),
    "command line": (("train.max_steps=5", "slurm.setup=[a, b]"), lambda text: resolve(None, [text], {})),
    "header of tensors": ((HEADER,), in_header),
    "manifest": (
        ('{"content":{"format":1,"step":3,"shards":[]},"sha256":"00"}',),
        lambda text: parse_manifest(text.encode("utf-8", "surrogateescape"), Path("step-3")),
    ),
    "log": ((LOG,), in_log),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 where a reader fails in another way than by an error of ours, or where its time grows too fast."""
    parser = parser_of("tests.campaigns.fuzz", __doc__)
    parser.add_argument("--cases", type=int, default=200_000, metavar="N", help="how many, of all readers together")
    num_cases = parser.parse_args(argv).cases
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    began, began_at = time.process_time(), stamp()
    with tempfile.TemporaryDirectory(prefix="ddp_hpc-fuzz-") as folder:
        os.chdir(folder)
        of_records = num_cases // 8
        share = (num_cases - of_records) // len(READERS)
        failed: dict[str, str] = {}
        counts = {name: tried(failed, name, edited(texts), share, read) for name, (texts, read) in READERS.items()}
        growth = {name: grown for name in READERS if (grown := growth_of(*READERS[name])) > MOST_GROWTH}
        counts["records of a run"] = tried_records(failed, Path(folder) / "runs", of_records)
    row = {
        **began_at,
        "cases": counts,
        "failed": failed,
        "grow faster than their text": growth,
        "cpu_s": round(time.process_time() - began),
        "most_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    sys.stdout.write(json.dumps(row, indent=1) + "\n")
    if num_cases >= parser.get_default("cases"):
        add_row(RESULT, {"of": "all readers", **row}, key="of")
    return 1 if growth or failed else 0


def edited(texts: Sequence[str]) -> st.SearchStrategy[str]:
    """Return a strategy for these texts after up to six cuts, repetitions and insertions."""
    part = st.one_of(st.sampled_from(PARTS), st.text(max_size=8))
    edit = st.tuples(st.floats(0, 1), st.integers(0, 12), st.sampled_from((0, 1, 1, 2, 50)), part)
    return st.builds(_edited, st.sampled_from(texts), st.lists(edit, min_size=1, max_size=6))


def _edited(text: str, edits: Sequence[tuple[float, int, int, str]]) -> str:
    for where, length, times, part in edits:
        at = int(where * len(text))
        text = text[:at] + text[at : at + length] * times + part + text[at + length :]
    return text


def tried(
    failed: dict[str, str], name: str, strategy: st.SearchStrategy[Any], num_cases: int, read: Callable[[Any], object]
) -> int:
    """Return how many cases were read, or refused by an error of ours; put the smallest that fails into `failed`."""
    done = 0

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(case: Any) -> None:
        nonlocal done
        done += 1
        with contextlib.suppress(DdpHpcError):
            read(case)

    try:
        one()
    except Exception as error:  # noqa: BLE001  whatever a reader raises is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        failed[name] = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno}) {notes_of(error)}"
    return done


def notes_of(error: Exception) -> str:
    """Return the failing case, as hypothesis tells it."""
    return "".join(getattr(error, "__notes__", ()))


def growth_of(texts: Sequence[str], read: Callable[[str], object]) -> float:
    """Return how much longer the worst of the texts takes in which a part, or the text itself, is there four times as often."""

    def cpu_s(part: str, times: int) -> float:
        began = time.process_time()
        with contextlib.suppress(DdpHpcError):
            read(texts[0] + part * times + texts[0])
        return time.process_time() - began

    parts = [part for part in (*PARTS, "a", "a=", "1,", "a ") if len(part) < 50]
    slow = {part: cpu_s(part, GROWN[1]) for part in parts if cpu_s(part, GROWN[1]) > SLOW_S}
    return max((long_s / max(cpu_s(part, GROWN[0]), 0.01) for part, long_s in slow.items()), default=0.0)


def tried_records(failed: dict[str, str], runs: Path, num_cases: int) -> int:
    """Return how many edited records of a run all commands have read."""
    sound, run = make_run(runs, "sound"), make_run(runs, "odd")
    add_everything(run)
    os.environ["PATH"] = "/nonexistent"  # no Slurm, whatever this machine has
    whole = {path: path.read_bytes() for path in records_of(run)}

    def read(case: tuple[Path, str]) -> None:
        path, text = case
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        try:
            for words in COMMANDS:
                written = io.BytesIO()
                printed = io.TextIOWrapper(written, "utf-8", write_through=True)
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                    code = command([*words])
                said = written.getvalue().decode()
                assert code in {0, 1} or said.startswith("error: "), (words, path.name, said)
                assert words != ["list"] or sound.name in said, (words, path.name)
        finally:
            path.write_bytes(whole[path])

    paths = st.sampled_from(sorted(whole))
    cases = paths.flatmap(lambda path: st.tuples(st.just(path), edited([whole[path].decode()])))
    return tried(failed, "records of a run", cases, num_cases, read)


if __name__ == "__main__":
    sys.exit(main())
