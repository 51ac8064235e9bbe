"""What the tools of quotas print is understood, and what they do not say is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.mounts import Mount, mount_of
from ddp_hpc.watch.diagnose.doctor.quota import argv_for, findings_on_quota, parse, quotas_of

LUSTRE = Mount(point="/scratch", fs_type="lustre", source="10.0.0.1@o2ib:/scratch")
NFS = Mount(point="/home", fs_type="nfs4", source="server:/export/home")
OF_NFS = """Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/export/home  {used}  {soft}  {hard}       0     250       0       0       0
      /dev/sda2    100       0       0       0       1       0       0       0
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("  /scratch  2000000  3000000  4000000  -  5  10  11  -\n", ["ok: 2.0 GB of 4.1 GB left", "warn: 6 of 11 files left"]),
        ("  /scratch\n        3900000* 3000000 4000000 6d23h59m20s 5 0 0 -\n", ["warn: 0.1 GB of 4.1 GB left; the use is above the soft limit"]),
        ("  /scratch  4000000* 3000000 4000000 expired 5 0 0 -\n", ["fail: 0.0 MB of 4.1 GB left; the use is above the soft limit"]),
        ("  /scratch  2000000  0 0 - 5 0 0 -\nuid 1000 is using default block quota setting\n", ["ok: you have no limit"]),
        ("  /scratch  [220]  300 300 - 5 0 0 -\nSome errors happened when getting quota info\n", ["unknown:"]),
        ("", ["unknown:"]),
    ],
)  # fmt: skip
def test_what_lustre_says(text: str, said: list[str]) -> None:
    _says(parse(text, LUSTRE), said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OF_NFS.format(used=10, soft=0, hard=5_000_000), ["ok: 5.1 GB of 5.1 GB left"]),
        (
            OF_NFS.format(used="600*", soft=500, hard=0),
            ["fail: 0.0 MB of 0.5 MB left; the use is above the soft limit"],
        ),
        ("Disk quotas for user ada (uid 1000): none\n", ["ok: you have no limit"]),
        ("Disk quotas for user ada (uid 1000):\n /dev/sda2 1 0 0 0 1 0 0 0\n", ["unknown:"]),
    ],
)
def test_what_quota_says(text: str, said: list[str]) -> None:
    _says(parse(text, NFS), said)


def _says(found: object, said: list[str]) -> None:
    told = [f"{one.level}: {one.found}" for one in findings_on_quota(found, "it is silent")]  # type: ignore[arg-type]  # of a parametrized test
    assert len(told) == len(said)
    for line, begin in zip(told, said, strict=True):
        assert line.startswith(begin)


def test_each_file_system_has_its_tool() -> None:
    assert argv_for(LUSTRE) == ["lfs", "quota", "-q", LUSTRE.point]
    assert argv_for(NFS)[0] == "quota"


def test_the_tool_is_asked_and_its_exit_code_says_nothing(tmp_path: Path) -> None:
    mount = mount_of(tmp_path)
    assert mount is not None
    name = argv_for(mount)[0]
    (tmp_path / name).write_text(f"#!/bin/sh\necho '{mount.point} 10 0 5000000 0 1 0 0 0'\nexit 1\n")
    (tmp_path / name).chmod(0o755)

    (found,) = quotas_of(tmp_path, {"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout_s=30)

    assert (found.of, found.limit) == ("bytes", 5_000_000 * 1024)


@pytest.mark.parametrize(("text", "why"), [("exec sleep 60", "did not end within"), ("echo oh >&2", "says of .*: oh")])
def test_a_tool_that_says_nothing_leaves_the_quota_unknown(tmp_path: Path, text: str, why: str) -> None:
    for name in ("lfs", "quota"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    with pytest.raises(ConfigError, match=why):
        quotas_of(tmp_path, {"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout_s=0.3)


def test_a_host_without_the_tool_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this host does not have the command"):
        quotas_of(tmp_path, {"PATH": "/nowhere"}, timeout_s=1)


MOUNTS = r"""21 1 8:1 / / rw - ext4 /dev/sda1 rw
30 21 0:5 / /data rw master:1 - autofs systemd-1 rw
31 30 0:6 / /data/sets rw shared:2 - nfs4 server:/sets rw
32 21 0:7 / /with\040space rw - tmpfs none rw
33 21 0:8 / /twice rw - tmpfs first rw
34 21 0:9 / /twice rw - tmpfs second rw
"""


@pytest.mark.parametrize(
    ("path", "point", "fs_type", "source"),
    [
        ("/etc", "/", "ext4", "/dev/sda1"),
        ("/data/other", "/data", "autofs", "systemd-1"),
        ("/data/sets/a/b", "/data/sets", "nfs4", "server:/sets"),
        ("/data/setsuna", "/data", "autofs", "systemd-1"),
        ("/with space/x", "/with space", "tmpfs", "none"),
        ("/twice/x", "/twice", "tmpfs", "second"),
    ],
)
def test_a_path_is_on_the_innermost_mount(tmp_path: Path, path: str, point: str, fs_type: str, source: str) -> None:
    listed = tmp_path / "mountinfo"
    listed.write_text(MOUNTS.replace("\\\\", "\\"))

    assert mount_of(Path(path), mountinfo=listed) == Mount(point=point, fs_type=fs_type, source=source)


def test_without_the_kernels_list_nothing_is_known(tmp_path: Path) -> None:
    assert mount_of(Path("/"), mountinfo=tmp_path / "none") is None
