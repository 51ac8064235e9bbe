"""Finds the exceptions in Python's printed tracebacks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from traceback import FrameSummary

from ddp_hpc.watch.why.signatures import match_exception

_HEADER = re.compile(r"(?P<before>(?:.*\W)?)Traceback \(most recent call last\)?:?$")
"""Before it, there may be an indentation, a logger's time and level, or a progress bar; rich's narrow boxes cut its end off."""
_FRAMES = (
    re.compile(r'\s*(?:> )?File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$'),  # Python, loguru
    re.compile(r"\s(?P<file>\S+):(?P<line>\d+)(?: in (?P<function>.+))?$"),  # rich, Typer
)
_FOLDED = re.compile(r"\s/\S{0,4000}$")
"""The first part of a path that is too long for rich's box."""
_FINAL = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: .*|:)?$", re.DOTALL)
_CHAIN_PATTERN = re.compile(r"(?:During handling of the above exception|The above exception was the direct cause)")
_MOST_LINES_OF_MESSAGE = 12
_NOISE = re.compile(
    r"$|\s|\^|GLHF|frame #\d+|Exception raised from|nccl\w+(?:Error|Usage)?: |Last error:|Cuda failure|CUDA kernel errors|For debugging|Compile with"
    r"|Device-side assert|If reserved but|Duplicate GPU|terminate called|  what\(\)|Fatal Python error|\[[WEI]\d*[ \]]|\[[WEI] |Error in sys.excepthook"
    r"|/\S+: UserWarning|\S+\.py:\d+: \w*Warning: |\s+warnings\.warn|srun: |slurmstepd: |Exception ignored in|Timeout \(|(?:Current t|T)hread 0x|wandb: |note: |Aborted|Killed|.*\d%\|"
)
"""Lines that follow the last exception of a process although it has ended the process, or made it wait until a watchdog dumped its stacks."""
NEAR_END_LINES = 60
"""So many lines at the end of a log may hold the reason of an end."""
_LAUNCHER_PATTERN = re.compile(r"(?:[\w.]+\.)?(?:CalledProcessError|ChildFailedError):")
"""What a program raises because one that it has started failed, whose own exception stands before."""
TOP_FUNCTIONS = {"", "<module>", "_run_module_as_main"}
"""Functions in which the traceback of an exception begins that no function caught; "" for one that is not known."""
_ADVICE_AT_EXIT = re.compile(r"HYDRA_FULL_ERROR=1|for a (?:complete|full) (?:stack ?trace|traceback)", re.IGNORECASE)
"""The last line of a framework that catches an exception, prints it, and exits."""
_LIBRARY_PATHS = ("/site-packages/", "/dist-packages/", "<frozen ", "/ddp_hpc/")
_STDLIB_PATTERN = re.compile(r"/lib(?:64)?/python3\.\d+/")


def is_users(frame: FrameSummary) -> bool:
    """Tell whether a frame is of the user's code."""
    is_installed = any(part in frame.filename for part in _LIBRARY_PATHS) or _STDLIB_PATTERN.search(frame.filename)
    return not is_installed and not frame.filename.startswith("<")


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An exception with its traceback."""

    text: str
    """`Type: message`, with the message's further lines."""
    frames: Sequence[FrameSummary]
    """The name of a function is empty where it is not known."""
    at: int
    """Number of the line of `text` among the lines that were given."""
    is_linked: bool = False
    """Whether another one was raised because of it, or while it was handled."""

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def is_in_data(self) -> bool:
        """Whether a data set raised it, while a loader fetched a sample."""
        fetch = [number for number, frame in enumerate(self.frames) if "torch/utils/data/" in frame.filename]
        users = filter(is_users, self.frames[fetch[-1] :] if fetch else ())
        return any(frame.name in {"__getitem__", "__getitems__", "__iter__", "__next__"} for frame in users)


def tracebacks(lines: Sequence[str]) -> list[Raised]:
    """Return the exceptions in these lines, in the order in which they were printed."""
    found: list[Raised] = []
    number = 0
    while number < len(lines):
        header = _HEADER.match(lines[number])
        number += 1
        if header is None:
            if _CHAIN_PATTERN.match(lines[number - 1].strip()) and found:
                found[-1] = replace(found[-1], is_linked=True)
            continue
        raised = _read_error(lines, number, header["before"])
        if raised is not None:
            found.append(raised)
            number = raised.at + 1
    return found


def _read_error(lines: Sequence[str], start: int, before: str) -> Raised | None:
    """Read a traceback from the line below its header on; what stands `before` that may stand before each line."""
    frames: list[FrameSummary] = []
    folded = ""
    for number in range(start, len(lines)):
        line = lines[number].removeprefix(before)
        line = folded + line.lstrip() if folded and line.startswith(" ") else line
        frame = next((found for form in _FRAMES if (found := form.match(line))), None)
        folded = line if frame is None and _FOLDED.match(line) else ""
        if frame is not None:
            frames.append(FrameSummary(frame["file"], int(frame["line"]), frame["function"] or "", lookup_line=False))
        elif not line.startswith((" ", "\t")) and line:
            if _FINAL.match(line) is None or not frames:
                return None
            return Raised(text="\n".join([line, *_further(lines, number + 1)]), frames=frames, at=number)
    return None


def _further(lines: Sequence[str], start: int) -> list[str]:
    """Return the further lines of a message: up to an empty line or another traceback."""
    taken: list[str] = []
    for line in lines[start : start + _MOST_LINES_OF_MESSAGE]:
        if not line or _HEADER.match(line):
            break
        taken.append(line)
    return taken


def uncaught(lines: Sequence[str], *, num_more: int = 0) -> Raised | None:
    """Return the exception that ended the program which printed these lines; None where more than `num_more` lines show that it went on.

    What started the program may print more, and raise an exception that only says that the program has failed.
    """
    found = tracebacks(lines)
    more = [line for line in lines[found[-1].at + 1 :] if not _NOISE.match(line)] if found else []
    if not found or (len(more) > num_more and not _ADVICE_AT_EXIT.search(more[-1])):
        return None
    if not _LAUNCHER_PATTERN.match(found[-1].text):
        return found[-1]
    near = [one for one in reversed(found) if one.at > found[-1].at - NEAR_END_LINES]
    near = [one for one in near if not _LAUNCHER_PATTERN.match(one.text)]
    causes = (one for one in near if (match := match_exception(one.text)) is None or match.role != "cascade")
    return next(causes, (near or found[-1:])[0])
