"""The user's code as it was at submit, frozen: later edits do not reach the job, and a requeued one runs the same.

In a git work tree, all its tracked files as they are now, edited ones too, and those that are neither tracked nor
ignored; elsewhere, all files but hidden ones, caches and virtual environments. What else lies beside these files is in the
copy as a link to it, so that a script finds its data by its own path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ddp_hpc.base.durable import fsync_path, make_directories, read_json, reader_bits, replace_text, scratch_path
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.cluster.containers import PACKAGE_DIR
from ddp_hpc.run.run_dir.paths import RunDir

LIST_FILE_NAME = ".ddp_hpc-snapshot.json"
"""The file in a copy that lists what was copied, and from where."""
_NON_OUTPUT_NAMES = frozenset({"__pycache__", LIST_FILE_NAME})
_MOST_NAMES_SHOWN = 5
_MOST_LINKS = 1000
"""The most links in one directory of a copy."""
_NON_CODE_DIRS = frozenset({"__pycache__", "node_modules"})
_READ_ONLY_MODE = 0o500


@dataclass(frozen=True)
class Snapshot:
    """A frozen copy of code."""

    path: Path
    source: Path
    """The directory that was copied: the work tree's top, or the code's own."""
    num_files: int
    num_bytes: int
    commit: str | None
    written: Sequence[str]
    """What earlier jobs have written into the copy."""
    not_shown: Sequence[str]
    """Directories with more than is linked."""
    sources: Sequence[str]
    """Where the code was copied from: that of the copy before, if that is another place, and this."""


_FileEntry = dict[str, Any]
"""An entry of `LIST_FILE_NAME`: a file's name below the source, its size and digest, and for a link where it leads in the copy."""


def path_in_snapshot(run: RunDir, top: Path, folder: Path) -> Path:
    """Return where the run's jobs find the copy of a directory below `top`: the same before it is made, and after."""
    return run.snapshot / folder.resolve().relative_to(top)


def take_snapshot(
    code_dir: Path, run: RunDir, *, max_bytes: int, needed: Path | None = None, outputs: Sequence[Path] = ()
) -> Snapshot:
    """Copy the code that `code_dir` belongs to into the run's directory, and publish it by one rename.

    `needed` is a file, as seen from `code_dir`, that a copy without it would be of no use. `outputs` are what the job writes: they
    are linked, not copied.
    The same content again is not copied again, but for files that its copy lacks by now. Files are not flushed one by one: a
    job that starts after a crash of the file system fails to import, and loses nothing.
    """
    import xxhash  # late: only a submission on Slurm waits for it

    source = code_top(code_dir)
    names = _code_files(source)
    hidden = {*_runs_beside(source, run), *_runs_among(source, names)}
    no_code = {*hidden, *outputs}
    names = [name for name in names if no_code.isdisjoint([source / name, *(source / name).parents])]
    _refuse_large(source, names, max_bytes)
    try:
        files = [_file_entry(source, name) for name in sorted(names) if _is_there(source / name)]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(files).encode())
        target = run.snapshots / digest
        commit = (_git(source, "rev-parse", "HEAD", may_fail=True) or "").strip() or None
        _publish(source, files, target, {"source": str(source), "commit": commit})
        if needed is not None:
            # It may begin with `..`, and the copy may not have the directory that this leads out of.
            copied = os.path.normpath(target / code_dir.resolve().relative_to(source) / needed)
            if not Path(copied).exists():
                original = code_dir / needed
                raise ConfigError(
                    f"The job's copy of the code would not contain the recipe's module {original}: git ignores it, or it is in the "
                    "directory of the runs, or behind a symbolic link to outside. Change the line of `.gitignore` that `git check-ignore "
                    f"-v {original}` prints, or set `snapshot.enabled=false`, so that the job imports the code from its own directory."
                )
        names = [file["name"] for file in files]
        written = _link_earlier_outputs(run.snapshot, target, names)
        not_shown = _link_rest(source, target, names, hidden)
        lists = filter(None, [read_json(path / LIST_FILE_NAME) for path in (run.snapshot, target)])
        sources = [*dict.fromkeys(one["source"] for one in lists)]
        beside = scratch_path(run.snapshot)
        beside.symlink_to(target.relative_to(run.path))
        beside.replace(run.snapshot)
    except OSError as error:
        raise ConfigError(
            f"The code in {source} cannot be copied for the job: {error}. Correct that, or set `snapshot.enabled=false`, so that the job imports the code from there."
        ) from error
    size = sum(file["size"] for file in files)
    return Snapshot(target, source, len(files), size, commit, written, not_shown, sources)


def writable_import_dirs(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories beside the run's that workers import from, and whose code this user may edit while the job waits.

    They are entries of PYTHONPATH, and packages that are installed editable.
    """
    installed = [Path(sys.prefix), Path(sys.base_prefix), Path(site.getusersitepackages()), PACKAGE_DIR.parent]
    found = (Path(path).resolve() for path in [*environ.get("PYTHONPATH", "").split(os.pathsep), *_editables()] if path)
    return [
        path
        for path in dict.fromkeys(found)
        if path.is_dir() and os.access(path, os.W_OK) and not any(path.is_relative_to(one) for one in installed)
    ]


def _editables() -> Iterator[str]:
    """Yield where packages lie that are installed editable: by a `.pth` file, or by a finder of setuptools."""
    yield from sys.path[1:]  # the first is the program's own
    for name, module in sys.modules.copy().items():
        if name.startswith("__editable__"):
            yield from (os.path.dirname(path) for path in getattr(module, "MAPPING", {}).values())  # noqa: PTH120  text


def notes_on_copy(copy: Snapshot, run: RunDir, outside: Sequence[Path]) -> Iterator[str]:
    """Yield what a user may not expect of a copy; `outside` are other directories that its jobs import from."""
    if len(copy.sources) > 1:
        yield f"changed: code {' -> '.join(copy.sources)}"
    if not (copy.source / ".git").exists() and copy.source.parent.is_relative_to(Path.cwd()):
        yield (
            f"note: without git, the copy of the code holds {copy.source} alone. If the script reads or imports what lies beside that "
            "directory (`../configs`), put all of it under git (`git init`, `git add`, `git commit`), or set `snapshot.enabled=false`."
        )
    if copy.written:
        yield (
            f"note: earlier jobs wrote {shorten_names(copy.written, _MOST_NAMES_SHOWN)} into the copy of the code ({run.snapshot}), and the next job finds "
            f"it there. To have it in {copy.source}, move it there, or set `snapshot.enabled=false`."
        )
    for folder in copy.not_shown:
        yield (
            f"note: {copy.source / folder} holds more than {_MOST_LINKS:,} entries that are not code, so the copy shows none of "
            "them. Move them into a directory of their own, or set `snapshot.enabled=false`."
        )
    if outside:
        yield note_on_live_code(outside)


def note_on_live_code(folders: Sequence[Path]) -> str:
    """Return what to expect of code that the work tree does not hold."""
    return (
        f"note: ddp-hpc does not copy {shorten_names([str(folder) for folder in folders], _MOST_NAMES_SHOWN)} (PYTHONPATH, or packages that are installed editable), so each job "
        "imports that code as it is when the job starts."
    )


def _folders_of(names: Iterable[str]) -> set[str]:
    """Return the directories that hold these files, the top (`.`) included."""
    return {".", *(str(parent) for name in names for parent in Path(name).parents)}


def outputs_in_copy(copy: Path) -> Iterator[str]:
    """Yield what jobs have written into a copy, beside the files of the code, also where an older copy holds it."""
    names = {file["name"] for file in (read_json(copy / LIST_FILE_NAME) or {"files": []})["files"]}
    folders = _folders_of(names)
    for folder in sorted(folders):
        for entry in os.scandir(copy / folder) if (copy / folder).is_dir() else ():
            name = os.path.normpath(Path(folder, entry.name))
            is_of_work_tree = entry.is_symlink() and Path(entry).readlink().is_absolute()
            if not (name in names or name in folders or entry.name in _NON_OUTPUT_NAMES or is_of_work_tree):
                yield name


def _link_earlier_outputs(before: Path, target: Path, names: Sequence[str]) -> list[str]:
    """Link what earlier jobs have written into the copy before, so that the next one goes on from it; return its names."""
    if not before.exists():
        return []
    written, folders = list(outputs_in_copy(before)), _folders_of(names)
    for name in written:
        link = target / name
        if str(Path(name).parent) in folders and not os.path.lexists(link):
            link.symlink_to(os.path.relpath((before / name).resolve(), link.parent.resolve()))
    return written


def _link_rest(source: Path, target: Path, names: Sequence[str], hidden: set[Path]) -> list[str]:
    """Link what lies beside the code's files and is not copied; return directories that hold more of it than is linked."""
    folders = _folders_of(names)
    known = {*names, *folders}
    not_shown = []
    for folder in sorted(folders):
        if (source / folder).is_dir() and not (source / folder).is_symlink():
            for entry in os.scandir(target / folder):
                own, link = source / folder / entry.name, Path(entry)
                leads_to = link.readlink() if entry.is_symlink() else own
                # Of a tree that this one was copied from, with its runs. A job may have made a link of a name that this tree has not.
                is_others = leads_to.is_absolute() and leads_to.name == entry.name and leads_to != own and own.exists()
                is_dead = entry.is_symlink() and not link.exists()  # a script could not make what it was anew
                if (is_dead or is_others) and os.path.normpath(Path(folder, entry.name)) not in known:
                    link.unlink()
            with os.scandir(source / folder) as entries:
                rest = (
                    Path(entry)
                    for entry in entries
                    if os.path.normpath(Path(folder, entry.name)) not in known
                    and entry.name not in _NON_OUTPUT_NAMES
                    and not any(path.is_relative_to(entry) for path in hidden)
                    and (entry.is_dir() or entry.is_file())
                )
                shown = list(islice(rest, _MOST_LINKS + 1))
            if len(shown) > _MOST_LINKS:
                not_shown.append(folder)
                continue
            for path in shown:
                with suppress(FileExistsError):
                    (target / folder / path.name).symlink_to(path)
    return not_shown


def code_top(code_dir: Path) -> Path:
    """Return the top of the work tree that a directory belongs to, or the directory."""
    code_dir = code_dir.resolve()
    top = Path((_git(code_dir, "rev-parse", "--show-toplevel") or str(code_dir)).rstrip("\n")).resolve()
    return top if code_dir.is_relative_to(top) else code_dir  # `core.worktree` may lead elsewhere


def _runs_beside(source: Path, run: RunDir) -> set[Path]:
    """Return directories that a copy leaves out, should runs lie beside the code: runs, and another user's that cannot be read."""
    found = [run.path.parent, run.path]
    for path in run.path.parent.iterdir():
        other = RunDir(path)
        try:
            is_run = other.config.exists() and other.console.parent.exists()
        except OSError:
            is_run = True
        found += [path] if is_run else []
    return {path for path in (one.resolve() for one in found) if not source.is_relative_to(path)}


def _runs_among(source: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield directories of older runs, wherever they lie in the code: their checkpoints are not code."""
    for name in names:
        run = RunDir((source / name).parent)
        if run.config.name == Path(name).name and run.path != source and (run.attempts.exists() or run.lock.exists()):
            yield run.path


def _code_files(source: Path) -> list[str]:
    listed = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is None:
        return list(_walk_files(source))
    names = [name for name in dict.fromkeys(listed.split("\0")) if name]  # git names a file in conflict three times
    modules = [name for name in names if (source / name).is_dir() and not (source / name).is_symlink()]
    present = [module.rstrip("/") for module in modules if (source / module / ".git").exists()]  # else it is only named
    within = [f"{module}/{name}" for module in present for name in _code_files(source / module)]
    links = {name for name in names if (source / name).is_symlink()}  # one may stand where a tracked directory was
    own = (name for name in names if name not in modules and links.isdisjoint(map(str, Path(name).parents)))
    return [*own, *within]


def _walk_files(top: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(top):
        kept = [
            name
            for name in folders
            if not (name.startswith(".") or name in _NON_CODE_DIRS or (Path(folder) / name / "pyvenv.cfg").exists())
        ]
        links = [name for name in kept if (Path(folder) / name).is_symlink()]
        folders[:] = [name for name in kept if name not in links]
        for name in [*files, *links]:
            path = Path(folder) / name
            if not name.startswith(".") and (path.is_symlink() or path.is_file()):  # no pipe, no socket
                yield str(path.relative_to(top))


def _refuse_large(source: Path, names: Sequence[str], max_bytes: int) -> None:
    sizes = {name: (source / name).lstat().st_size for name in names if _is_there(source / name)}
    total = sum(sizes.values())
    if total <= max_bytes:
        return
    biggest = sorted(sizes, key=lambda name: -sizes[name])[:_MOST_NAMES_SHOWN]
    told = ", ".join(f"{name} ({sizes[name] / 1e6:.1f} MB)" for name in biggest)
    raise ConfigError(
        f"The code in {source} is {total / 1e6:.1f} MB, and `snapshot.max_mb` is {max_bytes // 10**6}. The largest: {told}. "
        "Add what is not code to `.gitignore`, raise `snapshot.max_mb`, or set `snapshot.enabled=false`, so that the job imports the code from its own directory."
    )


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.is_file()  # git lists what was deleted, and what is a pipe by now


def _file_entry(source: Path, name: str) -> _FileEntry:
    import xxhash

    path = source / name
    if path.is_symlink():
        return {"name": name, "size": 0, "link_to": _link_target_in_copy(source, path), "digest": ""}
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    mode = "x" if os.access(path, os.X_OK) else "-"
    return {"name": name, "size": size, "link_to": None, "digest": mode + digest.hexdigest()}


def _link_target_in_copy(source: Path, link: Path) -> str:
    """Return where a link leads in the copy: to the copy of a file of the code; out of the code, to where it led before."""
    text = link.readlink()
    leads_to = Path(os.path.normpath(link.parent / text))
    if leads_to.is_relative_to(source) != text.is_absolute():
        return str(text)
    return os.path.relpath(leads_to, link.parent) if text.is_absolute() else str(leads_to)


def _publish(source: Path, files: Sequence[_FileEntry], target: Path, about: dict[str, object]) -> None:
    """Copy beside, write the manifest last, rename; leftovers of killed writers are swept first.

    A copy that is there gets what it lacks, where a purge of old files has taken some; jobs may write beside them.
    """
    make_directories(target.parent)
    for left in target.parent.glob(".*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    beside = scratch_path(target)
    into = target if target.exists() else beside
    try:
        for file in files:
            if not os.path.lexists(into / file["name"]):
                _copy(source / file["name"], into / file["name"], file["link_to"])
        if not (into / LIST_FILE_NAME).exists():
            manifest = {"version": 1, "taken_at": time.time(), **about, "files": files}
            make_directories(into)
            replace_text(into / LIST_FILE_NAME, json.dumps(manifest, indent=1))
        if into == beside:
            beside.rename(target)
            fsync_path(target.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _copy(source: Path, target: Path, link_to: str | None) -> None:
    make_directories(target.parent)
    if link_to is not None:
        target.symlink_to(link_to)
        return
    shutil.copy(source, target)  # with new times: a purge by age must not take it at once
    target.chmod(target.stat().st_mode & (_READ_ONLY_MODE | reader_bits(target.parent)))


_GIT_REDIRECT_VARIABLES = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"),
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE"),
    *("GIT_CONFIG", "GIT_CONFIG_PARAMETERS", "GIT_TRACE", "GIT_EXTERNAL_DIFF", "GIT_LITERAL_PATHSPECS"),
)
"""Variables that direct git to another repository: git sets them for its hooks and for the processes that a hook starts."""
_GIT_SAFETY_OPTIONS = (
    *("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.alternateRefsCommand="),
)
"""A repository's own configuration can name commands; a copy of its code must not run them."""

_NO_WORK_TREE_PATTERN = re.compile(r"not a git repository \(or any|must be run in a work tree")
_NOT_FOUND_EXIT_CODE = 127


def _git(folder: Path, *words: str, may_fail: bool = False) -> str | None:
    """Return what git says about a directory; None where it is not a work tree, or this host has no git."""
    # git looks for a repository in these places, and each of its processes takes 4 ms. A repository may also be the directory
    # itself, with `core.worktree`: then it has a HEAD.
    places = [folder.absolute(), *folder.absolute().parents, *folder.resolve().parents]
    top = next((place for place in places if any(os.path.lexists(place / name) for name in (".git", "HEAD"))), None)
    if top is None:
        return None
    # A user's own directory may lie below another user's repository, and be no part of it.
    may_fail = may_fail or folder.stat().st_uid != top.stat().st_uid
    # None of the commands that are asked here reads files through filters, as `git status` would.
    unset = [f"--unset={name}" for name in _GIT_REDIRECT_VARIABLES]
    argv = [
        *("env", *unset, "GIT_OPTIONAL_LOCKS=0", "GIT_NO_LAZY_FETCH=1", "GIT_ALLOW_PROTOCOL=", "LC_ALL=C"),
        *("git", "-C", str(folder), *_GIT_SAFETY_OPTIONS, *words),
    ]
    try:
        done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return None
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode not in {0, _NOT_FOUND_EXIT_CODE} and not may_fail and not _NO_WORK_TREE_PATTERN.search(said):
        raise ConfigError(
            f"The job's copy of the code in {folder} is made of the files that git lists, but git refuses this repository:\n{said}\n"
            "Do what git says and submit again, or set `snapshot.enabled=false`, so that the job imports the code from its own directory."
        )
    return os.fsdecode(done.stdout) if done.returncode == 0 else None
