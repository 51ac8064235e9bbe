"""The files that Slurm, MariaDB and munge of a cluster read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.slurm.lab.settings import IB, Lab, Settings, address

SCHEDULING = {
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,"
    "bf_interval=1,bf_continue,bf_yield_interval=100000",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "PriorityType": "priority/basic",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "SlurmctldParameters": "preempt_send_user_signal",
    "JobRequeue": "1",
    "DefMemPerCPU": "100",
    # How long a requeued job waits before it may start again. Slurm's own is 120 s; less than 5 s it refuses.
    "AuthInfo": "cred_expire=5",
}

WAITING = {
    "KillWait": "5",
    "OverTimeLimit": "0",
    "MinJobAge": "300",  # a short one makes squeue forget jobs that a test still asks for
    "CompleteWait": "0",
    "InactiveLimit": "0",
    "SlurmctldTimeout": "10",
    "SlurmdTimeout": "10",
    "MessageTimeout": "5",
    "TCPTimeout": "1",
    "UnkillableStepTimeout": "10",
    "BatchStartTimeout": "10",
}

NODES = {
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/linux",
    "JobAcctGatherFrequency": "task=5",
    "SlurmdParameters": "config_overrides",  # believe the CPUs and memory written here
    "GresTypes": "gpu",
    "MpiDefault": "none",
    "ReturnToService": "2",  # a node that comes back is used again
    "PropagateResourceLimits": "NONE",
}

ACCOUNTING = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageHost": "head",
    "AccountingStorageTRES": "gres/gpu",
    "AccountingStorageEnforce": "associations,limits,qos",
}


def slurm_conf(lab: Lab, settings: Settings) -> str:
    values = {
        "ClusterName": "lab",
        "SlurmctldHost": f"head({address('head')})",
        "SlurmUser": "slurm",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "StateSaveLocation": f"{lab.folder}/state",
        "SlurmdSpoolDir": "/var/spool/slurmd",  # each node's own
        "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
        "SlurmdPidFile": "/run/slurm/slurmd.pid",
        "SlurmctldLogFile": f"{lab.logs}/slurmctld.log",
        "SlurmdLogFile": f"{lab.logs}/slurmd-%n.log",
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
        "LogTimeFormat": "iso8601_ms",
        **SCHEDULING,
        **WAITING,
        **NODES,
        **(ACCOUNTING if settings.db else {}),
        **(_simulation(settings) if settings.sim else {}),
        **({"ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup"} if settings.cgroup else {}),
        **settings.overrides,
    }
    lines = [f"{key}={value}" for key, value in values.items() if value]  # `Key=` stops every command of Slurm
    return _text([*lines, *_node_lines(settings), *_partition_lines(settings)])


def _simulation(settings: Settings) -> dict[str, str]:
    """Return what makes nodes that are switched off count as available to `sbatch --test-only`."""
    return {
        "SuspendProgram": "/usr/bin/true",
        "ResumeProgram": "/usr/bin/true",
        "SuspendTime": "36000",
        "SuspendExcNodes": f"node[1-{settings.nodes}]",
        "ResumeTimeout": "30",
        "TreeWidth": "65533",
    }


def _node_lines(settings: Settings) -> list[str]:
    gres = f" Gres=gpu:a100:{settings.gpus}" if settings.gpus else ""
    size = f"CPUs={settings.cpus} RealMemory={settings.mem}{gres}"
    half = f"CPUs={settings.cpus // 2} RealMemory={settings.mem // 2}{gres}"
    sizes = [size] * (settings.nodes - settings.small) + [half] * settings.small
    nodes = zip(settings.workers, sizes, strict=True)
    lines = [f"NodeName={node} NodeAddr={address(node)} {its} State=UNKNOWN" for node, its in nodes]
    if settings.sim:
        lines.append(f"NodeName=sim[0001-{settings.sim:04d}] {size} State=CLOUD")
    return lines


def _partition_lines(settings: Settings) -> list[str]:
    nodes = f"Nodes=node[1-{settings.nodes}] MaxTime=INFINITE"
    lines = [
        f"PartitionName=batch {nodes} Default=YES PriorityTier=10 PreemptMode=OFF",
        f"PartitionName=low {nodes} PriorityTier=1 PreemptMode=REQUEUE GraceTime={settings.grace}",
        f"PartitionName=kill {nodes} PriorityTier=1 PreemptMode=CANCEL GraceTime={settings.grace}",
        f"PartitionName=high {nodes} PriorityTier=100 PreemptMode=OFF",
    ]
    if settings.sim:
        lines.append(f"PartitionName=sim Nodes=sim[0001-{settings.sim:04d}] MaxTime=INFINITE State=UP")
    return lines


def gres_conf(settings: Settings) -> str:
    if not settings.gpus:
        return "AutoDetect=off\n"
    files = "/dev/nvidia0" if settings.gpus == 1 else f"/dev/nvidia[0-{settings.gpus - 1}]"
    return f"AutoDetect=off\nNodeName=node[1-{settings.nodes}] Name=gpu Type=a100 File={files}\n"


def cgroup_conf(settings: Settings) -> str:
    constrain = "yes" if settings.cgroup else "no"
    return _text(
        [
            "CgroupPlugin=cgroup/v1",
            "CgroupAutomount=no",
            "CgroupMountpoint=/sys/fs/cgroup",
            f"ConstrainDevices={constrain}",
            f"ConstrainRAMSpace={constrain}",
            "ConstrainCores=no",  # more CPUs are claimed than this machine has
        ]
    )


def slurmdbd_conf(lab: Lab) -> str:
    return _text(
        [
            "AuthType=auth/munge",
            "DbdHost=head",
            f"DbdAddr={address('head')}",
            "SlurmUser=slurm",
            "DebugLevel=info",
            f"LogFile={lab.logs}/slurmdbd.log",
            "PidFile=/run/slurm/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=slurm",
            "StoragePass=slurm",
            "StorageLoc=slurm_acct_db",
        ]
    )


def my_cnf(lab: Lab) -> str:
    return _text(
        [
            "[mariadbd]",
            "user=mysql",
            f"datadir={lab.database}",
            "socket=/run/mysqld/mysqld.sock",
            "pid-file=/run/mysqld/mysqld.pid",
            "skip-networking",
            "skip-log-bin",
            "performance_schema=OFF",
            "innodb_buffer_pool_size=64M",
            "innodb_log_file_size=16M",
            "innodb_flush_log_at_trx_commit=0",
            "innodb_lock_wait_timeout=900",
            "[client]",
            "socket=/run/mysqld/mysqld.sock",
        ]
    )


def hosts(node: str, settings: Settings) -> str:
    """Return a node's /etc/hosts; Debian's installer gives a machine's own name an address of the loopback."""
    lines = ["127.0.0.1 localhost"]
    if settings.debian_hosts:
        lines.append(f"127.0.1.1 {node}.lab.local {node}")
    lines.append("::1 localhost ip6-localhost")
    for other in settings.hostnames:
        lines += [f"{address(other)} {other}", f"{address(other, IB)} {other}-ib"]
    return _text(lines)


def write_all(lab: Lab, settings: Settings) -> None:
    """Write every file of a cluster, each for those who may read it."""
    (lab.etc / "plugstack.conf.d").mkdir(parents=True, exist_ok=True)
    replace(lab.etc / "slurm.conf", slurm_conf(lab, settings))
    replace(lab.etc / "gres.conf", gres_conf(settings))
    replace(lab.etc / "cgroup.conf", cgroup_conf(settings))
    replace(lab.etc / "my.cnf", my_cnf(lab))
    replace(lab.etc / "slurmdbd.conf", slurmdbd_conf(lab), owner="slurm")
    for node in settings.hostnames:
        folder = lab.folder / "etc.node" / node
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / "hosts", hosts(node, settings))
        replace(folder / "hostname", f"{node}\n")
    for name in ("state", "log"):
        (lab.folder / name).mkdir(exist_ok=True)
        shutil.chown(lab.folder / name, "slurm", "slurm")
    (lab.folder / "run").mkdir(exist_ok=True)
    _write_munge_key(lab.folder / "munge")


def replace(path: Path, text: str, *, owner: str = "") -> None:
    """Replace a file by one rename; with `owner`, only that user may read it. Leave a file alone that says the same.

    A slurmd that boots meanwhile must read the old or the new text: of an empty or half-written slurm.conf it dies. A
    file that did not change stays the same file, since nodes that are on have some of them bound to a place in /etc.
    """
    if path.exists() and path.read_text() == text:
        return
    new = path.with_name(f".{path.name}.new")
    new.touch(mode=0o600 if owner else 0o644)
    new.write_text(text)
    if owner:
        shutil.chown(new, owner, owner)
    new.rename(path)


def _write_munge_key(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    key = folder / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
    for path in (folder, key):
        shutil.chown(path, "munge", "munge")


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
