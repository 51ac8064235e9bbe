"""Site profiles: which one counts, what it says for which runs, and what a cluster proposes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc import __version__
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.cli.runs import chosen_runs_dir
from ddp_hpc.cluster import containers
from ddp_hpc.cluster.rendezvous.interfaces import Interface
from ddp_hpc.cluster.slurm.queries import ClusterConfig, NodeShape, Partition, chosen_partition, parse_node_shapes
from ddp_hpc.job.launcher import agents_step_argv
from ddp_hpc.launch.render import render
from ddp_hpc.run.config.resolve import flat_spec, resolve, resolve_key
from ddp_hpc.run.config.site import examples_dir, find_profile, known_profiles, read_profile
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.diagnose.site_draft import Survey, propose, proposed_name, survey
from tests.made_launch import launch_of, paths_of

GOLDEN = Path(__file__).parent / "golden"
PARTITIONED = """
site: {about: "a cluster", hosts: [login*], scratch: /scratch/$USER, no_write: [$HOME]}
runs_dir: /scratch/$USER/runs
slurm: {partition: gpu, setup: ["export TMPDIR=$HOME/tmp"]}
env: {NCCL_NET: IB}
partitions:
  gpu: {resources: {gpus_per_node: 4}, restart: {hang_timeout_s: 300}}
  cpu: {resources.cpus_per_worker: 2}
"""


@pytest.fixture
def user(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a user without profiles."""
    return {"HOME": str(tmp_path), "USER": "ada"}


def write_profile(user: dict[str, str], name: str, text: str) -> Path:
    path = Path(user["HOME"], ".config/ddp_hpc/sites", f"{name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def run_file(folder: Path, text: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


# --- which one ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "host", "counts"),
    [
        ("[login*]", "login3", True),
        ("[login*]", "login3.cluster.example.org", True),
        ("login*", "login3", True),
        ("login*", "node17", False),
        ("[uan0?, login*]", "uan01", True),
        ("['*.cluster.example.org']", "login3.cluster.example.org", True),
        ("['*.cluster.example.org']", "login3.other.example.org", False),
        ("[login*]", "node17", False),
        ("[]", "login3", False),
    ],
)
def test_a_profile_counts_on_the_hosts_it_names(hosts: str, host: str, counts: bool, user: dict[str, str]) -> None:
    path = write_profile(user, "mine", f"site: {{hosts: {hosts}}}")

    found = find_profile(user, host=lambda: host)

    assert (found is not None and found.path == path) is counts


def test_a_profile_without_hosts_counts_when_it_is_named(user: dict[str, str]) -> None:
    path = write_profile(user, "mine", "seed: 7")

    by_name = find_profile(user, "mine")
    by_path = find_profile(user, str(path))
    by_variable = find_profile({**user, "DDP_HPC_SITE_PROFILE": "mine"})

    assert by_name is not None
    assert by_path is not None
    assert by_variable is not None
    assert by_name.site.name == "mine"
    assert by_name.why != by_variable.why
    assert {by_name.path, by_path.path, by_variable.path} == {path}


def test_the_one_for_this_host_comes_before_the_one_for_all(user: dict[str, str]) -> None:
    general = Path(user["HOME"], ".config/ddp_hpc/site.yaml")
    mine = write_profile(user, "mine", "site: {hosts: [login*]}")
    general.write_text("seed: 7")

    here, elsewhere = (find_profile(user, host=lambda name=name: name) for name in ("login1", "laptop"))  # type: ignore[misc]

    assert here is not None
    assert elsewhere is not None
    assert (here.path, elsewhere.path) == (mine, general)


def test_two_profiles_for_one_host_are_an_error_that_names_both(user: dict[str, str]) -> None:
    write_profile(user, "one", "site: {hosts: [login*]}")
    write_profile(user, "two", "site: {hosts: ['*']}")

    with pytest.raises(ConfigError, match=r"one.yaml \('login\*'\) and two.yaml"):
        find_profile(user, host=lambda: "login1")


def test_an_empty_variable_switches_profiles_off(user: dict[str, str]) -> None:
    write_profile(user, "mine", "site: {hosts: ['*']}")

    assert find_profile({**user, "DDP_HPC_SITE_PROFILE": ""}) is None


@pytest.mark.parametrize("named", ["nowhere", "./nowhere.yaml"])
def test_a_named_profile_that_does_not_exist_is_an_error(named: str, user: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        find_profile(user, named)


def test_an_own_profile_hides_an_example_of_the_same_name(user: dict[str, str]) -> None:
    path = write_profile(user, "slingshot", "")

    assert known_profiles(user)["slingshot"] == path
    assert known_profiles(user)["infiniband"].parent == examples_dir()


# --- what it says ------------------------------------------------------------------------------------------------------


def test_a_partitions_defaults_hold_for_runs_in_it_alone(tmp_path: Path, user: dict[str, str]) -> None:
    path, file = write_profile(user, "mine", PARTITIONED), run_file(tmp_path)

    gpu = resolve(file, [], user, site="mine")
    cpu = resolve(file, ["slurm.partition=cpu"], user, site="mine")
    other = resolve(file, ["slurm.partition=debug"], user, site="mine")
    here = resolve(file, [], user, site="mine", is_for_slurm=False)

    assert [one.spec.resources.gpus_per_node for one in (gpu, cpu, other, here)] == [4, None, None, None]
    assert cpu.spec.resources.cpus_per_worker == 2
    assert gpu.sources["resources.gpus_per_node"] == f"site profile {path}, partition gpu"
    assert gpu.sources["env.NCCL_NET"] == f"site profile {path}"


def test_runs_in_one_of_several_partitions_have_the_defaults_on_which_these_agree(
    tmp_path: Path, user: dict[str, str]
) -> None:
    a = "a: {resources: {gpus_per_node: 4, cpus_per_worker: 2}}"
    write_profile(user, "mine", f"partitions: {{{a}, b: {{resources: {{gpus_per_node: 4, cpus_per_worker: 3}}}}}}")
    file = run_file(tmp_path)

    both, other = (resolve(file, [f"slurm.partition={of}"], user, site="mine").spec.resources for of in ("a,b", "a,c"))

    assert (both.gpus_per_node, both.cpus_per_worker) == (4, None)
    assert (other.gpus_per_node, other.cpus_per_worker) == (None, None)
    listed = [partition("x", is_default=True), partition("b"), partition("a")]
    chosen = [chosen_partition(name, listed) for name in (None, "a,b", "no,b", "no")]
    assert [one and one.name for one in chosen] == ["x", "a", "b", None]


def test_what_the_user_says_wins_over_the_partition(tmp_path: Path, user: dict[str, str]) -> None:
    write_profile(user, "mine", PARTITIONED)

    found = resolve(run_file(tmp_path, "resources: {gpus_per_node: 1}"), ["env.NCCL_NET=null"], user, site="mine")

    assert found.spec.resources.gpus_per_node == 1
    assert found.spec.environ == {}


def test_variables_stand_in_paths_and_nowhere_else(tmp_path: Path, user: dict[str, str]) -> None:
    write_profile(user, "mine", PARTITIONED)

    found = resolve(run_file(tmp_path), [], user, site="mine")

    assert found.spec.runs_dir == "/scratch/ada/runs"
    assert found.spec.slurm.setup == ("export TMPDIR=$HOME/tmp",)


def test_runs_are_looked_for_where_the_profile_keeps_them(user: dict[str, str]) -> None:
    write_profile(user, "mine", PARTITIONED)

    assert resolve_key("runs_dir", {**user, "DDP_HPC_SITE_PROFILE": "mine"}) == "/scratch/ada/runs"


def test_a_run_where_the_site_wants_none_is_refused_with_where_to_go(tmp_path: Path, user: dict[str, str]) -> None:
    write_profile(user, "mine", PARTITIONED)

    with pytest.raises(ConfigError, match=r"forbids runs in .*runs_dir=/scratch/ada/runs"):
        resolve(run_file(tmp_path), [f"runs_dir={tmp_path}/runs"], user, site="mine")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("runs_dir: $NOWHERE/runs", r"NOWHERE is not set"),
        ("runs_dir: /a/$/b", r"Write `\$\$` for"),
        ("site: {host: [a]}", r"`site.host` .*line 1.* Did you mean `site.hosts`"),
        ("site: {hosts: 5}", r"`site.hosts` .* must be a list of texts"),
        ("site: {name: a b}", "`site.name`"),
        ("site: 3", "it must be a section"),
        ("partitions: [gpu]", "it must be a section"),
        ("partitions: {gpu: 4}", r"`partitions.gpu` is 4"),
        ("partitions: {gpu: {slurm: {partition: cpu}}}", "selects this section"),
        ("partitions: {gpu: {resources: {gpus: 4}}}", r"`resources.gpus` .*partition gpu|`resources.gpus` "),
        ("train: {lrr: 1}", "Did you mean `train.lr`"),
        ("- a", "must have keys and values"),
    ],
)
def test_what_a_profile_cannot_say_is_named_with_its_place(text: str, told: str, user: dict[str, str]) -> None:
    path = write_profile(user, "mine", text)

    with pytest.raises(ConfigError, match=told) as caught:
        find_profile(user, "mine")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("env.RANK=0", "sets RANK for each worker"),
        ("env.SLURM_JOB_ID=1", "sets SLURM_JOB_ID"),
        ("env.a-b=1", "letters, digits and `_`"),
    ],
)
def test_a_variable_that_cannot_be_set_is_refused(
    setting: str, told: str, tmp_path: Path, user: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(run_file(tmp_path), [setting], user)


@pytest.mark.parametrize("value", ["[a]", "true", "{a: 1}", "12.10"])
def test_a_variable_in_a_file_is_text_or_a_whole_number(value: str, tmp_path: Path, user: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"`env.NCCL_DEBUG"):
        resolve(run_file(tmp_path, f"env: {{NCCL_DEBUG: {value}}}"), [], user)


@pytest.mark.parametrize("text", ["010", "1e-3", "true", "[a]", "a b", "", "none", "0x10", "~/x"])
def test_a_variable_that_is_typed_keeps_every_character(text: str, tmp_path: Path, user: dict[str, str]) -> None:
    by_word = resolve(run_file(tmp_path), [f"env.OMP_STACKSIZE={text}"], user).spec.environ
    by_variable = resolve(run_file(tmp_path), [], {**user, "DDP_HPC__ENV__OMP_STACKSIZE": text}).spec.environ

    assert by_word == by_variable == {"OMP_STACKSIZE": text}


# --- examples and proposals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(examples_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_says_what_it_is_and_counts_nowhere_by_itself(path: Path, user: dict[str, str]) -> None:
    profile = read_profile(path, "", {**user, "SCRATCH": "/scratch/ada"})

    assert profile.site.about.startswith("example: ")
    assert profile.site.hosts == ()
    assert profile.settings


@pytest.mark.parametrize("path", sorted(examples_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_what_an_example_makes_of_a_run_is_the_golden_text(
    path: Path, tmp_path: Path, user: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job script, the command that it starts on the nodes, and the variables of the job."""
    monkeypatch.setattr(containers, "PACKAGE_DIR", Path("/venv/ddp_hpc"))
    (tmp_path / "net.yaml").write_text("container: {image: /images/torch.sif}\nresources: {nodes: 2}\n")
    settings = ["resources.workers_per_node=2", "runs_dir=/scratch/ada/runs"]
    spec = resolve(tmp_path / "net.yaml", settings, {**user, "SCRATCH": "/scratch/ada"}, site=path.stem).spec
    run = RunDir(spec.path)
    script = render(spec, run, chdir=Path("/home/ada"), python="/venv/bin/python")
    inside = containers.container_setup(spec, run, paths_of(spec, Path("/home/ada")))
    assert inside is not None
    wrapper = containers.command_wrapper(
        inside, containers.find_runtime(spec, {"PATH": str(runtimes(tmp_path))}), "python3"
    )
    made = [
        " ".join(agents_step_argv(launch_of(spec, run, wrapper))),
        *(f"{name}={value}" for name, value in spec.environ.items()),
        script.replace(f"ddp-hpc {__version__}", "ddp-hpc VERSION"),
    ]

    assert "\n".join(made) + "\n" == (GOLDEN / f"{path.stem}.site").read_text(encoding="utf-8")


def runtimes(folder: Path) -> Path:
    """Return a directory with programs of these names, to be found, not to be run."""
    for name in ("apptainer", "singularity"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


def partition(name: str, **facts: Any) -> Partition:
    known: dict[str, Any] = {"is_default": False, "is_up": True, "total_nodes": 4}
    known |= {"max_time_min": 1440.0, "default_time_min": None, "preempt_mode": "OFF", "grace_time_s": 0, "num_gpus": 0}
    return Partition(name=name, **{**known, **facts})


SURVEY = Survey(
    host="login02.example.org",
    cluster=ClusterConfig(name="hydra"),
    partitions=[
        partition("gpu", is_default=True),
        partition("gpu-low", preempt_mode="REQUEUE", grace_time_s=120),
        partition("mixed"),
        partition("closed", is_up=False),
    ],
    shapes=[
        NodeShape(partition="gpu", num_nodes=4, num_cpus=64, mem_mb=524288, num_gpus=4, gpu_type="a100"),
        NodeShape(partition="gpu-low", num_nodes=4, num_cpus=64, mem_mb=524288, num_gpus=4),
        NodeShape(partition="mixed", num_nodes=4, num_cpus=64, mem_mb=524288, num_gpus=4),
        NodeShape(partition="mixed", num_nodes=9, num_cpus=32, mem_mb=131072, num_gpus=0),
    ],
    accounts=["lab (QOS normal)"],
    scratch="$SCRATCH",
    scratch_from="$SCRATCH is /lustre/ada",
    file_systems={"/lustre": "lustre"},
    interfaces=[Interface(name="ib0", kind="infiniband", is_up=True)],
    runtimes=["apptainer"],
    has_modules=True,
)
PROPOSED = """\
# Proposed by `ddp-hpc site init` on login02.example.org. Check it, and add what is missing: lines with `#` are suggestions.
site:
  name: hydra
  hosts: [login*]  # this host is login02.example.org; add the other login nodes
  scratch: $SCRATCH  # $SCRATCH is /lustre/ada
  no_write: [$HOME]  # runs belong on scratch; remove this line if homes are large and fast here
  # /lustre is a file system that hosts may share (lustre)

runs_dir: $SCRATCH/runs

slurm:
  partition: gpu  # Slurm's own default
  # account: lab  # your accounts: lab (QOS normal)
  # modules: [...]  # modules that the job's Python or container runtime needs

container:
  runtime: apptainer

# The network interfaces that ranks use to reach each other, the best first. This host has
# ib0 (InfiniBand); the nodes may have others.
# Unset: each job uses the fastest network that all its nodes share. Set it only if that choice is wrong.
# network:
#   interfaces: [ib0]

partitions:
  gpu:  # 4 nodes of 64 CPUs, 512 GiB, 4 a100; at most 1440 min
    # resources: {gpus_per_node: 4, gpu_type: a100}  # a whole node for each run that does not say; unset: a run says how many it needs
  gpu-low:  # 4 nodes of 64 CPUs, 512 GiB, 4 GPU; at most 1440 min; Slurm may preempt its jobs (REQUEUE), 120 s after a warning
    # resources: {gpus_per_node: 4}  # a whole node for each run that does not say; unset: a run says how many it needs
  mixed:  # 4 nodes of 64 CPUs, 512 GiB, 4 GPU; 9 nodes of 32 CPUs, 128 GiB; at most 1440 min
  closed:  # not UP when this draft was made: Slurm starts no jobs here until an administrator sets it UP; else delete this entry; at most 1440 min
"""


def test_a_proposal_says_what_it_was_made_from() -> None:
    assert propose(SURVEY) == PROPOSED


def test_a_proposal_is_a_profile(user: dict[str, str], tmp_path: Path) -> None:
    write_profile(user, "hydra", propose(SURVEY))

    found = resolve(run_file(tmp_path), [], {**user, "SCRATCH": "/lustre/ada"}, site="hydra")

    assert found.profile is not None
    assert found.profile.site.name == "hydra"
    assert flat_spec(found.spec)["resources.gpus_per_node"] is None  # a run says how many it needs
    assert found.spec.container.runtime == "apptainer"


def test_a_host_without_slurm_proposes_a_profile_too(user: dict[str, str]) -> None:
    found = Survey(host="box7")
    path = write_profile(user, "box", propose(found))

    assert proposed_name(found) == "box"
    assert read_profile(path, "", user).site.hosts == ("box*",)


@pytest.mark.parametrize(
    ("gres", "num_gpus", "gpu_type"),
    [
        ("(null)", 0, None),
        ("gpu:4", 4, None),
        ("gpu:a100:4(S:0-1)", 4, "a100"),
        ("gpu:a100_3g.20gb:2,gpu:a100:2,nvme:1", 4, "a100_3g.20gb"),
        ("gpu:4(S:0),mps:400", 4, None),
        ("gpu:3090:8(S:0-1)", 8, "3090"),
        ("gpu:2080ti:8,gpu:3090:2", 10, "2080ti"),
    ],
)
def test_what_nodes_have_is_read_from_scontrol(gres: str, num_gpus: int, gpu_type: str | None) -> None:
    node = f"CPUAlloc=0 CPUEfctv=56 CPUTot=64 Gres={gres} OS=Linux RealMemory=512000 MemSpecLimit=2000 Partitions=gpu,all Reason=no Gres=gpu:9"
    gpu, every = parse_node_shapes(f"NodeName=n1 {node}\nNodeName=n2 {node}\nNodeName=login CPUTot=4 RealMemory=1000\n")

    assert (gpu.num_gpus, gpu.gpu_type) == (num_gpus, gpu_type)
    assert (gpu.partition, gpu.num_nodes, gpu.num_cpus, gpu.mem_mb) == ("gpu", 2, 56, 510000)
    assert every == replace(gpu, partition="all")


# --- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_home(user: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("HOME", user["HOME"])
    monkeypatch.delenv("DDP_HPC_SITE_PROFILE")
    return user


def test_show_says_which_profile_counts_here_and_what_it_says(
    at_home: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["site"]) == 0
    assert "This host uses no site profile" in capsys.readouterr().out

    path = write_profile(at_home, "mine", PARTITIONED.replace("login*", "'*'"))

    assert main(["site", "show"]) == 0
    told = capsys.readouterr().out
    assert str(path) in told
    assert "`site.hosts` has '*'" in told
    assert main(["site", "show", "mine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["partitions"]["gpu"]["resources.gpus_per_node"] == 4


def test_show_leaves_out_the_values_of_secrets(at_home: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(at_home, "mine", "site: {hosts: ['*']}\nenv: {HF_TOKEN: hf_s3cr3t, NCCL_DEBUG: INFO}\n")

    for more in ([], ["--json"]):
        assert main(["site", "show", "mine", *more]) == 0
        told = capsys.readouterr().out
        assert "HF_TOKEN" in told
        assert "INFO" in told
        assert "s3cr3t" not in told


def test_list_tells_examples_from_ones_own(at_home: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(at_home, "mine", "site: {hosts: ['*']}")

    assert main(["site", "list", "--json"]) == 0

    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mine"]["counts_here"]
    assert {name for name, row in rows.items() if row["is_example"]} == {
        "ethernet",
        "infiniband",
        "slingshot",
        "workstation",
    }


@pytest.mark.parametrize("name", ["my cluster", "a/b", "../x", "/tmp/x"])
def test_init_refuses_what_cannot_name_a_site(name: str, at_home: dict[str, str]) -> None:
    assert main(["site", "init", name, "--write"]) == 2
    assert not [*Path(at_home["HOME"]).rglob("*.yaml")]


def test_a_home_that_cannot_be_looked_at_has_no_profile(user: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As another's is, after `su`."""

    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)

    assert find_profile(user) is None
    assert chosen_runs_dir(None, user) == Path("runs")


def test_a_proposal_does_not_forbid_a_scratch_at_home(user: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()

    found = survey({**user, "SCRATCH": str(tmp_path / "scratch"), "PATH": "/nowhere"})

    assert found.is_scratch_at_home
    assert "no_write" not in propose(found)


def test_init_keeps_a_draft_once(at_home: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["site", "init", "mine", "--write"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[0])
    path.write_text("seed: 7")

    assert main(["site", "init", "mine", "--write"]) == 2

    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "seed: 7"
