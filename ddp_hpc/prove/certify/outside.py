"""What lies outside of the copies, and may be the user's own: it is refused if a run could overwrite saved states in it."""

from __future__ import annotations

import ast
import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.prove.certify.saved_files import is_saved_state
from ddp_hpc.run.spec.script import Program, parse_program

_STATE_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".safetensors", ".distcp"})
"""Of saved states, also before another suffix (`last.pth.tar`). Fewer than `SAVED_SUFFIXES`, as data sets have the others, too (`train.bin`, `shard-0.tar`)."""
MOST_ENTRIES = 50_000
"""So many files below a path are checked; a data set may have millions."""
_SHARED_DIRS = ("/", "/tmp", "/var/tmp", "/scratch", "/home")  # noqa: S108  named, not written
"""Directories that a script may name to build a path, and in which others write; the user's home and cache are such, too."""


def command_in(work_dir: Path, command: Sequence[str]) -> list[str]:
    """Return the command as it is run in a copy: its script by a relative path, and its Python by an absolute one."""
    words, program = list(command), parse_program(command)
    if program.python is not None and "/" in program.python:
        words[0] = os.path.abspath(work_dir / program.python)  # noqa: PTH100  links stay: a virtual environment's Python is one
    if program.script is None:
        return words
    script = Path(os.path.abspath(work_dir / program.script))  # noqa: PTH100  as above
    if not script.is_relative_to(work_dir):  # perhaps by another name of the directory: a home is a link at many sites
        script = script.parent.resolve() / script.name
    if not script.is_relative_to(work_dir):
        raise ConfigError(
            f"The script {program.script!r} is not below the working directory, {work_dir}, so the copies of that directory would not "
            f"have it, and what it writes beside itself would change your own files. Go to {script.parent} first, and certify it there."
        )
    words[words.index(program.script, 1)] = str(script.relative_to(work_dir))
    return words


def named_paths(words: Sequence[str], in_source: Collection[str]) -> tuple[Path, ...]:
    """Return the absolute paths that stand in a command's words (`--out=/a`, `hydra.run.dir=/a`), or in the source."""
    parts = [part for word in words for part in word.split("=")]
    texts = {one for one in (*parts, *in_source) if one.startswith(("/", "~/")) and not {"\0", "\n"} & {*one}}
    paths = {Path(os.path.normpath(Path(one).expanduser())) for one in texts}
    no_outputs = [*map(Path, ("/dev", "/proc", "/sys")), Path.home() / ".cache"]
    own = (path for path in paths if str(path) not in _SHARED_DIRS and not Path.home().is_relative_to(path))
    return tuple(sorted(path for path in own if not any(path.is_relative_to(one) for one in no_outputs)))


def texts_in_source(program: Program, work_dir: Path) -> set[str]:
    """Return the texts that stand in the script, and in what it imports from the working directory."""
    module = (program.module or "").replace(".", "/")
    names = [program.script] if program.script else [f"{module}.py", f"{module}/__main__.py"] if module else []
    waiting = [work_dir / name for name in names]
    roots = {work_dir, *(file.parent for file in waiting)}
    texts, seen = set[str](), set[Path]()
    while waiting:
        file = waiting.pop()
        if file in seen or file.suffix != ".py" or not file.is_file():
            continue
        seen.add(file)
        with suppress(SyntaxError, ValueError, OSError):  # a file that Python cannot read names no path
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.add(node.value)
                for name in _import_paths(node):
                    waiting += [root / f"{name}{end}" for root in roots for end in (".py", "/__init__.py")]
    return texts


def _import_paths(node: ast.AST) -> list[str]:
    """Return what an import names, as paths below a root: `from pkg import part` -> `pkg`, `pkg/part`."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name.replace(".", "/") for name in names]


def refuse_saved_states(paths: Collection[Path], *, apart_from: Collection[Path] = ()) -> None:
    """Refuse a command, or a source, that names saved states which the script could overwrite."""
    for path in paths:
        state = saved_state_at_risk(path, apart_from=apart_from)
        if state is not None:
            raise ConfigError(
                f"The command, or the script's source, names {path}, and {state} is there: a saved state, which the runs could "
                "overwrite or resume from. If the script writes there, give it a relative path for its output. If it only reads "
                f"there, make a link to it in the working directory and name the link, as the runs then get a copy; or make it "
                f"read-only during the test: `chmod -R a-w {state.parent if path == state else path}`; or, if nothing there can be "
                f"lost, allow it: `--may-change {path}`."
            )


def saved_state_at_risk(path: Path, *, apart_from: Collection[Path] = ()) -> Path | None:
    """Return a saved state at or below a path that this user may overwrite, rename or delete; None where none was found."""
    files = islice(_files_below(path, apart_from), MOST_ENTRIES)
    states = filter(is_surely_state, files)
    return next((file for file in states if _may_write(file) or _may_write(file.parent)), None)


def is_surely_state(path: Path, pattern: str | None = None) -> bool:
    """Tell by its name whether a file is a saved state for sure; by the user's own pattern, where there is one."""
    return is_saved_state(path, pattern) and (pattern is not None or not _STATE_SUFFIXES.isdisjoint(path.suffixes))


def _files_below(path: Path, apart_from: Collection[Path]) -> Iterator[Path]:
    """Yield the files at or below a path, those of upper directories first; a link to a directory is not followed."""
    if not path.is_dir():
        if path.is_file():
            yield path
        return
    folders = deque([path])
    while folders:
        folder = folders.popleft()
        if folder in apart_from:
            continue
        with suppress(OSError), os.scandir(folder) as entries:  # a directory that this user may not read
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(folder / entry.name)
                else:
                    yield folder / entry.name


def _may_write(path: Path) -> bool:
    """Tell whether this user has the right to write there. Root always has; for root, the permissions count all the same."""
    with suppress(OSError):
        return os.access(path, os.W_OK) and bool(path.stat().st_mode & 0o222)
    return False
