"""`ddp-hpc certify --cluster slurm`: what is sent, what is shown, and what the job's end means. Slurm's commands are shell scripts here."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.cluster.slurm.queries import JobRecord
from ddp_hpc.prove.certify.certificate import CertifyPlan
from ddp_hpc.prove.certify.in_job import plan_text, read_plan, unproven
from ddp_hpc.run.spec import ResourcesSpec, RunSpec, ScriptSpec
from tests.unit.fake_slurm import FakeSlurm

SBATCH = """
if [ "$1" = --test-only ]; then exit 0; fi
job=$(dirname "$(dirname "$(sed -n 's/^#SBATCH --output=//p' "$1")")")
{job}
echo Submitted batch job 7
"""
CERTIFIES = """
echo "... the job says this" >> "$job/logs/console.log"
echo '{"is_good": false}' > "$(dirname "$job")/certificate.json"
echo 1 > "$job/exit-code"
"""
SCRIPT = ("--", "python", "train.py", "--lr=0.1")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Have a cluster here, and a script; the test's own directory may be one that other nodes do not see."""
    slurm = FakeSlurm(tmp_path)
    slurm.has("srun", "true")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.setattr("ddp_hpc.launch.submission.preflight.capacity.PRIVATE_PLACES", ())
    return slurm


def test_one_job_on_one_node_gets_the_keys_of_a_run_and_its_output_and_exit_code_are_those_of_the_command(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.has("sbatch", SBATCH.replace("{job}", CERTIFIES))
    keys = [
        "resources.time_limit_min=30",
        "slurm.partition=gpu",
        "slurm.modules=[cuda/12]",
        "slurm.setup=['ulimit -n']",
    ]

    code = main(["certify", "--cluster", "slurm", "--json", "--faults=term", *keys, *SCRIPT])

    out, err = capsys.readouterr()
    assert code == 1, err
    assert json.loads(out) == {"is_good": False}
    assert "... job 7 is submitted; Ctrl-C cancels it\n... the job says this\n" in err
    (script,) = tmp_path.glob("runs/certify-train-*/job/job.sbatch")
    lines = set(script.read_text().splitlines())
    asked = {"nodes=1", "ntasks-per-node=2", "time=30", "partition=gpu", "no-requeue", f"chdir={tmp_path}"}
    assert {f"#SBATCH --{word}" for word in asked} <= lines
    assert {"ulimit -n", "module purge"} <= lines
    assert not any("--signal" in line for line in lines)
    plan = read_plan(script.parent / "plan.json")
    assert (plan.command, plan.faults, plan.settings, plan.folder) == (
        list(SCRIPT[1:]),
        ["term"],
        keys,
        script.parents[1],
    )
    shellcheck = Path(sys.executable).parent / "shellcheck"
    checked = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_a_job_that_meets_its_time_limit_proves_nothing_and_the_key_to_raise_is_named(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.has("sbatch", SBATCH.replace("{job}", ""))
    slurm.knows_job(state="TIMEOUT")

    code = main(["certify", "--cluster", "slurm", "resources.time_limit_min=10", *SCRIPT])

    assert code == 2
    assert (
        "Job 7 reached its time limit before the certification was done, so nothing is proven. Ask for more time: "
        "`resources.time_limit_min=40` (the job had 10 min)"
    ) in capsys.readouterr().err


def test_ctrl_c_cancels_the_job_and_says_so(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.has("sbatch", SBATCH.replace("{job}", ""))
    slurm.has("scontrol", '[ "$3" = job ] && kill -INT $PPID; true')

    code = main(["certify", "--cluster", "slurm", *SCRIPT])

    assert code == 130
    assert "... job 7 was cancelled, so nothing is proven\n" in capsys.readouterr().out
    assert slurm.orders("scancel") == ["scancel 7"]


def test_a_refused_job_leaves_nothing_behind(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.has("sbatch", 'echo "sbatch: error: Invalid account" >&2; exit 1')

    assert main(["certify", "--cluster", "slurm", *SCRIPT]) == 2

    assert not list(tmp_path.glob("runs/certify-*"))


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_several_nodes_are_refused_and_the_drill_is_named(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--cluster", cluster, "resources.nodes=2", *SCRIPT]) == 2

    assert "`resources.nodes` is 2, but certify runs the script on one node" in capsys.readouterr().err


def test_a_shell_in_a_job_is_asked_to_certify_there(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.knows_job()
    job = {"JOB_ID": "7", "JOB_NODELIST": "node[1-2]", "TASKS_PER_NODE": "2(x2)"}
    for name, value in {**{f"SLURM_{key}": value for key, value in job.items()}, "SLURMD_NODENAME": "node1"}.items():
        monkeypatch.setenv(name, value)

    assert main(["certify", "--cluster", "slurm", *SCRIPT]) == 2

    assert "runs on a node of job 7 already" in capsys.readouterr().err


def test_the_runs_in_the_job_get_what_the_site_sets_for_its_partition(slurm: FakeSlurm, tmp_path: Path) -> None:
    """They are runs of one machine, which do not read the settings of partitions."""
    slurm.has("sbatch", SBATCH.replace("{job}", CERTIFIES))
    site = tmp_path / "site.yaml"
    site.write_text(
        "partitions:\n  gpu:\n    resources: {gpus_per_node: 4, gpu_type: a100}\n    env: {NCCL_DEBUG: WARN}\n"
    )
    words = ["--site=site.yaml", "slurm.partition=gpu", "resources.workers_per_node=2", "env.NCCL_DEBUG=INFO"]

    assert main(["certify", "--cluster", "slurm", *words, *SCRIPT]) == 1

    (place,) = tmp_path.glob("runs/certify-train-*/job")
    settings = read_plan(place / "plan.json").settings
    assert sorted(settings) == sorted(
        ["resources.gpus_per_node=4", 'resources.gpu_type="a100"', *words[1:], f"--site={site}"]
    )
    assert "#SBATCH --gpus-per-node=a100:4\n#" in (place / "job.sbatch").read_text()


@pytest.mark.usefixtures("slurm")
def test_a_host_that_has_slurm_is_named_as_the_one_that_would_do_all_the_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["certify", "--", "python", "../elsewhere.py"]) == 2

    assert "to have them in a job on a compute node: `--cluster slurm`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (
            "PREEMPTED",
            "was preempted before the certification was done, so nothing is proven. Call certify again, if you can with a",
        ),
        ("CANCELLED by 1000", "was cancelled before the certification was done"),
        ("NODE_FAIL", "lost a node before the certification was done"),
        ("OUT_OF_MEMORY", "(`resources.mem_gb`)"),
        ("TIMEOUT", "`resources.time_limit_min=240` (the job had 60 min)"),
        ("FAILED", "failed before the certification was done, so nothing is proven. Read console.log"),
        (
            None,
            "Slurm no longer knows job 7, and the job has written no exit code, so nothing is proven. Read console.log",
        ),
    ],
)
def test_a_job_that_ended_too_early_is_explained(state: str | None, expected: str) -> None:
    spec = RunSpec(name="train", script=ScriptSpec(command=("python", "train.py")), resources=ResourcesSpec())
    job = None if state is None else JobRecord(job_id="7", state=state, time_limit_min=60.0)

    assert expected in unproven("7", job, spec, Path("console.log"))


def test_a_plan_reads_as_it_was_written(tmp_path: Path) -> None:
    plan = CertifyPlan(
        command=["python", "it's.py"],
        settings=["env.A=line\nline"],
        faults=["term"],
        work_dir=tmp_path,
        folder=tmp_path / "runs" / "certify-x",
        left_out=(tmp_path / "runs",),
        may_change=(tmp_path / "cache", tmp_path / "x"),
        seed=3,
        patience_s=60.0,
        is_kept=True,
    )
    (tmp_path / "plan.json").write_text(plan_text(plan))

    assert read_plan(tmp_path / "plan.json") == plan


class _Interrupted(io.StringIO):
    """A standard output that cannot print that the job is submitted."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str, /) -> int:
        if "is submitted" in text:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left", "out"), 1)])
def test_no_job_stays_where_the_command_ends_before_it_can_print_the_jobs_number(
    error: BaseException, code: int, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.has("sbatch", SBATCH.replace("{job}", ""))
    out = _Interrupted(error)
    monkeypatch.setattr(sys, "stdout", out)

    assert main(["certify", "--cluster", "slurm", *SCRIPT]) == code

    assert slurm.orders("scancel") == ["scancel 7"]
    assert "job 7 was cancelled" in out.getvalue()


def test_a_signal_that_comes_while_sbatch_works_leaves_the_jobs_directory_and_says_how_to_find_the_job(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.has("sbatch", SBATCH.replace("{job}", "kill -TERM $PPID"))

    assert main(["certify", "--cluster", "slurm", *SCRIPT]) == 130

    assert list(tmp_path.glob("runs/certify-*/job/job.sbatch"))
    assert "find it with `squeue --me --name=certify-train`" in capsys.readouterr().out
