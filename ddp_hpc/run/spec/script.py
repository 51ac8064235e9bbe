"""A script of the user's own: the command that each worker runs, and what launching has to know of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from ddp_hpc.run.spec.checked import CheckedSpec, require, require_command

_PYTHON_NAME_PATTERN = re.compile(r"python(?:3(?:\.\d+)?)?")
_OPTION_CLUSTER_PATTERN = re.compile(r"-(?P<flags>[^-cmWX][^cmWX]*)?(?P<last>[cmWX])(?P<value>.*)", re.DOTALL)
"""Options of Python in one word, of which the last has a value; where nothing follows it, the next word is the value."""
_LONG_OPTION_WITH_VALUE = "--check-hash-based-pycs"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a command starts."""

    words: tuple[str, ...]
    python: str | None = None
    """The command's first word, where it is a Python that starts a script or a module."""
    options: tuple[str, ...] = ()
    """Options of that Python itself (`-u`)."""
    script: str | None = None
    """The script's path, as the user wrote it."""
    module: str | None = None
    """The module's dotted name (`python -m NAME`)."""
    arguments: tuple[str, ...] = ()
    """The arguments of the script or the program."""

    @property
    def name(self) -> str:
        """What to call it: `train` for `train.py` and for `-m train`."""
        if self.module is not None:
            return self.module.removesuffix(".__main__").rpartition(".")[2]
        return PurePath(self.script or self.words[0]).stem


def parse_program(command: Sequence[str]) -> Program:
    """Read a command as a shell would: `python [options] script.py ...`, `python -m module ...`, or another program."""
    words = tuple(command)
    other = Program(words=words, arguments=words[1:])
    if _PYTHON_NAME_PATTERN.fullmatch(PurePath(words[0]).name) is None:
        return other
    number = 1
    while number < len(words):
        word = words[number]
        if word in {"-", "--"}:
            return other
        if not word.startswith("-"):
            options, arguments = words[1:number], words[number + 1 :]
            return Program(words=words, python=words[0], options=options, script=word, arguments=arguments)
        cluster = _OPTION_CLUSTER_PATTERN.fullmatch(word)
        takes_next = word == _LONG_OPTION_WITH_VALUE if cluster is None else not cluster["value"]
        following = number + (2 if takes_next else 1)
        if cluster is not None and cluster["last"] in "cm":
            if cluster["last"] == "c" or following > len(words):
                return other
            flags = (f"-{cluster['flags']}",) if cluster["flags"] else ()
            return Program(
                words=words,
                python=words[0],
                options=(*words[1:number], *flags),
                module=cluster["value"] or words[number + 1],
                arguments=words[following:],
            )
        number = following
    return other


@dataclass(frozen=True, kw_only=True)
class ScriptSpec(CheckedSpec, section="script", above_zero=("stop_within_s",)):
    """Your own training script, which the workers run as it is, in place of a recipe."""

    command: tuple[str, ...] = ()
    """The command of each worker, one item a word (`[python, train.py, --lr, '0.1']`); `ddp-hpc submit -- python train.py` sets it.
    Unset: the run trains a recipe."""
    start: Literal["fork", "exec"] = "fork"
    """How a Python script starts: `fork`, in a process that has imported PyTorch already, which is faster; `exec`, as a new
    process. Other programs always start as new processes."""
    stop_signal: Literal["TERM", "USR1", "USR2"] = "TERM"
    """The signal that asks the script to save its state and exit; its rank processes get it, and no other process."""
    stop_within_s: int = 100
    """How long the script may run on after that signal, in seconds, before it is killed. If it needs longer, raise `slurm.signal_lead_s`
    as well: a job is asked to stop so long before its time limit."""
    resume_exit_codes: tuple[int, ...] = (99,)
    """Exit codes by which the script says that it has saved its state and that there is more to do."""
    progress: str | None = None
    """The files that the script saves its state to, as a pattern (`checkpoints/*.pt`). An attempt that wrote one of them has made
    progress, and failures count only until the next progress (`restart.max_no_progress`). Unset: what `ddp_hpc.attach` commits counts."""
    preload: tuple[str, ...] = ()
    """Modules to import before the workers are forked, besides PyTorch (`torchvision`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_command("script", self.command)
        require(
            re.search(r"^['\"]|[{}]|://", self.progress or "") is None,
            f"`script.progress` is {self.progress!r}, which matches no file: it is a path with `*`, `**`, `?` and `[...]`, without quotes, braces or an "
            "address. Write `*` for what differs from save to save.",
        )
        for code in self.resume_exit_codes:
            require(
                1 <= code <= _MOST_EXIT_CODE,
                f"`script.resume_exit_codes` has {code}, but an exit code that means `continue` is between 1 and {_MOST_EXIT_CODE}.",
            )
        for module in self.preload:
            require(
                all(part.isidentifier() for part in module.split(".")),
                f"`script.preload` has {module!r}, but it must name modules, such as `torchvision`.",
            )

    @property
    def is_set(self) -> bool:
        """Whether the run's workers run a script."""
        return bool(self.command)

    @property
    def program(self) -> Program:
        return parse_program(self.command)


_MOST_EXIT_CODE = 255


@dataclass(frozen=True, kw_only=True)
class ScriptedSpec(CheckedSpec):
    """What the workers of a script read."""

    script: ScriptSpec = field(default_factory=ScriptSpec)
