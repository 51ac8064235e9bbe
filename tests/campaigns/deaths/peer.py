"""Asks NVIDIA's restart agent (nvidia-resiliency-ext) about the same logs, and says which of its answers are right.

It is not installed with ddp_hpc: `Peer` takes the Python of an environment that has its requirements, and where its source lies.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.deaths.table import Death

_ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from nvidia_resiliency_ext.attribution.restart_agent import RestartAgent, RestartAgentRequest
for number, path in enumerate(sys.stdin.read().split()):
    said = RestartAgent().run(RestartAgentRequest(log_path=path, job_id=f"job-{number}", cycle_id=1)).result.to_payload()
    first = said["primary_failure"] or {}
    quotes = [one["quote"] for one in said["evidence"] if "primary_failure" in one["supports"]]
    answer = {"failure": first.get("failure_class"), "rank": first.get("rank"), "decision": said["decision"]}
    print(json.dumps({**answer, "quote": (quotes or [""])[0]}), flush=True)
"""
ABSTAINED = ""
_EXCEPTIONS = frozenset(
    {
        "user-exception",
        "import",
        "disk-full",
        "quota",
        "host-memory",
        "port",
        "dns",
        "data",
        "nan",
        "wrong-device",
        "driver",
    }
    | {
        "shared-memory",
        "stale-mount",
        "gpu-memory",
        "gpu-fault",
        "device-assert",
        "nccl-network",
        "configuration",
        "ranks-missing",
    }
)
"""Of ours, where Python raised an exception."""
MEANS: Mapping[str, frozenset[str]] = {
    "observed_exception": _EXCEPTIONS,
    "configuration_validation_failure": frozenset({"configuration", "user-exception"}),
    "argument_validation_failure": frozenset({"configuration", "user-exception", "gpu-fault"}),
    "artifact_or_path_not_found": frozenset({"data", "import", "launch-failed", "stale-mount", "image"}),
    "checkpoint_compatibility_mismatch": frozenset({"user-exception"}),
    "shape_mismatch": frozenset({"user-exception"}),
    "filesystem_permission_denied": frozenset({"data", "launch-failed", "user-exception"}),
    "cuda_oom": frozenset({"gpu-memory"}),
    "nan_or_inf": frozenset({"nan"}),
    "bad_token_or_window": frozenset({"data"}),
    "framework_crash": frozenset({"native-crash"}),
    "linux_oom_kill_confirmation": frozenset({"host-memory"}),
    "observed_distributed_operation_timeout": frozenset({"collective-timeout", "hang", "hang-behind"}),
    "nccl_cascade": frozenset({"peer-gone", "nccl-network"}),
    "cuda_previous_error_cascade": frozenset({"gpu-fault", "device-assert"}),
    "gpu_hardware_fault": frozenset({"gpu-fault"}),
    "peer_gpu_memory_access_failure": frozenset({"gpu-fault"}),
    "infra_policy_event": frozenset({"preempted", "node-failed"}),
    "time_limit": frozenset({"time-limit"}),
    "user_cancelled": frozenset({"cancelled"}),
}
"""Its class -> those of ours with which it is not wrong."""
_LOST = re.compile(
    r"gloo/|onnection (?:closed|reset) by peer|Broken pipe|DistNetworkError|ChildFailedError|Socket closed"
)
"""An exception that says that another rank has ended, or that one has."""
_KILLED = re.compile(r"signal \d|SIG[A-Z]{3}|[Kk]illed|exit(?:ed)? (?:with )?code")


@dataclass(frozen=True, kw_only=True)
class Said:
    """What it answered about one death."""

    failure: str
    quote: str
    rank: str
    decision: str

    @property
    def quotes_lost_connection(self) -> bool:
        return _LOST.search(self.quote) is not None

    def grade(self, death: Death) -> str:
        """Return right, wrong or abstained; every answer that is not wrong is right."""
        if not self.failure:
            return "abstained"
        if self.failure == "observed_exception" and self.quotes_lost_connection:
            return "wrong"  # it follows from another rank's end
        if self.failure == "observed_exception" and death.failure in {"native-crash", "killed", "signal", "exit-code"}:
            return "right" if _KILLED.search(self.quote) else "wrong"
        return "right" if MEANS.get(self.failure, frozenset()) & death.true else "wrong"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An installed or checked-out nvidia-resiliency-ext."""

    python: Path
    source: Path

    def ask(self, logs: Sequence[Path]) -> list[Said]:
        """Return its deterministic answer to each log, as the first failure of its job."""
        words = [str(self.python), "-c", _ASK, str(self.source)]
        done = subprocess.run(words, input="\n".join(map(str, logs)), capture_output=True, text=True, check=True)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        return [Said(**{key: value or "" for key, value in one.items()}) for one in answers]


def one_log(death: Death, run: Path, target: Path) -> Path:
    """Write one log of a run: each rank's, the one that ended first before the others, and the job's; without the death's name.

    A line has its rank in front, as PyTorch and `torchrun` write it.
    """
    ranks = sorted((run / "logs" / "attempt-0").glob("rank-*.log"), key=lambda path: path.stat().st_mtime)
    lines = []
    for path in ranks:
        label = f"[rank{path.stem.partition('-')[2]}]: "
        of_rank = path.read_text(errors="replace").splitlines()
        lines += [line if line.startswith("[rank") else label + line for line in of_rank]
    console = run / "logs" / "console.log"
    lines += console.read_text(errors="replace").splitlines() if console.exists() else []
    # Its name has a word such as `segfault`, which stands in paths and would be taken for the cause.
    text = "\n".join(lines).replace(death.name, "run").replace(f" {death.how} ", " HOW ")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")
    return target
