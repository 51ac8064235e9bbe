"""Scripts as users write them, beside what a plain Python makes of them: the same output to the letter, the same exit code."""

from __future__ import annotations

import gzip
import io
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.job.script.plan import make_script_plan
from ddp_hpc.run.config.resolve import render_resolved, resolve
from ddp_hpc.run.run_dir.failure_reports import first_failure
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_remarks
from ddp_hpc.run.spec import ScriptSpec

WORK = """
import multiprocessing, os, sys  # the first as PyTorch does, which agents import
import zipfile
from ddp_hpc.base import processes
from ddp_hpc.job.script.worker import main
processes.block_awaited_signals()  # as agents do
processes.block_interruptions()
os._exit(main(sys.argv[1], os.environ, attempt=0, listen_fd=None))
"""
RANK_ZERO = {"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def work(folder: Path, *command: str, settings: tuple[str, ...] = (), **environ: str) -> tuple[int, RunDir]:
    """Have one worker run a command in a directory; return its exit code, and the run."""
    run = RunDir(folder / "runs" / "run")
    run.path.mkdir(parents=True, exist_ok=True)
    keys = [f"runs_dir={folder / 'runs'}", "name=run", *settings]
    resolved = resolve(None, keys, {"DDP_HPC_SITE_PROFILE": ""}, command=[*command])
    run.config.write_text(render_resolved(resolved), encoding="utf-8")
    argv, given = [sys.executable, "-c", WORK, str(run.path)], {**os.environ, **RANK_ZERO, **environ}
    done = subprocess.run(argv, cwd=folder, env=given, stdin=subprocess.DEVNULL, check=False, timeout=120)
    return done.returncode, run


# --- as a plain Python has them ----------------------------------------------------------------------------------------


def archive(source: str) -> bytes:
    """Return an archive that Python runs, as `python -m zipapp` makes it."""
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("__main__.py", source)
        return file.getvalue()


SCRIPTS: dict[str, tuple[str, str | bytes]] = {
    "an archive": ("train.pyz", archive("import os, sys\nprint(sys.argv, __name__, __file__, sys.path[0])\n")),
    "a byte order mark and lines of Windows": ("train.py", b"\xef\xbb\xbf# mine\r\nprint('yes')\r\n"),
    "a syntax error": ("train.py", "import os\ndef f(:\n    pass\n"),
    "indentation by tabs and spaces": ("train.py", "if True:\n\tx = 1\n        y = 2\n"),
    "an encoding of its own": ("train.py", "# -*- coding: latin-1 -*-\nprint('\xe9')\n".encode("latin-1")),
    "sys.exit(None)": ("train.py", "import sys; print('bye'); sys.exit(None)\n"),
    "sys.exit of a tuple": ("train.py", "import sys; sys.exit((1, 2))\n"),
    "an exception of another": (
        "train.py",
        "def load():\n    return {}['lr']\ntry:\n    load()\nexcept KeyError as e:\n    raise ValueError('no lr') from e\n",
    ),
    "a hook for exceptions": ("train.py", "import sys\nsys.excepthook = lambda *e: print('mine', e[0])\n1/0\n"),
    "a warning": ("train.py", "import warnings\nwarnings.warn('old')\n"),
    "it reads its input": ("train.py", "import sys\nprint(repr(sys.stdin.read()))\ninput()\n"),
    "it closes its files": ("train.py", "import os\nfor n in (0, 1, 2): os.close(n)\nopen('done', 'w').write('x')\n"),
    "it leads a session": ("train.py", "import os; os.setsid(); print(os.getsid(0) == os.getpid())\n"),
    "it goes elsewhere": ("train.py", "import os; os.mkdir('w'); os.chdir('w'); open('ck', 'w').close(); import lib\n"),
    "it lies beside its modules": ("sub/train.py", "import lib; print(lib.x)\n"),
    "a name with spaces": ("my code \xe9/tr \xe4in.py", "print(__file__, 'h\xe9')\n"),
    "another rank": (
        "train.py",
        "import os, subprocess\nos.environ['RANK'] = '7'\nsubprocess.run(['sh', '-c', 'echo $RANK'])\n",
    ),
    "a handler that exits": (
        "train.py",
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nos.kill(os.getpid(), 15)\n",
    ),
    "143 after SIGTERM": (
        "train.py",
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\nos.kill(os.getpid(), 15)\n",
    ),
    "modules named like ours": (
        "train.py",
        "import script, job, spec, worker, torch_utils, psutil_\nprint(script.x, job.x, spec.x, worker.x, torch_utils.x)\n",
    ),
    "processes by spawn": (
        "train.py",
        "import multiprocessing as m\ndef f(x): return x * x\nif __name__ == '__main__': print(m.get_context('spawn').Pool(2).map(f, [3]))\n",
    ),
    "a class of its own from a spawned process": (
        "train.py",
        """import multiprocessing as m
class Batch(tuple): pass
def f(x): return Batch([x])
if __name__ == "__main__": print(m.get_context("spawn").Pool(1).map(f, [3]))
""",
    ),
    "its own source": (
        "train.py",
        "import inspect, pickle\nclass Net: pass\nprint(inspect.getsource(Net), type(pickle.loads(pickle.dumps(Net()))))\n",
    ),
    "arguments": (
        "train.py",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--a')\np.parse_args()\n",
    ),
    "an import of its package": ("sub/train.py", "from .lib import x\n"),
    "it logs": (
        "train.py",
        "import logging; logging.basicConfig(level=20); logging.info('x'); logging.getLogger('y').error('z')\n",
    ),
    "an error in a thread": (
        "train.py",
        "import threading\ndef run(): raise OSError('no')\nthreading.Thread(target=run).start()\n",
    ),
}
QUICK = {
    "a syntax error",
    "it closes its files",
    "it leads a session",
    "a name with spaces",
    "modules named like ours",
    "a class of its own from a spawned process",
}
MODULES = ("script", "job", "spec", "worker", "torch_utils", "psutil_", "sub/lib", "lib")


@pytest.mark.parametrize(
    "what", [what if what in QUICK else pytest.param(what, marks=pytest.mark.long) for what in SCRIPTS]
)
def test_a_script_prints_and_ends_as_with_a_plain_python(what: str, tmp_path: Path) -> None:
    name, source = SCRIPTS[what]
    plain, ours = tmp_path / "plain" / "here", tmp_path / "ours" / "here"
    for folder in (plain, ours):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(source if isinstance(source, bytes) else source.encode())
        for module in MODULES:
            (folder / module).parent.mkdir(exist_ok=True)
            (folder / f"{module}.py").write_text("x = 'mine'\n")
    command = ["python", name, "--", "--b"]
    environ = {**os.environ, **RANK_ZERO, "PYTHONUNBUFFERED": "1"}
    expected = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=plain,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )

    _, run = work(ours, *command)

    found = run.rank_log(0, 0).read_bytes().replace(str(ours).encode(), str(plain).encode())
    assert found.decode(errors="replace") == expected.stdout.decode(errors="replace")
    failure = first_failure(run, 0)
    assert (failure is not None) == (expected.returncode != 0)


WITH_A_TEE = """
import sys
class Tee:
    def __init__(self, stream, file):
        self.targets = stream, file
    def write(self, text):
        for target in self.targets:
            target.write(text)
{flush}
sys.stdout = Tee(sys.stdout, open('out.txt', 'w'))
sys.stderr = Tee(sys.stderr, open('err.txt', 'w'))
print('trained')
sys.exit({code})
"""
FLUSH = """
    def flush(self):
        for target in self.targets:
            target.flush()
"""


@pytest.mark.parametrize("code", [0, 99])
def test_a_script_may_replace_its_streams_by_what_only_writes_and_flushes(code: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITH_A_TEE.format(flush=FLUSH, code=code))

    assert work(tmp_path, "python", "train.py")[0] == (exit_codes.STOPPED if code else exit_codes.FINISHED)
    assert (tmp_path / "out.txt").read_text() == "trained\n"


def test_a_script_may_take_its_own_module_away(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\ndel sys.modules['__main__']\n")

    assert work(tmp_path, "python", "train.py")[0] == exit_codes.FINISHED


LEAVES_OPEN = """
import gzip, io, sys, weakref, zipfile, kept
gone = weakref.proxy(set())
rows = open('rows.csv', 'w')
packed = gzip.open('packed.gz', 'wt')
raw = open('raw', 'wb')
archive = zipfile.ZipFile('all.zip', 'w')
archive.writestr('name', 'text')
kept.file = open('kept.txt', 'w', encoding='utf-16')
both = open('both.txt', 'w+')
sys.stdout = open('printed.txt', 'w')
for number in range(500):
    print(number)
    for file in (rows, packed, both, kept.file):
        file.write(f'{number}\\n')
    raw.write(b'x')
{end}
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "1 / 0"])
def test_files_that_a_script_never_closes_are_written_as_with_a_plain_python(end: str, tmp_path: Path) -> None:
    folders = [tmp_path / "plain", tmp_path / "ours"]
    for folder in folders:
        folder.mkdir()
        (folder / "kept.py").touch()
        (folder / "train.py").write_text(LEAVES_OPEN.replace("{end}", end))
    subprocess.run([sys.executable, "train.py"], cwd=folders[0], stderr=subprocess.DEVNULL, check=False)

    work(folders[1], "python", "train.py")

    texts = ("rows.csv", "raw", "kept.txt", "both.txt", "printed.txt")
    plain, ours = ([(f / name).read_bytes() for name in texts] for f in folders)
    assert ours == plain
    assert len(plain[0]) == 1890
    assert gzip.decompress((folders[1] / "packed.gz").read_bytes()) == plain[0]
    assert zipfile.ZipFile(folders[1] / "all.zip").read("name") == b"text"


@pytest.mark.parametrize("start", ["exec", "fork"])
def test_a_module_of_the_jobs_copy_of_the_code_runs_and_not_the_one_that_was_edited_since(
    start: str, tmp_path: Path
) -> None:
    copy = RunDir(tmp_path / "runs" / "run").snapshot
    shows = "import atexit, pickle, sys, multiprocessing as m\nfrom pkg.value import value\ndef f(x): return value\n"
    shows += "class Kept: pass\natexit.register(lambda: pickle.dumps(Kept()))\n"
    shows += (
        "if __name__ == '__main__': print(value, sys.argv, __spec__.name, m.get_context('spawn').Pool(1).map(f, [0]))\n"
    )
    settings = (f"script.start={start}",)
    for folder, value in ((tmp_path, "edited"), (copy, "submitted")):
        (folder / "pkg").mkdir(parents=True)
        (folder / "pkg" / "train.py").write_text(shows)
        (folder / "pkg" / "value.py").write_text(f"value = {value!r}")

    _, run = work(tmp_path, "python", "-m", "pkg.train", "--lr", settings=settings, _DDP_HPC_USERS_CODE=str(copy))

    expected = f"submitted ['{copy}/pkg/train.py', '--lr'] pkg.train ['submitted']\n"
    assert run.rank_log(0, 0).read_text() == expected


# --- what status says of an end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "settings", "expected"),
    [
        ("exit 0", (), "the script exited with code 0 after less than a second; it printed nothing"),
        ("echo no GPU found", (), " less than a second; its last line: no GPU found"),
        (
            "echo nothing to do",
            ("script.progress=*.pt",),
            "/*.pt'); its last line: nothing to do",
        ),
        ("touch a.pt", ("script.progress=*.pt",), ""),
        (
            "cd runs/run; mkdir -p checkpoints/step-00000003; touch checkpoints/step-00000003/manifest.json",
            (),
            "",
        ),  # as `attach` commits
        ("setsid sleep 60 & echo $! > child", (), "processes that it started still run ("),
    ],
)
def test_what_a_user_may_not_expect_of_a_script_that_has_finished_is_said(
    shell: str, settings: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    code, run = work(tmp_path, "/bin/sh", "-c", shell, settings=settings)

    assert code == exit_codes.FINISHED
    remarks = read_remarks(run, 0, 1)
    assert [expected in remark for remark in remarks] == ([True] if expected else [])
    if (child := tmp_path / "child").exists():
        assert f"({int(child.read_text())})" in remarks[0]
        os.kill(int(child.read_text()), signal.SIGKILL)


def test_a_script_that_leaves_at_once_after_earlier_saves_is_quoted(tmp_path: Path) -> None:
    """OpenCLIP without `--resume` finds its directory and ends with exit code 0, while the other ranks wait for rank zero."""
    settings = ("script.progress=*.pt",)
    work(tmp_path, "/bin/sh", "-c", "touch a.pt", settings=settings)
    _, run = work(tmp_path, "/bin/sh", "-c", "echo Error. Experiment already exists", settings=settings)

    (remark,) = read_remarks(run, 0, 1)
    assert remark.endswith("its last line: Error. Experiment already exists")


def test_the_last_line_of_a_log_with_a_progress_bar_is_what_the_bar_showed_last(tmp_path: Path) -> None:
    _, run = work(tmp_path, "/bin/sh", "-c", r"printf '\r  0%%|   |\r 50%%|#  | 3/6 [00:01]'; exit 4")

    failure = first_failure(run, 0)
    assert failure is not None
    assert failure.exception == "the script exited with code 4; its last line: 50%|#  | 3/6 [00:01]"


def test_the_last_line_of_an_app_of_hydra_is_its_error_and_not_how_to_see_more_of_it(tmp_path: Path) -> None:
    error = (
        r"Connection closed by peer\n\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
    )
    _, run = work(tmp_path, "/bin/sh", "-c", f"printf 'Traceback ...\nRuntimeError: {error}'; exit 1")

    failure = first_failure(run, 0)
    assert failure is not None
    assert failure.exception.endswith("its last line: RuntimeError: Connection closed by peer")
    assert failure.is_secondary


@pytest.mark.long
@pytest.mark.parametrize("torchrun", ["torchrun", "python -m torch.distributed.run"])
def test_a_launcher_of_pytorchs_that_ends_by_the_stop_signal_has_been_stopped(torchrun: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nopen('runs/run/STOP', 'w')\ntime.sleep(60)\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [*torchrun.split(), "--standalone", "--nproc-per-node=2", "train.py"]

    code, run = work(tmp_path, *command, PATH=path)

    assert "got signal: 15" in run.rank_log(0, 0).read_text()
    assert (code, first_failure(run, 0)) == (exit_codes.STOPPED, None)


# --- signals that Slurm sends to all processes of a step ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shell", "code"),
    [
        ("(sleep 0.5; kill -TERM $PPID) & kill -TERM $$", exit_codes.STOPPED),
        ("kill -TERM $PPID; exit 0", exit_codes.STOPPED),
        pytest.param("kill -TERM $$", exit_codes.FAILED, marks=pytest.mark.long),
        ("kill -USR1 $PPID; exit 0", exit_codes.STOPPED),
        pytest.param("kill -HUP $PPID; exit 0", exit_codes.STOPPED, marks=pytest.mark.long),
        ("(sleep 0.5; kill -INT $PPID) & kill -INT $$", exit_codes.STOPPED),
        (
            "kill -USR2 $$; kill -USR1 $$; kill -HUP $$; exit 42",
            42,
        ),  # the script lives on, until it gets its own signal
    ],
)
def test_a_script_that_a_stop_signal_of_slurms_reaches_first_has_been_stopped(
    shell: str, code: int, tmp_path: Path
) -> None:
    settings = ("script.resume_exit_codes=[43]",)

    found, run = work(tmp_path, "/bin/sh", "-c", shell, settings=settings, SLURM_JOB_ID="1")

    if code == 42:
        assert (failure := first_failure(run, 0)) is not None
        assert "code 42" in failure.exception
    else:
        assert found == code


SAVES = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: None)
Path("runs/run/STOP").touch()
signal.pause()
time.sleep(0.5)
print("saving", flush=True)
{end}
Path("saved").touch()
"""


@pytest.mark.parametrize(
    ("shell", "end", "code", "failure"),
    [
        ("python save.py; true", "", exit_codes.STOPPED, ""),
        ("sh -c 'python save.py | tee shown; true'; true", "", exit_codes.STOPPED, ""),
        ("python save.py; true", "sys.exit(5)", exit_codes.FAILED, "code 5; its last line: saving"),
        ("python save.py; true", "time.sleep(60)", exit_codes.FAILED, "did not exit within 3 s after SIGTERM"),
    ],
)
def test_a_training_that_a_shell_has_started_gets_the_stop_signal_that_ends_the_shell(
    shell: str, end: str, code: int, failure: str, tmp_path: Path
) -> None:
    (tmp_path / "save.py").write_text(SAVES.replace("{end}", end))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    found, run = work(tmp_path, "/bin/sh", "-c", shell, settings=("script.stop_within_s=3",), PATH=path)

    assert found == code
    assert (tmp_path / "saved").exists() == (not failure)
    assert failure in getattr(first_failure(run, 0), "exception", "")
    if "tee" in shell:
        assert (tmp_path / "shown").read_text() == "saving\n"


@pytest.mark.parametrize(
    ("shell", "has_asked"),
    [("exit 99", True), ("touch runs/run/STOP; trap 'exit 99' TERM; while :; do sleep 0.1; done", False)],
)
def test_a_script_that_asks_for_another_attempt_is_told_from_one_that_was_asked_to_stop(
    shell: str, *, has_asked: bool, tmp_path: Path
) -> None:
    code, run = work(tmp_path, "/bin/sh", "-c", shell)

    assert code == exit_codes.STOPPED
    assert run.script_asked(0, 0).exists() == has_asked


def test_torchruns_node_process_sees_at_any_time_that_the_process_beside_a_script_awaits_signals(
    tmp_path: Path,
) -> None:
    """It sends a stop signal to such workers only: others would die of it."""
    seen = "import sys, time\nfrom ddp_hpc.base.processes import handles_stop_signal\nimport os\nfound = []\n"
    seen += "for _ in range(20):\n    time.sleep(0.02)\n    found += [handles_stop_signal(os.getppid(), n) for n in (12, 15)]\n"
    (tmp_path / "looks.py").write_text(f"{seen}print(len(found), all(found))\n")

    _, run = work(tmp_path, "python", "looks.py")

    assert run.rank_log(0, 0).read_text() == "40 True\n"


@pytest.mark.parametrize(("is_secondary", "code"), [("false", exit_codes.FAILED), ("true", exit_codes.STOPPED)])
def test_a_rank_that_is_stopped_because_another_has_failed_has_not_been_asked_to_come_back(
    is_secondary: str, code: int, tmp_path: Path
) -> None:
    """After a failure, srun and torchrun send the other ranks the same SIGTERM as in a preemption."""
    report = (
        f'{{"rank": 3, "host": "n", "at": 1, "step": 0, "exception": "x", "log": "", "is_secondary": {is_secondary}}}'
    )
    folder = "runs/run/errors/attempt-0"

    shell = f"mkdir -p {folder}; echo '{report}' > {folder}/rank-3.json; kill -TERM $PPID; exec sleep 60"
    found, _ = work(tmp_path, "/bin/sh", "-c", shell)

    assert found == code


# --- scripts that cannot be run -----------------------------------------------------------------------------------------


def test_a_directory_that_holds_no_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()

    with pytest.raises(ConfigError, match=r"is a directory without a `__main__\.py`"):
        make_script_plan(ScriptSpec(command=("python", "train")), None, {}, tmp_path)

    (tmp_path / "train" / "__main__.py").touch()
    make_script_plan(ScriptSpec(command=("python", "train")), None, {}, tmp_path)


@pytest.fixture
def of_another() -> Iterator[Path]:
    """Return a script that this process may not read, though it is root's."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.touch(mode=0o000)
        Path(folder).chmod(0o755)
        before = os.geteuid()
        os.seteuid(65534 if before == 0 else before)
        try:
            yield script
        finally:
            os.seteuid(before)


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_script_that_the_user_may_not_read_is_refused(start: Literal["fork", "exec"], of_another: Path) -> None:
    with pytest.raises(ConfigError, match=r"not allowed to read .*train\.py"):
        make_script_plan(ScriptSpec(command=("python", "train.py"), start=start), None, {}, of_another.parent)
