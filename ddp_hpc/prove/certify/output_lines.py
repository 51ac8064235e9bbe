"""What the lines say that a training script prints: its steps, epochs, losses and evaluations. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf"
_SETTING_PREFIXES = (
    *("start", "resume", "begin", "end", "stop", "max", "min", "warmup", "decay", "save", "last", "best", "accum"),
)
_NO_SETTING = "".join(rf"(?<!{word}[_-])" for word in _SETTING_PREFIXES)
"""`start_epoch=0` among the arguments that a script prints says nothing of where it is."""
_PHASE = r"(?:\(train\))?"
"""MMEngine prints `Epoch(train) [1][10/50]`; `Iter(val)` counts something else."""
_SEPARATOR_PATTERN = r"[\"']?\s*[:=#|]?\s*[\[(]?\s*[\"']?"
"""Also a quote before the number: the Trainer of Transformers 5 prints `'epoch': '0.5'`."""
_STEP = re.compile(
    rf"(?<![a-zA-Z]){_NO_SETTING}(?:(?:global[ _])?(?:step|iter|iteration|batch|it|update)|num_updates)\b{_PHASE}(?!\s*\[\d+:){_SEPARATOR_PATTERN}(\d+)(?!\d|\.\d*[1-9])",
    re.IGNORECASE,
)
_EPOCH = re.compile(
    # timm names the phase alone: `Train: 0 [  50/1251 (  4%)]`
    rf"(?<![a-zA-Z]){_NO_SETTING}(?:epoch\b{_PHASE}{_SEPARATOR_PATTERN}|train:\s*(?=\d+\s*\[\s*\d+/\d))(\d+(?:\.\d+)?)",
    re.IGNORECASE,
)
_LOSS = re.compile(rf"loss{_SEPARATOR_PATTERN}({_NUMBER})", re.IGNORECASE)
_EVAL = re.compile(
    r"(?<![a-zA-Z])(?:val|valid|validation|eval|evaluat\w*|test|accuracy|acc)(?![a-zA-Z])", re.IGNORECASE
)

_ANSI_PATTERN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and moves of the cursor
_FILE_PATTERN = re.compile(r"(?<![\w./=-])[\w./=-]+\.(?:ckpt|pth?|safetensors)\b")
"""The name of a file, whose `epoch=3` and `step=40` do not say where the training is."""
_RESUME_PATTERN = re.compile(
    r"(?<![a-zA-Z])(?:resum\w*|restor\w*|(?:re)?load(?:ed|ing)?|continu\w*)(?![a-zA-Z])", re.IGNORECASE
)

Position = tuple[float, ...]
"""Where a line says that the training is: its step, or its epoch; with both where steps begin anew in each epoch."""


@dataclass(frozen=True, kw_only=True)
class PrintedLine:
    """One line that rank zero printed."""

    at: float = 0.0
    """When it was seen, in seconds since the run began."""
    step: int | None = None
    epoch: float | None = None
    """Also a part of one: the Trainer of Transformers prints `'epoch': 0.5`."""
    loss: str | None = None
    """As `repr` writes the number: `nan` equals `nan` so."""
    is_evaluation: bool = False
    is_mention: bool = False
    """Whether it tells where the training goes on (`resumed at step 50`), and not that this is done."""


def parse(text: str, at: float = 0.0, last_epoch: float | None = None) -> PrintedLine:
    """Read one line; a step whose line names no epoch gets the last one, as from a header above the steps."""
    text = _ANSI_PATTERN.sub("", text)
    step, epoch, loss = (pattern.search(_FILE_PATTERN.sub("", text)) for pattern in (_STEP, _EPOCH, _LOSS))
    return PrintedLine(
        at=at,
        step=int(step[1]) if step else None,
        epoch=(float if "." in epoch[1] else int)(epoch[1]) if epoch else (last_epoch if step else None),
        loss=repr(float(loss[1])) if loss else None,
        is_evaluation=_EVAL.search(text) is not None and "ddp_hpc." not in text,  # a logger of ours
        is_mention=loss is None and _RESUME_PATTERN.search(text) is not None,
    )


@dataclass(frozen=True)
class ProgressScale:
    """How a script's lines say where it is, as the undisturbed run shows."""

    unit: str = ""
    """`step` or `epoch`; empty where no line says either."""
    has_epochs: bool = False
    """Whether a position needs the epoch beside the step, because steps begin anew in each epoch."""
    stride: float = 1
    """How many steps, or which part of an epoch, lie between two lines."""

    def position(self, line: PrintedLine) -> Position | None:
        """Return where a line says that the training is; None where it does not say."""
        if self.unit == "epoch":
            return None if line.epoch is None else (line.epoch,)
        if self.unit != "step" or line.step is None:
            return None
        if not self.has_epochs:
            return (line.step,)
        return None if line.epoch is None else (line.epoch, line.step)


def scale_from_lines(lines: Iterable[PrintedLine]) -> ProgressScale:
    """Return how these lines say where the training is."""
    lines = list(lines)
    steps = [line.step for line in lines if line.step is not None]
    epochs = {line.epoch for line in lines if line.epoch is not None}
    places = {(line.epoch, line.step) for line in lines if line.step is not None}
    # Fewer places than epochs are no steps: `print_iter=4` among the arguments that a script prints.
    has_steps = len(places) >= max(1, len(epochs))
    numbers = steps if has_steps else sorted(epochs)
    stride = median([later - earlier for earlier, later in pairwise(numbers) if later > earlier] or [1])
    if has_steps:
        restarts = any(later < earlier for earlier, later in pairwise(steps))
        return ProgressScale("step", has_epochs=restarts, stride=max(1, round(stride)))
    are_parts = any(not float(one).is_integer() for one in epochs)
    return ProgressScale("epoch" if epochs else "", stride=round(stride, 4) if are_parts else 1)


def positions(lines: Sequence[PrintedLine], scale: ProgressScale) -> list[Position]:
    """Return the positions in the order of the lines, each once."""
    found = (scale.position(line) for line in lines)
    return list(dict.fromkeys(one for one in found if one is not None))


def losses(lines: Iterable[PrintedLine], scale: ProgressScale) -> dict[Position, str]:
    """Return the first loss that was printed at each position, of an evaluation only where no other was."""
    found: dict[Position, str] = {}
    for line in sorted(lines, key=lambda line: line.is_evaluation):
        position = scale.position(line)
        if position is not None and line.loss is not None:
            found.setdefault(position, line.loss)
    return found
