"""Job scripts, byte for byte: a change in one shows in `golden/`, and must be meant."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc import __version__
from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm.directives import directives, quote, quote_for_sbatch
from ddp_hpc.launch.render import render
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import DataSpec, ResourcesSpec, RunSpec, SlurmSpec, TrainSpec
from tests.made_run import make_run

TRAIN = TrainSpec(global_batch_size=96)
GOLDEN = Path(__file__).parent / "golden"
SPECS = {
    "one_node": RunSpec(name="digits", runs_dir="/scratch/ada/runs"),
    "every_option": RunSpec(
        name="imagenet",
        runs_dir="/scratch/ada/runs",
        data=DataSpec(num_workers=6),
        resources=ResourcesSpec(nodes=4, gpus_per_node=4, gpu_type="a100", mem_gb=200, time_limit_min=240),
        slurm=SlurmSpec(
            partition="gpu",
            account="abc123",
            qos="long",
            constraint="a100&nvlink",
            exclude="node[7-9]",
            nodelist="node[1-4]",
            dependency="afterok:12",
            requeue=False,
            signal_lead_s=300,
            extra={
                "switches": 1,
                "exclusive": True,
                "spread_job": False,
                "gpu_bind": "none",
                "mail_type": "END,FAIL",
                "reservation": "maint",
                "comment": 'it\'s a "test" # %j $HOME \\ `x`; exit',
            },
        ),
    ),
    "setup_and_odd_paths": RunSpec(
        name="odd",
        runs_dir="/scratch/ada's runs/100%",
        slurm=SlurmSpec(modules=("cuda/12.4", "it's"), setup=("ulimit -l unlimited", 'export NCCL_DEBUG="INFO"')),
    ),
}


def script(spec: RunSpec) -> str:
    run = RunDir(Path(spec.runs_dir) / spec.name)
    chdir, code = Path("/scratch/ada/my code"), run.path / "snapshot"
    made = render(spec, run, [code], chdir=chdir, python="/scratch/ada/venv/bin/python")
    return made.replace(f"ddp-hpc {__version__}", "ddp-hpc VERSION")


@pytest.mark.parametrize("name", SPECS)
def test_a_script_is_the_golden_one_to_the_byte(name: str) -> None:
    assert script(SPECS[name]) == (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "check",
    [("bash", "-n"), (str(Path(sys.executable).parent / "shellcheck"), "--shell=bash")],
    ids=["bash", "shellcheck"],
)
def test_golden_scripts_are_sound_shell(name: str, check: tuple[str, ...]) -> None:
    done = subprocess.run([*check, GOLDEN / f"{name}.sbatch"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("setup", "python", "code", "is_told"),
    [
        ((), "", 0, False),
        (("kill -USR2 $$",), "", 0, True),
        (("kill -USR1 $$",), "", 0, True),
        ((), "kill -USR2 $$; kill -USR1 $$", 0, False),
        (("kill -TERM $$",), "", -signal.SIGTERM, False),
    ],
    ids=["undisturbed", "told in setup", "told by a user in setup", "told while Python starts", "ended"],
)
def test_a_script_that_is_told_to_leave_goes_on_and_passes_it_on(
    tmp_path: Path, setup: tuple[str, ...], python: str, code: int, *, is_told: bool
) -> None:
    run, interpreter = make_run(tmp_path), tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\n{python}\necho "$@"\n')
    interpreter.chmod(0o755)
    spec = RunSpec(name="digits", runs_dir=str(tmp_path), slurm=SlurmSpec(setup=setup))
    made = render(spec, run, chdir=tmp_path, python=str(interpreter))

    done = subprocess.run(["bash", "-c", made], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.endswith("--guarded --stop-requested\n" if is_told else "--guarded\n" if code == 0 else "")


@dataclass
class Guarded:
    """The shell of a job whose supervisor, `sleep` and `scontrol` are ours; what they were called with is in `calls`."""

    folder: Path
    supervisor: str
    """What a supervisor does, in shell."""

    def start(self) -> subprocess.Popen[str]:
        run = RunDir(self.folder / "digits")
        if not run.path.exists():
            make_run(self.folder)
        spec = RunSpec(name="digits", runs_dir=str(self.folder))
        python = self._put(
            "python", f'words="$*"; echo "supervisor${{words##*--guarded}}" >> {self.calls}\n{self.supervisor}'
        )
        for name in ("sleep", "scontrol"):
            self._put(name, f'echo "{name} $*" >> {self.calls}')
        made = render(spec, run, chdir=self.folder, python=str(python))
        environ = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        return subprocess.Popen(["bash", "-c", made], env=environ, stderr=subprocess.PIPE, text=True)

    def see_through(self) -> tuple[int, str, list[str]]:
        process = self.start()
        said = process.communicate(timeout=120)[1]
        return process.returncode, said, self.calls.read_text().splitlines()

    @property
    def calls(self) -> Path:
        return self.folder / "calls"

    def _put(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return path


@pytest.mark.parametrize("code", [0, 2, 96, 97, 99, exit_codes.GAVE_UP])
def test_a_supervisor_that_has_decided_is_not_started_again(tmp_path: Path, code: int) -> None:
    ended, _, calls = Guarded(tmp_path, f"exit {code}").see_through()

    assert ended == (exit_codes.FAILED if code == exit_codes.GAVE_UP else code)
    assert calls == ["supervisor"]


@pytest.mark.parametrize(
    ("death", "after"), [("kill -9 $$", 137), ("exit 1", 1), (f"exit {exit_codes.RESTART_SUPERVISOR}", 94)]
)
def test_a_supervisor_that_dies_is_started_again_and_is_given_the_reason(
    tmp_path: Path, death: str, after: int
) -> None:
    once = f"[[ -e {tmp_path}/died ]] && exit 99; touch {tmp_path}/died; {death}"

    ended, said, calls = Guarded(tmp_path, once).see_through()

    assert (ended, calls) == (99, ["supervisor", "sleep 1", f"supervisor --after={after}"])
    assert f"supervisor process exited unexpectedly with code {after}" in said


def test_a_job_whose_supervisors_always_die_goes_back_into_the_queue_once(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "kill -9 $$")

    first = guarded.see_through()
    guarded.calls.unlink()
    second = guarded.see_through()

    assert (first[0], second[0]) == (1, 1)
    assert first[2].count("supervisor --after=137") == len(exit_codes.GUARD_RESTART_PAUSES_S)
    assert first[2][-2:] == ["scontrol requeue 7", "sleep 1"]
    assert not any(call.startswith("scontrol") for call in second[2])
    assert "failed in this start of the job and in the one before, so the run ends" in second[1]
    assert "supervisor process exited unexpectedly with code 137; the job starts it again in 60 s" in first[1]
    assert "so the job does not start it again on this node" in first[1]


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGUSR2, "USR2"), (signal.SIGUSR1, "USR2"), (signal.SIGTERM, "TERM"), (signal.SIGHUP, "TERM")],
)
def test_a_signal_for_the_jobs_shell_reaches_the_supervisor_and_the_next_one(
    tmp_path: Path, number: int, word: str
) -> None:
    python = (
        "import os, signal, sys\n"
        "numbers = {signal.SIGUSR2, signal.SIGTERM}\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, numbers)\n"
        "for one in numbers: signal.signal(one, signal.SIG_DFL)\n"
        f"print('listens', file=open({str(tmp_path / 'calls')!r}, 'a'))\n"
        "heard = signal.Signals(signal.sigwait(numbers)).name\n"
        f"print(heard, file=open({str(tmp_path / 'calls')!r}, 'a'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "listener.py").write_text(python)
    guarded = Guarded(
        tmp_path, f'[[ "$*" == *--stop-requested* ]] && exit 99\nexec {sys.executable} {tmp_path}/listener.py'
    )
    process = guarded.start()
    while not (guarded.calls.exists() and "listens" in guarded.calls.read_text()):
        assert process.poll() is None
        time.sleep(0.01)

    process.send_signal(number)
    process.communicate(timeout=60)

    assert process.returncode == 99
    calls = guarded.calls.read_text().splitlines()
    assert calls == ["supervisor", "listens", f"SIG{word}", "sleep 1", "supervisor --stop-requested --after=137"]


@pytest.mark.parametrize(("has", "code"), [("cuda/12.4", 0), ("cuda/11.0", 2)])
def test_a_module_that_is_not_there_ends_the_job_with_its_name(has: str, code: int) -> None:
    whole = script(RunSpec(name="x", slurm=SlurmSpec(modules=("cuda/12.4",))))
    modules = whole.partition("ddp-hpc VERSION")[2].partition("\n\n")[2].partition("if ! [[ -r")[0]
    function = f"module() {{ [[ $1 == purge || $2 == {has} ]]; }}"

    done = subprocess.run(["bash", "-c", f"{function}\n{modules}"], capture_output=True, text=True, check=False)

    assert done.returncode == code
    assert ("slurm.modules (module avail lists the valid ones): cuda/12.4" in done.stderr) is (code == 2)


def test_a_node_without_modules_is_told_apart_from_a_module_that_is_missing() -> None:
    whole = script(RunSpec(name="x", slurm=SlurmSpec(modules=("cuda/12.4",))))
    modules = whole.partition("ddp-hpc VERSION")[2].partition("\n\n")[2].partition("if ! [[ -r")[0]

    done = subprocess.run(
        ["bash", "-c", modules.replace("/etc/profile", "/dev/null")],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "has no module command" in done.stderr


@pytest.mark.parametrize(
    "text", ["plain", "two words", "it's", '"', "$HOME", "\\", "`x`", "a;b", "#", "%j", "~", "*", "é"]
)
def test_a_quoted_value_is_one_word_that_the_shell_leaves_alone(text: str) -> None:
    done = subprocess.run(["bash", "-c", f"printf %s {quote(text)}"], capture_output=True, text=True, check=True)

    assert done.stdout == text
    assert shlex.split(quote_for_sbatch(text).replace("\\\\", "\\")) == [text]


@pytest.mark.parametrize("text", ["two\nlines", "nul\0"])
def test_a_value_of_several_lines_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="one line"):
        quote(text)


@pytest.mark.parametrize("key", ["account", "partition", "constraint"])
def test_an_option_of_several_lines_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"slurm.{key}"):
        SlurmSpec(**{key: "a\n#SBATCH --uid=0"})  # type: ignore[arg-type]  # one of many str keys


def test_an_option_that_is_set_twice_is_refused() -> None:
    spec = RunSpec(name="twice", slurm=SlurmSpec(extra={"nodes": 3}))

    with pytest.raises(ConfigError, match=r"slurm\.extra\.nodes"):
        directives(spec, RunDir(spec.path), chdir=Path("/"), cpus_per_worker=1)


@pytest.mark.parametrize("flag", ["a b", "x;rm", "--nodes", ""])
def test_a_flag_that_is_none_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="flag of sbatch"):
        SlurmSpec(extra={flag: 1})


@pytest.mark.parametrize("flag", ["clusters", "M"])
def test_a_job_for_another_cluster_is_refused_for_nobody_would_find_it(flag: str) -> None:
    with pytest.raises(ConfigError, match="submit the run from a login node of that cluster"):
        SlurmSpec(extra={flag: "other"})


@pytest.mark.parametrize(
    ("template", "told"), [("{% for", "line 1"), ("one\n{{ nobody }}\n", "nobody"), (None, "No such file")]
)
def test_a_template_that_cannot_be_filled_is_one_error_with_its_place(
    tmp_path: Path, template: str | None, told: str
) -> None:
    path = tmp_path / "mine.j2"
    if template is not None:
        path.write_text(template)

    with pytest.raises(ConfigError, match=told) as error:
        script(RunSpec(name="own", slurm=SlurmSpec(template=str(path))))

    assert "mine.j2" in str(error.value)


@pytest.mark.parametrize(
    ("resources", "gb"),
    [({}, 2), ({"workers_per_node": 3}, 6), ({"gpus_per_node": 2}, None), ({"mem_gb": 7, "workers_per_node": 3}, 7)],
)
def test_memory_is_asked_for_where_the_clusters_default_would_be_too_little(
    resources: dict[str, Any], gb: int | None
) -> None:
    spec = RunSpec(name="memory", resources=ResourcesSpec(**resources), train=TRAIN)

    made = directives(spec, RunDir(spec.path), chdir=Path("/"), cpus_per_worker=1)

    assert made.get("mem") == (None if gb is None else f"{gb}G")
    assert "gpus-per-task" not in made
