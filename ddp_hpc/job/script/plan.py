"""What is started for a run's command: which file, in which Python, and whether in a forked process."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import did_you_mean
from ddp_hpc.cluster.rendezvous.worker_env import USERS_CODE
from ddp_hpc.job.script.source import imported_names, may_compile, sets_endpoint, why_not_fork
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import Program, RunSpec, ScriptSpec

_UNBUFFERED_OPTION = "-u"
_RUNPY_CODE = "import runpy, sys; folder, module = sys.argv[1:3]; del sys.argv[1:3]; sys.path[:1] = [folder] if sys.path[:1] == [''] else sys.path[:1]; runpy._run_module_as_main(module)"
"""What `python -m` does, with another directory in place of the working directory. Python 3.10 and older have no option for it
(`-P`), and a variable (PYTHONSAFEPATH) would count for all programs that the script starts."""


@dataclass(frozen=True, kw_only=True)
class ScriptPlan:
    """What a worker starts."""

    program: Program
    path: Path | None = None
    """The script's file; None for a module, and for programs that are not Python."""
    file: str = ""
    """The same as text, as Python has it in `__file__`: `/work/./train.py` for `python ./train.py`."""
    argv0: str = ""
    """What the script sees as `sys.argv[0]`, where it is a file."""
    folder: str = ""
    """What Python puts first into `sys.path`."""
    executable: str
    """The file that a new process executes."""
    why_exec: str
    """Why it starts as a new process; empty where it starts in a forked one."""
    has_copy: bool = False
    """Whether the folder is in the job's copy of the code."""
    may_compile: bool = True
    """Whether the script seems to use PyTorch's compiler; also where its source is not known."""
    sets_endpoint: bool = False
    """Whether the script seems to say itself where its ranks meet."""

    @property
    def command(self) -> list[str]:
        """The command line of a Python that is started for it."""
        program = self.program
        if program.python is None:
            return list(program.words)
        what = ["-m", program.module] if program.module else [self.argv0]
        # By its path, as a Python finds its virtual environment by the word that it is called by (`sys.executable`).
        return [self.executable, *program.options, *what, *program.arguments]

    @property
    def new_process_command(self) -> list[str]:
        """The command line of a new process: of a module, that of the job's copy of the code."""
        program = self.program
        if program.module is None or not self.has_copy:
            return self.command
        return [self.executable, *program.options, "-c", _RUNPY_CODE, self.folder, program.module, *program.arguments]


@dataclass(frozen=True, kw_only=True)
class ScriptRank:
    """One rank of one attempt, and what it runs."""

    run: RunDir
    spec: RunSpec
    plan: ScriptPlan
    rank: int
    attempt: int

    @property
    def log(self) -> Path:
        return self.run.rank_log(self.attempt, self.rank)


def make_script_plan(spec: ScriptSpec, code: Path | None, environ: Mapping[str, str], work_dir: Path) -> ScriptPlan:
    """Return what a worker starts; `code` is the directory of the script in the job's copy of the code, if it has one."""
    program = spec.program
    if program.python is None:
        return _plan_other_program(program, code, environ, work_dir)
    executable, why = _choose_python(program.python, environ)
    strange = [option for option in program.options if option != _UNBUFFERED_OPTION]
    if spec.start == "exec":
        why = "`script.start` is `exec`"
    elif strange:
        why = why or f"`script.command` gives Python the option `{strange[0]}`, which only a new process can have"
    file, argv0 = "", ""
    if program.script is not None:
        file, argv0 = _script_file(program.script, code, work_dir)
    path = Path(file) if file else None
    folder = str(code or work_dir) if path is None else os.path.dirname(os.path.realpath(path))  # noqa: PTH120  text
    folders = [folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    source = path or _module_file(folders, str(program.module))
    if source is not None and source.is_dir() and not (source / "__main__.py").is_file():
        raise ConfigError(
            f"`script.command` starts the script {program.script!r}, but {source} is a directory without a `__main__.py`. Name the script's file."
        )
    text = _read_source(source) if source is not None and source.is_file() else None
    why = why or (why_not_fork(text) if text else "")
    # Of a new process, nothing can be known later.
    texts = [*([] if text is None else [text]), *(_sources_of_imports(text, folders) if text and why else [])]
    return ScriptPlan(
        program=program,
        path=path,
        file=file,
        argv0=argv0,
        folder=folder,
        executable=executable,
        why_exec=why,
        has_copy=code is not None,
        may_compile=text is None or may_compile(text),
        sets_endpoint=any(map(sets_endpoint, texts)),
    )


def _sources_of_imports(text: str, folders: Sequence[str]) -> Iterator[str]:
    """Yield the source of the user's modules that a script imports itself."""
    with suppress(SyntaxError, ValueError, RecursionError, OSError):  # Python itself reports it when the script starts
        for name in imported_names(text):
            if (file := _module_file(folders, name)) is not None:
                yield file.read_text(encoding="utf-8", errors="replace")


def _read_source(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8", errors="replace")
    except PermissionError as error:
        raise ConfigError(
            f"`script.command` starts {source.name}, but you are not allowed to read {source}. Allow it with `chmod u+r`."
        ) from error


def _plan_other_program(program: Program, code: Path | None, environ: Mapping[str, str], work_dir: Path) -> ScriptPlan:
    """Return what is started for a program that is not a Python script."""
    word = program.words[0]
    found: Path | None = None
    if "/" in word:
        frozen = None if code is None else code / Path(word).name
        found = frozen if frozen is not None and frozen.exists() else work_dir / word
        if not found.exists():
            raise ConfigError(f"`script.command` starts {word!r}, but {found} does not exist. Check the path.")
        if found.is_dir() or not os.access(found, os.X_OK):
            how = f"`python {word}`" if found.suffix == ".py" else f"`bash {word}`"
            raise ConfigError(
                f"`script.command` starts {word!r}, but {found} is not an executable file. Make it executable with `chmod +x`, or name the program that runs it: {how}."
            )
    elif (on_path := shutil.which(word, path=environ.get("PATH"))) is not None:
        found = Path(on_path)
    if found is None:
        beside = " For a file in this directory, write `python FILE` or `./FILE`." if (work_dir / word).exists() else ""
        raise ConfigError(f"`script.command` starts {word!r}, but PATH has no such program.{beside}")
    shells = [work_dir / one for one in program.words if one.endswith(".sh") and (work_dir / one).is_file()]
    return ScriptPlan(
        program=program,
        executable=str(found),
        why_exec="`script.command` starts no Python script",
        sets_endpoint=any(sets_endpoint(text, is_shell=True) for text in [*map(_read_source, shells), *program.words]),
    )


def _choose_python(word: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the Python that a command names, and why it is not the one of this process.

    A bare `python` is the one that ddp-hpc runs in, as with torchrun: in an image, or in a staged environment, that one's.
    """
    if "/" not in word:
        version = re.fullmatch(r"python3\.(\d+)", word)
        if version is None or int(version[1]) == sys.version_info.minor:
            return sys.executable, ""
        found = shutil.which(word, path=environ.get("PATH"))
        if found is None:
            raise ConfigError(
                f"`script.command` starts {word!r}, but PATH has no such program. Name `python`, which is {sys.executable}, or install it."
            )
        return found, f"{found} is not the Python that ddp-hpc runs in, {sys.executable}"
    path = Path(os.path.abspath(word))  # noqa: PTH100  links stay: a virtual environment's Python is one
    if not os.access(path, os.X_OK):
        raise ConfigError(f"`script.command` starts {word!r}, but {path} is not an executable file. Check the path.")
    # Virtual environments link to the same file, and a directory may hold several Pythons.
    ours = Path(sys.executable)
    is_ours = path.parent == ours.parent and path.resolve() == ours.resolve()
    return str(path), "" if is_ours else f"{path} is not the Python that ddp-hpc runs in, {sys.executable}"


def _script_file(script: str, code: Path | None, work_dir: Path) -> tuple[str, str]:
    """Return a script's file, and the name by which the command calls it."""
    frozen = None if code is None else code / Path(script).name
    if frozen is not None and frozen.exists():
        return str(frozen), str(frozen)
    path = os.path.join(work_dir, script)  # noqa: PTH118  a `Path` would leave out `./`
    if not Path(path).exists():
        beside = [str(Path(script).with_name(one.name)) for one in Path(path).parent.glob("*.py")]
        raise ConfigError(
            f"`script.command` starts the script {script!r}, but {path} does not exist. {did_you_mean(script, beside, cutoff=0.7)}Check the path."
        )
    return path, script


def _module_file(folders: Sequence[str], module: str) -> Path | None:
    """Return the file of a module in the first directory that has it, without an import of it; None where it is elsewhere."""
    paths = (Path(folder, *module.split(".")) for folder in folders)
    files = (file for path in paths for file in (path.with_suffix(".py"), path / "__main__.py"))
    return next((file for file in files if file.is_file()), None)


def frozen_code_dirs(environ: Mapping[str, str], snapshots: Sequence[Path]) -> list[Path]:
    """Return the directories of the job's copy of the code that it imports from, that of the script first."""
    paths = map(Path, filter(None, environ.get(USERS_CODE, "").split(os.pathsep)))
    return [path for path in paths if any(path.is_relative_to(one) for one in snapshots)]


def users_python_path(environ: Mapping[str, str], snapshots: Sequence[Path] = ()) -> list[str]:
    """Return the entries of PYTHONPATH without those that ddp-hpc has put first, but for copies of the user's entries."""
    ours = [path for path in environ.get(USERS_CODE, "").split(os.pathsep) if path]
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    users = entries[len(ours) :] if entries[: len(ours)] == ours else entries
    return [*map(str, frozen_code_dirs(environ, snapshots)[1:]), *filter(None, users)]
