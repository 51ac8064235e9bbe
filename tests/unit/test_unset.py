"""What a run takes of the machine where its configuration leaves that open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.machine.gpus import Gpu
from ddp_hpc.cluster.slurm.queries import NodeShape
from ddp_hpc.launch.submission.fill_unset import FilledIn, choose_gpus, fill_unset, share_cpus_by_gpus
from ddp_hpc.run.config.overlay import Overlay
from ddp_hpc.run.config.resolve import resolve
from ddp_hpc.run.spec import DataSpec, ResourcesSpec, RunSpec, ScriptSpec, SlurmSpec


def spec(*, is_script: bool = False, **resources: Any) -> RunSpec:
    made = RunSpec(name="run", resources=ResourcesSpec(**resources))
    return replace(made, script=ScriptSpec(command=("python", "train.py"))) if is_script else made


def gpus(*used_gib: float) -> list[Gpu]:
    return [Gpu(name=str(number), memory_gib=used, total_gib=80.0) for number, used in enumerate(used_gib)]


def chosen(asked: RunSpec, there: Sequence[Gpu] | None, before: RunSpec | None = None) -> FilledIn:
    return choose_gpus(asked, before, there, None)


@pytest.mark.parametrize(
    ("asked", "there", "taken"),
    [
        (spec(), None, {"gpus_per_node": 0}),
        (spec(), gpus(), {"gpus_per_node": 0}),
        (spec(), gpus(0, 0.5, 0), {"gpus_per_node": 3}),
        (spec(workers_per_node=2), gpus(0, 0, 0), {"gpus_per_node": 2}),
        (spec(workers_per_node=2), gpus(0), {"gpus_per_node": 0}),
        (spec(), gpus(20, 30), {"gpus_per_node": 2}),
        (spec(is_script=True), gpus(0, 0), {"gpus_per_node": 2, "workers_per_node": 1}),
        (spec(is_script=True), None, {"gpus_per_node": 0}),
        (spec(is_script=True, workers_per_node=2), gpus(0, 0), {"gpus_per_node": 2}),
        (spec(is_script=True, workers_per_node=2), gpus(0), {"gpus_per_node": 0}),
        (spec(gpus_per_node=0), gpus(0, 0), {}),
        (spec(gpus_per_node=1), gpus(0, 0), {}),
        (spec(gpus_per_node=4), None, {}),
    ],
)
def test_a_run_that_asks_for_no_number_takes_the_gpus_of_the_machine(
    asked: RunSpec, there: list[Gpu] | None, taken: dict[str, int]
) -> None:
    assert chosen(asked, there).resources == taken


def test_gpus_with_other_work_are_left_out_and_named() -> None:
    found = chosen(spec(), gpus(0, 12.34, 0))

    assert found.resources == {"gpus_per_node": 2}
    assert found.env == {"CUDA_VISIBLE_DEVICES": "0,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found.note == "GPU 1 is left out: 12.3 GiB of its memory are in use"
    assert chosen(spec(), gpus(0, 0, 0)).env == {}


def test_busy_gpus_are_named_where_they_are_used_because_too_few_are_free() -> None:
    assert chosen(spec(), gpus(30, 5)).note.count("is used, as too few are free") == 2
    assert chosen(spec(), gpus(0, 30, 30), spec(gpus_per_node=2)).note.count("is used") == 1


def test_a_variable_that_names_no_gpu_of_this_machine_is_no_silent_way_to_the_cpus() -> None:
    note = choose_gpus(spec(), None, [], "GPU-4711").note

    assert note == "CUDA_VISIBLE_DEVICES is 'GPU-4711', which names no GPU of this machine, so the run trains on CPUs"
    assert choose_gpus(spec(), None, [], "").note == choose_gpus(spec(), None, [], None).note == ""


def test_a_script_that_is_submitted_again_sees_the_gpus_that_are_here_now() -> None:
    before = spec(is_script=True, gpus_per_node=3, workers_per_node=1)

    assert chosen(spec(is_script=True), gpus(0), before).resources == {"gpus_per_node": 1, "workers_per_node": 1}


def test_workers_that_are_more_than_the_gpus_train_on_cpus_with_a_word() -> None:
    assert (
        "`resources.workers_per_node` is 2 and this machine shows 1 GPU;"
        in chosen(spec(workers_per_node=2), gpus(0)).note
    )


def test_a_script_on_several_gpus_is_told_how_to_get_a_worker_for_each() -> None:
    assert "`resources.workers_per_node=4`" in chosen(spec(is_script=True), gpus(0, 0, 0, 0)).note
    assert chosen(spec(is_script=True), gpus(0)).note == ""


def test_a_run_that_is_submitted_again_keeps_its_gpus_and_one_on_cpus_stays_there() -> None:
    on_two, on_cpus = spec(gpus_per_node=2), spec(gpus_per_node=0)

    assert chosen(spec(), gpus(0, 0, 0), on_two).resources == {"gpus_per_node": 2}
    assert chosen(spec(), gpus(30, 0, 0), on_two).env["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert chosen(spec(), gpus(30, 30), on_two).resources == {"gpus_per_node": 2}, "they may be its own"
    assert chosen(spec(), gpus(0, 0), on_cpus).resources == {"gpus_per_node": 0}
    with pytest.raises(
        ConfigError, match=r"was first submitted with 2 GPUs .* shows 1 GPU .*resources.gpus_per_node=1`"
    ):
        chosen(spec(), gpus(0), on_two)


def test_more_gpus_than_the_machine_shows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"asks for 4 GPUs .* shows 2 GPUs \(CUDA_VISIBLE_DEVICES is not set\)"):
        chosen(spec(gpus_per_node=4), gpus(0, 0))


SHAPES = [
    NodeShape(partition="gpu", num_nodes=4, num_cpus=64, mem_mb=1, num_gpus=4, gpu_type="a100"),
    NodeShape(partition="gpu", num_nodes=2, num_cpus=96, mem_mb=1, num_gpus=8, gpu_type="h100"),
    NodeShape(partition="cpu", num_nodes=2, num_cpus=128, mem_mb=1, num_gpus=0),
]


@pytest.mark.parametrize(
    ("resources", "partitions", "each"),
    [
        ({"gpus_per_node": 4}, {"gpu"}, 12),
        ({"gpus_per_node": 4, "gpu_type": "a100"}, {"gpu"}, 16),
        ({"gpus_per_node": 8}, {"gpu", "cpu"}, 12),
        ({"gpus_per_node": 4, "workers_per_node": 2}, {"gpu"}, 24),
        ({"gpus_per_node": 2}, {"cpu"}, None),
        ({"gpus_per_node": 2}, set(), None),
    ],
)
def test_gpu_workers_on_slurm_share_the_cpus_by_the_gpus(
    resources: dict[str, Any], partitions: set[str], each: int | None
) -> None:
    shapes = [one for one in SHAPES if one.partition in partitions]

    assert share_cpus_by_gpus(spec(**resources), shapes).resources.get("cpus_per_worker") == each


def test_gpu_workers_share_all_cpus_of_a_whole_node_whose_gpus_slurm_does_not_count() -> None:
    asked = replace(spec(gpus_per_node=4), slurm=SlurmSpec(gpu_option="none"))

    assert share_cpus_by_gpus(asked, SHAPES[2:]).resources == {"cpus_per_worker": 32}


@pytest.mark.parametrize(
    ("partition", "node", "num_cpus"),
    [
        ("MaxCPUsPerNode=UNLIMITED", "CPUEfctv=64 CPUTot=64", 64),
        ("MaxCPUsPerNode=UNLIMITED", "CPUEfctv=56 CPUTot=64 CoreSpecCount=8", 56),
        ("MaxCPUsPerNode=48", "CPUEfctv=64 CPUTot=64", 48),
    ],
    ids=["all of them", "some kept for the system", "some kept for another partition"],
)
def test_the_share_of_the_cpus_is_of_those_that_jobs_may_have_and_is_told_with_its_source(
    partition: str, node: str, num_cpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = (
        f"PartitionName=gpu State=UP {partition}\nNodeName=n1 {node} RealMemory=1000 Gres=gpu:a100:4 Partitions=all,gpu"
    )
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{answers}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    resolved = resolve(None, [], {"DDP_HPC_SITE_PROFILE": ""})
    settings = {"resources": {"gpus_per_node": 4}, "slurm": {"partition": "gpu"}, "runs_dir": str(tmp_path)}
    asked = Overlay(resolved, {}).resolve(settings, "a test")

    found = fill_unset(asked, {"PATH": f"{tmp_path}:/usr/bin:/bin"}, is_for_slurm=True)

    each, why = num_cpus // 4, f"nodes of partition gpu have {num_cpus} CPUs for 4 GPUs"
    assert (found.spec.resources.cpus_per_worker, found.sources["resources.cpus_per_worker"]) == (each, why)
    assert f"note: each worker gets {each} CPUs, because {why};" in capsys.readouterr().err
    assert fill_unset(asked, {"PATH": "/nowhere"}, is_for_slurm=True) == asked, "Slurm does not answer"


def test_loader_processes_keep_their_cpus_where_a_node_has_few() -> None:
    asked = replace(spec(gpus_per_node=8), data=DataSpec(num_workers=15))

    assert share_cpus_by_gpus(asked, SHAPES[:2]) == FilledIn()


@pytest.mark.parametrize(
    ("words", "lead_s"),
    [
        (["resources.time_limit_min=1"], 15),
        (["resources.time_limit_min=3"], 120),
        (["resources.time_limit_min=1", "slurm.signal_lead_s=120"], 120),
        ([], 120),
    ],
)
def test_a_short_time_limit_has_a_shorter_lead_unless_the_user_names_one(
    words: list[str], lead_s: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = resolve(None, [*words, f"runs_dir={tmp_path}"], {}, command=["python", "train.py"])

    found = fill_unset(resolved, {}, is_for_slurm=True)

    assert found.spec.slurm.signal_lead_s == lead_s
    assert ("Slurm asks the run to stop 15 s before its time limit" in capsys.readouterr().err) == (lead_s == 15)
