"""Records of runs made by hand, for the pure parts of certify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_hpc.prove.certify.evidence import Baseline
from ddp_hpc.prove.certify.output_lines import PrintedLine, parse
from ddp_hpc.prove.certify.records import AttemptRecord, InjectedFault, RunRecord, Save
from ddp_hpc.prove.certify.saved_files import Contents

WHOLE = {
    "model.weight": "tensor FloatStorage [1] x",
    "optimizer.param_groups.0.lr": "0.1",
    "lr_scheduler.last_epoch": "10",
    "rng": "rng ByteStorage [5056] y",
}


def lines_of(first: int, last: int, *, loss: float = 1.0) -> tuple[PrintedLine, ...]:
    """Return the lines of some steps."""
    return tuple(
        parse(f"step {step} loss {loss / step:.6f}", float(step - first + 1)) for step in range(first, last + 1)
    )


def values(changed: Mapping[str, str] | None = None, without: str = "") -> Contents:
    kept = {path: text for path, text in WHOLE.items() if not without or not path.startswith(without)}
    return Contents(kind="values", values={**kept, **(changed or {})}, digest="d")


def text(*lines: str) -> Contents:
    return Contents(kind="text", lines=lines, digest=str(hash(lines)))


def undisturbed(saved: Contents | None = None, *, final: Mapping[str, Contents] | None = None) -> Baseline:
    """Return ten steps with a save after each second one."""
    saved = saved or values()
    saves = tuple(
        Save(path=f"step_{step}.pt", num_lines=step, at=float(step), contents=saved) for step in (2, 4, 6, 8, 10)
    )
    attempt = AttemptRecord(ending="finished", lines=lines_of(1, 10), saves=saves)
    record = RunRecord(outcome="finished", attempts=(attempt,), final=final or {"step_10.pt": saved}, seconds=10)
    return Baseline(record=record)


def faulty(
    first: Sequence[PrintedLine] = lines_of(1, 5),
    then: Sequence[PrintedLine] | None = lines_of(5, 10),
    *,
    final: Mapping[str, Contents] | None = None,
    attempt: Mapping[str, Any] | None = None,
    later: Mapping[str, Any] | None = None,
    **injected: Any,
) -> RunRecord:
    """Return a run in which a fault came after its fifth step, when it had saved its fourth, and that came back from there."""
    saves = tuple(Save(path=f"step_{step}.pt", num_lines=step, at=float(step)) for step in (2, 4))
    one = AttemptRecord(**{"ending": "failed", "lines": tuple(first), "saves": saves, **(attempt or {})})
    two = AttemptRecord(**{"ending": "finished", "lines": tuple(then or ()), **(later or {})})
    hit = {
        "attempt": 0,
        "at_line": len(first),
        "at": 5.0,
        "present": ("step_2.pt", "step_4.pt"),
        **injected,
    }
    attempts = (one,) if then is None else (one, two)
    outcome: Any = "finished" if attempts[-1].ending == "finished" else attempts[-1].ending
    return RunRecord(
        outcome=outcome, attempts=attempts, injected=InjectedFault(**hit), final=final or {"step_10.pt": values()}
    )
