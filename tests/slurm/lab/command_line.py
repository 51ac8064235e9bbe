"""The lab's commands."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

from tests.slurm import lab as package
from tests.slurm.lab import cgroups, cluster_life, daemons, network, node_inside, packages, power
from tests.slurm.lab.settings import IB, Lab, Settings, address
from tests.slurm.lab.tools import PATH, LabError

CLIENTS = [
    "sbatch",
    "srun",
    "salloc",
    "squeue",
    "sinfo",
    "scancel",
    "scontrol",
    "sacct",
    "sacctmgr",
    "sdiag",
    "sprio",
    "sstat",
]
PASSED_ON = ("LANG", "TERM", "PYTHONPATH", "SLURM_TIME_FORMAT")
PASSED_ON_PREFIXES = ("SBATCH_", "SRUN_", "SLURM_LAB_", "SQUEUE_", "SINFO_", "SACCT_")


def main() -> None:
    lab = Lab.from_environment(os.environ)
    if sys.argv[1:2] == ["_init"]:
        node_inside.main(lab, sys.argv[2])
    arguments = parser(lab).parse_args()
    try:
        arguments.command(lab, arguments)
    except LabError as error:
        sys.exit(f"lab: {error}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def install(lab: Lab, arguments: argparse.Namespace) -> None:
    packages_installed = packages.install(lab.user)
    if packages_installed:
        say(f"installed {' '.join(packages_installed)}")


def up(lab: Lab, arguments: argparse.Namespace) -> None:
    values = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    values["cgroup"] = arguments.cgroup == "yes" or (arguments.cgroup == "auto" and cgroups.usable())
    values["overrides"] = dict(arguments.overrides)
    say(cluster_life.up(lab, Settings(**values)))


def down(lab: Lab, arguments: argparse.Namespace) -> None:
    cluster_life.down(lab, purge=arguments.purge)
    say("down")


def status(lab: Lab, arguments: argparse.Namespace) -> None:
    settings = lab.settings()
    if settings is None or not lab.init_pid("head"):
        say("down")
        sys.exit(3)
    for node in settings.hostnames:
        pid = lab.init_pid(node)
        power_state = f"init pid {pid}" if pid else "off"
        say(f"{node:8} {power_state:16} eth0 {address(node)} ib0 {address(node, IB)}")
    done = power.on(lab, "head", "sinfo", "-N", "-p", "batch", "-o", "%N %T %G %E")
    sys.stdout.write(done.stdout + done.stderr)
    sys.exit(done.returncode)


def exec_on(lab: Lab, arguments: argparse.Namespace) -> None:
    command = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    env = {key: value for key, value in os.environ.items() if key in PASSED_ON or key.startswith(PASSED_ON_PREFIXES)}
    env["PATH"] = os.environ.get("SLURM_LAB_PATH", PATH)
    argv = power.exec_argv(lab, arguments.node, arguments.user, arguments.dir or Path.cwd(), env)
    os.execvpe(argv[0], [*argv, *(command or ["bash"])], {**os.environ, "PATH": PATH})  # noqa: S606  no shell wanted


def make_bin(lab: Lab, arguments: argparse.Namespace) -> None:
    """Write commands of Slurm that run on the head, for a PATH out here."""
    arguments.dir.mkdir(parents=True, exist_ok=True)
    variables = "\n".join(f"export {key}={value!r}" for key, value in lab.environment.items())
    for client in CLIENTS:
        path = arguments.dir / client
        words = f'{power.PYTHON} {power.ENTRY} exec -u "${{SLURM_LAB_AS:-{lab.user}}}" -- {client} "$@"'
        path.write_text(f"#!/bin/sh\n{variables}\nexec {words}\n")
        path.chmod(0o755)


def kill(lab: Lab, arguments: argparse.Namespace) -> None:
    power.kill(lab, arguments.node)


def boot(lab: Lab, arguments: argparse.Namespace) -> None:
    power.boot(lab, arguments.node)


def cut(lab: Lab, arguments: argparse.Namespace) -> None:
    network.set_cable(lab, arguments.node, arguments.interface, plugged=False)


def plug(lab: Lab, arguments: argparse.Namespace) -> None:
    network.set_cable(lab, arguments.node, arguments.interface, plugged=True)


def reconfig(lab: Lab, arguments: argparse.Namespace) -> None:
    cluster_life.reconfigure(lab, dict(arguments.overrides))


def stop(lab: Lab, arguments: argparse.Namespace) -> None:
    daemons.stop(arguments.daemon, partial(power.on, lab, "head"))


def start(lab: Lab, arguments: argparse.Namespace) -> None:
    daemons.start(arguments.daemon, partial(power.on, lab, "head"))


def parser(lab: Lab) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="lab",
        description=package.__doc__,
        epilog="SLURM_LAB_DIR, _PREFIX, _SHARE and _USER in the environment say which lab.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(required=True, metavar="COMMAND")
    verbs.add_parser("install", help="packages of Debian, and the user").set_defaults(command=install)
    _add_up(verbs.add_parser("up", help="boot the cluster, wait until all nodes are idle"))
    verb = verbs.add_parser("down", help="switch everything off")
    verb.add_argument("--purge", action="store_true", help="forget jobs, accounting and logs too")
    verb.set_defaults(command=down)
    verbs.add_parser("status", help="one line a node; 0 if the cluster answers, 3 if down").set_defaults(command=status)
    verb = verbs.add_parser("exec", help="run a command on a node, as the user on the head unless told otherwise")
    verb.add_argument("-n", "--node", default="head")
    verb.add_argument("-u", "--user", default=lab.user)
    verb.add_argument("-C", "--dir", help="working directory there; here's own unless given")
    verb.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    verb.set_defaults(command=exec_on)
    verb = verbs.add_parser("bin", help="write commands sbatch, squeue ... that run on the head")
    verb.add_argument("dir", type=Path)
    verb.set_defaults(command=make_bin)
    for name, function, words in (("kill", kill, "cut the power of a node"), ("boot", boot, "boot it again")):
        verb = verbs.add_parser(name, help=words)
        verb.add_argument("node")
        verb.set_defaults(command=function)
    for name, function, words in (("cut", cut, "unplug a node's cable"), ("plug", plug, "plug it in again")):
        verb = verbs.add_parser(name, help=words)
        verb.add_argument("node")
        verb.add_argument("interface", nargs="?", default="eth0", choices=("eth0", "ib0"))
        verb.set_defaults(command=function)
    for name, function, words in (("stop", stop, "end a daemon of the head"), ("start", start, "start it again")):
        verb = verbs.add_parser(name, help=words)
        verb.add_argument("daemon", choices=sorted(daemons.PORTS))
        verb.set_defaults(command=function)
    verb = verbs.add_parser("reconfig", help="change keys of slurm.conf, restart slurmctld; KEY= drops KEY")
    verb.add_argument("overrides", nargs="*", type=key_value, metavar="KEY=VALUE")
    verb.set_defaults(command=reconfig)
    return top


def _add_up(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--nodes", type=int, default=4)
    verb.add_argument("--gpus", type=int, default=4, help="made-up GPUs a node: /dev/nvidia0 ...")
    verb.add_argument("--cpus", type=int, default=16)
    verb.add_argument("--mem", type=int, default=16000, help="MB a node, as Slurm is told")
    verb.add_argument("--small", type=int, default=0, help="how many nodes, the last, have half the CPUs and memory")
    verb.add_argument("--grace", type=int, default=10, help="GraceTime of the partitions that are preempted")
    verb.add_argument("--sim", type=int, default=0, help="nodes on paper only, for `--test-only`: partition sim")
    verb.add_argument("--no-db", dest="db", action="store_false", help="no slurmdbd, so no sacct")
    verb.add_argument("--eth-rate", default="", help="how fast eth0 is, like 100mbit")
    verb.add_argument("--rootfs", default="", help="directory of another Debian with Slurm, for the nodes")
    verb.add_argument("--debian-hosts", action="store_true", help="a node's own name is 127.0.1.1 to itself")
    verb.add_argument(
        "--cgroup",
        choices=("auto", "yes", "no"),
        default="auto",
        help="hold jobs by cgroups, and constrain their devices and memory; auto: where this machine has v1",
    )
    verb.add_argument(
        *("--set",),
        dest="overrides",
        action="append",
        default=[],
        type=key_value,
        metavar="KEY=VALUE",
        help="key of slurm.conf",
    )
    verb.set_defaults(command=up)


def key_value(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value
