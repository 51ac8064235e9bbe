"""What goes into a job script and a step, option by option; whole scripts are in `test_job_script`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm.directives import directives, quote, quote_for_sbatch
from ddp_hpc.cluster.slurm.steps import probe_argv, step_argv
from ddp_hpc.job.launcher import agents_step_argv
from ddp_hpc.launch.render import render
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ContainerSpec, DataSpec, ResourcesSpec, RunSpec, ScriptSpec, SlurmSpec, TrainSpec
from tests.made_launch import launch_of

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.sbatch"))
TRAIN = TrainSpec(global_batch_size=480)


def make_spec(*, slurm: Mapping[str, Any] | None = None, **resources: Any) -> RunSpec:
    return RunSpec(
        name="digits",
        runs_dir="/scratch/runs",
        train=TRAIN,
        resources=ResourcesSpec(**resources),
        slurm=SlurmSpec(**(slurm or {})),
    )


def options(spec: RunSpec, *, chdir: Path = Path("/home/ada")) -> dict[str, str | None]:
    return directives(spec, RunDir(spec.path), chdir=chdir, cpus_per_worker=spec.cpus_per_task)


def script(spec: RunSpec, *, chdir: Path = Path("/home/ada"), **more: Any) -> str:
    return render(spec, RunDir(spec.path), chdir=chdir, python="/usr/bin/python3", **more)


@pytest.mark.parametrize(
    ("resources", "asked"),
    [
        ({}, {"nodes": "1", "ntasks-per-node": "1", "cpus-per-task": "1", "mem": "2G"}),
        ({"nodes": 3, "workers_per_node": 2}, {"nodes": "3", "ntasks-per-node": "2", "mem": "4G"}),
        ({"gpus_per_node": 4}, {"gpus-per-node": "4", "ntasks-per-node": "4", "mem": None}),
        ({"gpus_per_node": 4, "gpu_type": "a100"}, {"gpus-per-node": "a100:4"}),
        ({"gpus_per_node": 4, "workers_per_node": 2}, {"gpus-per-node": "4", "ntasks-per-node": "2"}),
        ({"cpus_per_worker": 6}, {"cpus-per-task": "6"}),
        ({"time_limit_min": 1500}, {"time": "1500"}),
        ({"time_limit_min": None}, {"time": None}),
    ],
)
def test_resources_become_options_of_sbatch(resources: dict[str, Any], asked: dict[str, str | None]) -> None:
    found = options(make_spec(**resources))

    assert {flag: found.get(flag) for flag in asked} == asked


@pytest.mark.parametrize(
    ("slurm", "asked"),
    [
        ({"partition": "gpu", "extra": {"mail_user": "a@b"}}, {"partition": "gpu", "mail-user": "a@b"}),
        ({"partition": ""}, {"partition": ""}),
        ({"requeue": True}, {"requeue": None}),
        ({"requeue": False}, {"no-requeue": None}),
        ({"signal_lead_s": 60}, {"signal": "USR2@60"}),
        ({"extra": {"exclusive": True}}, {"exclusive": None}),
        ({"extra": {"exclusive": "user"}}, {"exclusive": "user"}),
        ({"extra": {"spread_job": 0}}, {"spread-job": "0"}),
        ({"extra": {"mem-per-gpu": "20G"}}, {"mem-per-gpu": "20G"}),
    ],
)
def test_slurms_own_options_bear_its_names(slurm: dict[str, Any], asked: dict[str, str | None]) -> None:
    found = options(make_spec(slurm=slurm))

    assert {flag: found[flag] for flag in asked} == asked


@pytest.mark.parametrize("value", [False, None])
def test_an_option_that_is_set_to_nothing_is_left_out(value: object) -> None:
    assert "exclusive" not in options(make_spec(slurm={"extra": {"exclusive": value}}))


@pytest.mark.parametrize(
    "extra",
    [{"time": "1:00"}, {"job_name": "x"}, {"output": "x"}, {"requeue": True}, {"open-mode": "truncate"},
     {"wait-all-nodes": 1, "wait_all_nodes": 1}],
    ids=lambda extra: next(iter(extra)),
)  # fmt: skip
def test_what_another_key_sets_is_refused_in_either_spelling(extra: dict[str, Any]) -> None:
    spec = make_spec(slurm={"extra": extra}, time_limit_min=5)

    with pytest.raises(ConfigError, match=r"another key sets that option already") as error:
        options(spec)

    assert f"slurm.extra.{next(iter(extra)).replace('-', '_')}" in str(error.value)


@pytest.mark.parametrize(
    ("option", "extra", "sent"),
    [
        ("gpus-per-node", {}, {"gpus-per-node": "a100:4"}),
        ("gres", {}, {"gres": "gpu:a100:4"}),
        ("gpus-per-node", {"gres": "nvme:1", "gpu_bind": "none"}, {"gpus-per-node": "a100:4", "gres": "nvme:1"}),
    ],
)
def test_a_site_chooses_the_one_option_that_asks_for_gpus(
    option: str, extra: dict[str, str], sent: dict[str, str]
) -> None:
    found = options(make_spec(gpus_per_node=4, gpu_type="a100", slurm={"gpu_option": option, "extra": extra}))

    assert {flag: found[flag] for flag in found if flag in {"gres", "gpus-per-node", "gpus"}} == sent


@pytest.mark.parametrize("extra", [{}, {"gres": "gpu:2"}, {"gpus": 2}])
def test_a_site_of_whole_nodes_is_asked_for_no_gpus_but_by_the_users_own_option(extra: dict[str, Any]) -> None:
    found = options(make_spec(gpus_per_node=2, slurm={"gpu_option": "none", "extra": extra}))

    assert (found["ntasks-per-node"], "mem" in found) == ("2", False)
    assert {flag for flag in found if "gpu" in flag or "gres" in flag} == set(extra)


@pytest.mark.parametrize("option", ["gpus-per-node", "gres"])
@pytest.mark.parametrize(
    "extra",
    [{"gres": "gpu:4"}, {"gres": "nvme:1,gpu:a100:4"}, {"gpus": 4}, {"gpus_per_task": 1}, {"gpus-per-socket": 2},
     {"tres_per_node": "gres/gpu:4"}, {"tres_per_task": "gres:gpu:1"}],
    ids=lambda extra: "-".join(map(str, *extra.items())),
)  # fmt: skip
def test_two_options_that_ask_for_gpus_are_refused(option: str, extra: dict[str, Any]) -> None:
    spec = make_spec(gpus_per_node=4, slurm={"gpu_option": option, "extra": extra})

    with pytest.raises(ConfigError, match=r"or set `slurm\.gpu_option=none` to keep only the first"):
        options(spec)


def test_a_type_that_no_option_can_say_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Set `resources\.gpu_type=null`"):
        options(make_spec(gpus_per_node=4, gpu_type="a100", slurm={"gpu_option": "none"}))


@pytest.mark.parametrize("flag", ["time", "gpus_per_node"])
def test_what_no_other_key_sets_is_taken_as_extra(flag: str) -> None:
    assert options(make_spec(slurm={"extra": {flag: "5"}}))[flag.replace("_", "-")] == "5"


def test_slurm_fills_nothing_into_the_path_of_the_output() -> None:
    spec = RunSpec(name="digits", runs_dir="/scratch/50%j/%%")

    assert options(spec)["output"] == "/scratch/50%%j/%%%%/digits/logs/console.log"


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_no_script_keeps_a_rank_from_the_gpus_of_its_peers(golden: Path) -> None:
    assert "--gpus-per-task" not in golden.read_text()


def test_every_line_of_options_stands_before_the_first_command() -> None:
    """Sbatch stops reading options at the first line that is neither a comment nor empty."""
    lines = script(make_spec(slurm={"setup": ("module load cuda",)})).splitlines()

    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    last_option = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert lines[0] == "#!/bin/bash"
    assert last_option < first_command


def test_setup_runs_before_anything_of_ours_and_as_it_was_written() -> None:
    made = script(make_spec(slurm={"setup": ('echo "$HOME" && module load cuda', "set -e")}))

    assert 'echo "$HOME" && module load cuda\nset -e\n' in made
    assert made.index("set -e") < made.index("if ! [[ -r")


@pytest.mark.parametrize("is_point", [False, True])
@pytest.mark.parametrize(
    ("line", "fails"),
    [("false --with x", True), ("cd no-such-directory", True), ("source sourced", False), ("false || true", False)],
)
def test_a_command_of_setup_that_fails_ends_the_job_and_is_named(
    line: str, fails: bool, is_point: bool, tmp_path: Path
) -> None:
    (tmp_path / "sourced").write_text("false\n[[ -f aliases ]] && source aliases\n")
    (tmp_path / "job.sbatch").write_text(script(make_spec(slurm={"setup": (line, "echo went on")})))
    (tmp_path / "point.sbatch").write_text("source job.sbatch\n")  # as a sweep's array starts it

    name = "point.sbatch" if is_point else "job.sbatch"
    done = subprocess.run(["bash", name], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 2  # also where it goes on, as this host has no such run
    assert ("went on" in done.stdout) != fails
    assert (f"so the job ends: {line}. Correct it" in done.stderr) == fails


@pytest.mark.parametrize(
    ("paths", "line"),
    [
        ([], None),
        ([Path("/code")], "export _DDP_HPC_IMPORT_PATH=/code"),
        ([Path("/my code"), Path("/b")], "export _DDP_HPC_IMPORT_PATH='/my code:/b'"),
    ],
    ids=["none", "one", "two"],
)
def test_workers_are_told_where_the_snapshot_of_the_code_is(paths: list[Path], line: str | None) -> None:
    made = script(make_spec(), import_paths=paths)

    found = [found.partition(" #")[0] for found in made.splitlines() if "IMPORT_PATH" in found]
    assert found == ([] if line is None else [line])


@pytest.mark.parametrize("key", ["setup", "modules"])
def test_slurms_commands_stay_on_path_where_modules_take_them_away(key: str, tmp_path: Path) -> None:
    """A site's `module purge` unloads the module of Slurm itself."""
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    purged = "PATH=/nowhere"
    made = script(make_spec(slurm={key: (purged if key == "setup" else "cuda",)}))
    (tmp_path / "job.sbatch").write_text(f"module() {{ {purged}; }}\n{made.partition('if ! [[ -r')[0]}type -P srun\n")

    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", tmp_path / "job.sbatch"], capture_output=True, text=True, check=False, env=environ)

    assert done.stdout.strip() == str(tmp_path / "srun"), done.stderr


def test_a_job_that_does_not_see_its_directory_says_so_and_leaves(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(script(make_spec()))

    done = subprocess.run(["bash", tmp_path / "job.sbatch"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot read the run directory or execute its Python" in done.stderr


@pytest.mark.parametrize("before", [None, "/users/own"], ids=["unset", "set"])
def test_a_job_starts_the_supervisor_whatever_its_directories_are_called(before: str | None, tmp_path: Path) -> None:
    """The script is run by bash, with a Python that tells what it was given."""
    odd = tmp_path / 'it\'s "$HOME" `x` \\ 100% #1'
    spec = RunSpec(name="digits", runs_dir=str(odd))
    run, python = RunDir(spec.path), odd / "python"
    run.path.mkdir(parents=True)
    run.config.touch()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$_DDP_HPC_IMPORT_PATH" "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    made = render(spec, run, [run.snapshot], chdir=odd, python=str(python))
    (tmp_path / "job.sbatch").write_text(made)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own = {} if before is None else {"PYTHONPATH": before}

    done = subprocess.run(
        ["bash", tmp_path / "job.sbatch"], env={**environ, **own}, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    words = ["-m", "ddp_hpc.job.supervisor", str(run.path), "--cluster", "slurm", "--guarded"]
    assert done.stdout.splitlines() == [str(run.snapshot), before or "", *words]


@pytest.mark.parametrize("filtered", [quote, quote_for_sbatch])
@pytest.mark.parametrize(
    "value", ["a\nb", "a\n", Path("/a\nb"), "a\0b", "a\rb", "\r", "a\vb", "a\fb", "a\x85b", "a\u2028b"], ids=repr
)
def test_no_filter_lets_a_second_line_through(filtered: Any, value: object) -> None:
    with pytest.raises(ConfigError, match="it has a line break"):
        filtered(value)


def test_a_directory_of_two_lines_cannot_add_an_option() -> None:
    with pytest.raises(ConfigError, match="it has a line break"):
        script(make_spec(), chdir=Path("/home/ada\n#SBATCH --uid=0"))


@pytest.mark.parametrize(
    ("key", "made"),
    [
        ("slurm.setup", lambda text: SlurmSpec(setup=("module load cuda", text))),
        ("slurm.srun_args", lambda text: SlurmSpec(srun_args=(text,))),
        ("slurm.template", lambda text: SlurmSpec(template=text)),
        ("slurm.extra.switches", lambda text: SlurmSpec(extra={"switches": text})),
        ("resources.gpu_type", lambda text: ResourcesSpec(gpus_per_node=1, gpu_type=text)),
        ("container.binds", lambda text: ContainerSpec(binds=(text,))),
    ],
    ids=lambda key: key if isinstance(key, str) else "",
)
def test_a_value_of_two_lines_is_refused_by_its_key(key: str, made: Callable[[str], object]) -> None:
    assert made("one line")

    for text in ("two\nlines", "nul\0"):
        with pytest.raises(ConfigError, match=f"`{key}` is .* must be one line"):
            made(text)


def test_a_template_of_the_users_own_gets_all_values_and_filters(tmp_path: Path) -> None:
    template = tmp_path / "mine.j2"
    template.write_text(
        "{% for one in directives %}{{ one.flag }}={{ one.value | sbatch }} {% endfor %}\n"
        "{{ name }} {{ version }} {{ setup }} {{ config | sh }} {{ python }} {{ python_path }} {{ run }} "
        "{{ spec.train.global_batch_size }}\n"
    )

    made = script(make_spec(slurm={"template": str(template)}))

    assert made.startswith("job-name=digits nodes=1 ")
    assert made.endswith(" 480\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("#!/bin/bash\n{{ nope }}\n", "'nope' is undefined"),
        ("#!/bin/bash\n{{ spec.nope }}\n", "nope"),
        ("#!/bin/bash\n\n{% if %}\n", "line 3: "),
        ("#!/bin/bash\n{{ name | nope }}\n", "line 2: "),
        ("#!/bin/bash\n{{ name + 1 }}\n", "concatenate"),
        ("#!/bin/bash\n\udcff\n", "can't decode byte 0xff"),
    ],
    ids=["a name", "a key", "syntax", "a filter", "a sum", "no text"],
)
def test_a_broken_template_is_one_error_with_its_file_and_what_is_wrong(text: str, told: str, tmp_path: Path) -> None:
    template = tmp_path / "mine.j2"
    template.write_text(text, errors="surrogateescape")

    with pytest.raises(ConfigError) as error:
        script(make_spec(slurm={"template": str(template)}))

    assert str(error.value).startswith(f"The job script's template (`slurm.template`) cannot be rendered: {template}")
    assert told in str(error.value)


def test_the_same_input_is_the_same_script() -> None:
    assert script(make_spec()) == script(make_spec())


def test_shellcheck_finds_what_is_not_quoted(tmp_path: Path) -> None:
    """The check of the golden scripts can fail."""
    path = tmp_path / "job.sbatch"
    path.write_text(script(make_spec()) + "cd $HOME/x\n")

    shellcheck = Path(sys.executable).parent / "shellcheck"  # installed with the tools, which need not be on PATH
    done = subprocess.run([shellcheck, "-s", "bash", path], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "SC2086" in done.stdout


@pytest.mark.parametrize(
    ("tasks_per_node", "ntasks", "cpus"), [(1, 3, 20), (4, 12, 5), (2, 6, 10)], ids=["a node", "a worker", "between"]
)
def test_a_step_names_nodes_tasks_and_cpus_however_they_are_dealt(tasks_per_node: int, ntasks: int, cpus: int) -> None:
    """Since 22.05 srun does not take `--cpus-per-task` from the job; alone, `--ntasks-per-node` may be ignored."""
    spec = RunSpec(
        name="digits",
        train=TRAIN,
        data=DataSpec(num_workers=4),
        resources=ResourcesSpec(nodes=3, workers_per_node=4),
    )

    argv = step_argv(spec, spec.resources.world, tasks_per_node=tasks_per_node, cpus_per_worker=spec.cpus_per_task)

    assert argv[:5] == [
        "srun",
        "--nodes=3",
        f"--ntasks={ntasks}",
        f"--ntasks-per-node={tasks_per_node}",
        f"--cpus-per-task={cpus}",
    ]
    assert "--distribution=block" in argv
    assert "--wait=60" in argv


def test_the_ranks_of_a_script_have_as_long_as_they_take_after_the_first_has_ended_those_of_a_recipe_a_minute() -> None:
    """Without `--wait=0`, srun kills rank zero of a script that evaluates alone at its end."""
    for workload, wait in (({"script": ScriptSpec(command=("python", "train.py"))}, 0), ({"train": TRAIN}, 60)):
        spec = RunSpec(name="digits", resources=ResourcesSpec(nodes=2, workers_per_node=2), **workload)

        assert f"--wait={wait}" in agents_step_argv(launch_of(spec, RunDir(Path("/runs/digits"))))


def test_a_question_to_the_nodes_waits_for_no_other_step() -> None:
    argv = probe_argv(4)

    assert {"--overlap", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1"} <= set(argv)
