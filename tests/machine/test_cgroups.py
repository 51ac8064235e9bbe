"""What cgroups of both versions say of memory and CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ddp_hpc.cluster.machine.cgroups import own_cgroups, quota_of, used_and_limit

GIB = 2**30
STEP = "system.slice/slurmstepd.scope/job_7/step_0"


def cgroups(folder: Path, member: str, files: Mapping[str, str]) -> list[Path]:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(member)
    (folder / "cgroup").mkdir()
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return own_cgroups(folder / "proc", folder / "cgroup")


def test_of_version_2_the_lowest_limit_of_all_levels_counts_and_the_page_cache_does_not(tmp_path: Path) -> None:
    found = cgroups(
        tmp_path,
        f"0::/{STEP}/user/task_0\n",
        {
            f"{STEP}/user/task_0/cpu.max": "max 100000\n",
            f"{STEP}/user/task_0/memory.max": "max\n",
            f"{STEP}/cpu.max": "400000 100000\n",
            f"{STEP}/memory.max": f"{8 * GIB}\n",
            f"{STEP}/memory.current": f"{7 * GIB}\n",
            f"{STEP}/memory.stat": f"anon {2 * GIB}\nfile {5 * GIB}\nshmem {GIB}\n",
            "system.slice/slurmstepd.scope/job_7/cpu.max": "800000 100000\n",
            "system.slice/slurmstepd.scope/job_7/memory.max": f"{16 * GIB}\n",
            "system.slice/slurmstepd.scope/job_7/memory.current": f"{7 * GIB}\n",
        },
    )

    assert quota_of(found) == 4.0
    assert used_and_limit(found) == (3 * GIB, 8 * GIB)


def test_what_the_kernel_keeps_of_the_files_of_a_large_data_set_is_not_used_memory(tmp_path: Path) -> None:
    """It keeps names and inodes of millions of files, and frees them when memory runs short."""
    stat = f"anon {20 * GIB}\nfile {2 * GIB}\nshmem {GIB}\nslab_reclaimable {40 * GIB}\nslab_unreclaimable 5\n"
    files = {"memory.max": f"{64 * GIB}\n", "memory.current": f"{62 * GIB}\n", "memory.stat": stat}

    assert used_and_limit(cgroups(tmp_path, "0::/\n", files)) == (21 * GIB, 64 * GIB)


def test_of_version_1_the_same_is_read_and_its_largest_number_is_no_limit(tmp_path: Path) -> None:
    job = "slurm/uid_0/job_7"
    found = cgroups(
        tmp_path,
        f"5:memory:/{job}/step_0\n4:cpu,cpuacct:/{job}\n1:name=systemd:/x\n",
        {
            f"cpu/{job}/cpu.cfs_quota_us": "150000\n",
            f"cpu/{job}/cpu.cfs_period_us": "100000\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            f"memory/{job}/step_0/memory.limit_in_bytes": "9223372036854771712\n",
            f"memory/{job}/step_0/memory.usage_in_bytes": "5\n",
            f"memory/{job}/memory.limit_in_bytes": f"{4 * GIB}\n",
            f"memory/{job}/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"memory/{job}/memory.stat": f"cache 1\ntotal_cache {2 * GIB}\ntotal_shmem {GIB}\n",
        },
    )

    assert quota_of(found) == 1.5
    assert used_and_limit(found) == (2 * GIB, 4 * GIB)


@pytest.mark.parametrize("member", ["0::/not/shown/here\n", "0::/../../other\n", "0::/\n"])
def test_a_container_that_shows_its_own_cgroup_as_the_root_is_read_there(member: str, tmp_path: Path) -> None:
    found = cgroups(tmp_path, member, {"memory.max": f"{GIB}\n", "memory.current": "5\n", "cpu.max": "50000 100000\n"})

    assert quota_of(found) == 0.5
    assert used_and_limit(found) == (5, GIB)


@pytest.mark.parametrize("member", ["", "no cgroup at all", "0::/\n"])
def test_where_nothing_is_said_nothing_is_known(member: str, tmp_path: Path) -> None:
    found = cgroups(tmp_path, member, {"memory.max": "max\n", "cpu.max": "garbage\n"})

    assert (quota_of(found), used_and_limit(found)) == (None, None)
