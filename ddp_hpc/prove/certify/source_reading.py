"""What a script's source says about how it saves, stops and draws random numbers. It confirms what runs have shown. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.run.spec.script import Program

_SAVES = {"save", "save_checkpoint", "save_state", "save_file", "save_snapshot", "save_model"}
_DUMPERS = {"pickle", "cpickle", "joblib", "dill", "cloudpickle", "msgpack"}
"""Modules whose `dump` saves a state; that of `json` writes a note."""
_DRAWS = {
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "AlphaDropout",
    "dropout",
    "randn_like",
    "rand_like",
    "RandomCrop",
}
_SEEDS = {"manual_seed", "seed", "manual_seed_all", "set_seed", "seed_everything", "Random", "default_rng"}
_CLOCKS = {"time", "time_ns", "now", "getpid", "urandom", "monotonic", "perf_counter"}
_STATEFUL = {"Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "LBFGS", "SparseAdam"}


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """What was found, as `file:line` where a reader should look; empty where it was not found."""

    saving_handler: str = ""
    """A signal handler that saves."""
    saving_signals: frozenset[str] = frozenset()
    """Names of the signals of such a handler; `SIG*` where the source does not name one."""
    ignored_signals: frozenset[str] = frozenset()
    """Names of signals that the script ignores (SIG_IGN)."""
    handled_signals: frozenset[str] = frozenset()
    """Names of signals for which it sets a handler."""
    draws_random: str = ""
    """Dropout, or other random numbers within a step."""
    stateful_optimizer: str = ""
    """An optimizer that keeps moments."""
    lr_scheduler: str = ""
    seeded_by_clock: str = ""
    seeds: str = ""
    shuffles: str = ""
    """A loader or sampler that shuffles."""
    distributed_sampler: str = ""
    sets_epoch: str = ""
    loads_optimizer: str = ""
    loads_loosely: str = ""
    """`load_state_dict(..., strict=False)`, which takes a state with other names for an empty one."""
    sorts_names: str = ""
    """Names of files are sorted as text."""
    renames: str = ""
    """`os.replace`, `os.rename` or `Path.replace`."""
    appends: str = ""
    """A file is opened to append to it."""
    absolute_paths: frozenset[str] = frozenset()
    """Absolute paths that stand in the source."""
    saves: str = ""
    loads: str = ""


@dataclass
class _Finder:
    """Collects facts from the files of a script."""

    found: dict[str, str] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    handled: set[str] = field(default_factory=set)
    saving: set[str] = field(default_factory=set)
    absolute: set[str] = field(default_factory=set)

    def note(self, fact: str, file: Path, node: ast.AST) -> None:
        self.found.setdefault(fact, f"{file.name}:{getattr(node, 'lineno', 0)}")

    def read(self, file: Path, tree: ast.Module) -> None:
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self._call(file, node, functions)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_absolute(node.value):
                self.absolute.add(node.value)

    def _call(self, file: Path, node: ast.Call, functions: dict[str, ast.FunctionDef]) -> None:  # noqa: C901, PLR0912  a table
        name, owner = _name(node.func), _owner(node.func)
        words = {part.lower() for part in owner}
        if name == "signal" and len(node.args) == 2:
            self._handler(file, node, functions)
        if name in _DRAWS:
            self.note("draws_random", file, node)
        if name in _STATEFUL or (name == "SGD" and any(one.arg == "momentum" for one in node.keywords)):
            self.note("stateful_optimizer", file, node)
        if name.endswith("LR") or "lr_scheduler" in words:
            self.note("lr_scheduler", file, node)
        seeds = [one.value for one in node.keywords if one.arg in {"seed", "random_state"}] + (
            node.args if name in _SEEDS else []
        )
        if seeds:
            inner = {_name(one.func) for arg in seeds for one in ast.walk(arg) if isinstance(one, ast.Call)}
            self.note("seeded_by_clock" if inner & _CLOCKS else "seeds", file, node)
        if name in {"RandomSampler", "randperm", "shuffle", "permutation"} or _has_constant(
            node, "shuffle", value=True
        ):
            self.note("shuffles", file, node)
        if name == "DistributedSampler":
            self.note("distributed_sampler", file, node)
        if name == "set_epoch":
            self.note("sets_epoch", file, node)
        if name == "load_state_dict" and any("opt" in word for word in words):
            self.note("loads_optimizer", file, node)
        if name == "load_state_dict" and _has_constant(node, "strict", value=False):
            self.note("loads_loosely", file, node)
        if name in {"sorted", "sort", "max"} and _of_names(node):
            self.note("sorts_names", file, node)
        if (name == "replace" and len(node.args) <= 2 and ("os" in words or len(node.args) == 1)) or name == "rename":
            self.note("renames", file, node)
        if name == "open" and _is_appending(node):
            self.note("appends", file, node)
        if _is_save(node):
            self.note("saves", file, node)
        if name in {"load", "load_file", "load_checkpoint"}:
            self.note("loads", file, node)

    def _handler(self, file: Path, node: ast.Call, functions: dict[str, ast.FunctionDef]) -> None:
        number, handler = node.args
        signal_name = _name(number)
        if signal_name == "name" or not signal_name.startswith("SIG"):
            signal_name = "SIG*"  # a loop over several
        if _name(handler) == "SIG_IGN":
            self.ignored.add(signal_name)
            return
        if _name(handler) == "SIG_DFL":
            return
        self.handled.add(signal_name)
        body: ast.AST | None = handler if isinstance(handler, ast.Lambda) else functions.get(_name(handler))
        if body is not None and _saves(body, functions, depth=3):
            self.saving.add(signal_name)
            self.note("saving_handler", file, body)


def _is_absolute(text: str) -> bool:
    return text.startswith(("/", "~/")) and "\n" not in text and len(text) > 1


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _owner(node: ast.AST) -> list[str]:
    """Return the names before the last dot."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        node = node.value
        names.append(_name(node))
    return names


def _saves(body: ast.AST, functions: dict[str, ast.FunctionDef], depth: int) -> bool:
    """Tell whether a function saves, itself or by functions of the same file."""
    for node in ast.walk(body):
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        if _is_save(node):
            return True
        if depth and name in functions and _saves(functions[name], functions, depth - 1):
            return True
    return False


def _is_save(node: ast.Call) -> bool:
    """Tell whether a call saves a state."""
    name = _name(node.func)
    return name in _SAVES or (name == "dump" and any(part.lower() in _DUMPERS for part in _owner(node.func)))


def _has_constant(node: ast.Call, keyword: str, *, value: bool) -> bool:
    found = [one.value for one in node.keywords if one.arg == keyword]
    return any(isinstance(one, ast.Constant) and one.value is value for one in found)


def _of_names(node: ast.Call) -> bool:
    """Tell whether the call sorts what `glob`, `iterdir` or `listdir` returns, without a key."""
    if any(one.arg == "key" for one in node.keywords):
        return False
    calls = {_name(one.func) for arg in node.args for one in ast.walk(arg) if isinstance(one, ast.Call)}
    return bool(calls & {"glob", "iglob", "rglob", "iterdir", "listdir", "scandir"})


def _is_appending(node: ast.Call) -> bool:
    values = [*node.args, *(one.value for one in node.keywords if one.arg == "mode")]
    return any(isinstance(one, ast.Constant) and one.value in {"a", "at", "a+", "ab"} for one in values)


def sources_of(program: Program, work_dir: Path) -> list[Path]:
    """Return the script's file, and the modules below the working directory that it imports."""
    if program.script is not None:
        first = work_dir / program.script
    elif program.module is not None:
        parts = program.module.split(".")
        candidates = (work_dir.joinpath(*parts).with_suffix(".py"), work_dir.joinpath(*parts, "__main__.py"))
        first = next((one for one in candidates if one.is_file()), candidates[0])
    else:
        return []
    found: list[Path] = []
    waiting = [first]
    while waiting:
        file = waiting.pop(0)
        if file in found or not file.is_file() or file.suffix != ".py":
            continue
        found.append(file)
        waiting.extend(_imported(file, {work_dir, first.parent}))
    return found


def _imported(file: Path, roots: Iterable[Path]) -> Iterator[Path]:
    tree = _parsed(file)
    for node in ast.walk(tree) if tree else ():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            for root in roots:
                path = root.joinpath(*name.split("."))
                yield from (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError, OSError):
        return None


def facts_of(files: Iterable[Path]) -> SourceFacts:
    """Read the source; a file with a syntax error says nothing."""
    finder = _Finder()
    for file in files:
        tree = _parsed(file)
        if tree is not None:
            finder.read(file, tree)
    return SourceFacts(
        **finder.found,
        saving_signals=frozenset(finder.saving),
        ignored_signals=frozenset(finder.ignored),
        handled_signals=frozenset(finder.handled),
        absolute_paths=frozenset(finder.absolute),
    )
