"""The command line: it reads flags and calls the functions that do the work. Public: the commands, and `--json`.

Nearly all the time of a short command is its imports (`make bench ARGS=commands`). This package imports a verb when it is asked for, and a
verb imports at its top what it always needs. What one option, one back end or a file needs is imported there, marked "late".
`tests/architecture/test_torch_free.py` lists what `--help`, `list`, `status` and a dry run must not load.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ddp_hpc import __version__
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.exit_codes import FAILED
from ddp_hpc.base.names import did_you_mean
from ddp_hpc.cli.terminal import drop_output, guarded_terminal, open_closed_streams

GROUPS = {
    "every day": {
        "init": "write a small example, my_recipe.py and my_run.yaml, that runs as it is",
        "submit": "start a run, or resume it from its newest checkpoint",
        "status": "show a run's state, step, loss, time left and newest checkpoint; with --watch, again and again",
        "logs": "print or follow a run's log lines",
        "why": "say why a run failed: which rank first, the evidence, and what to do",
        "list": "list all runs; filter, sort and compare them",
        "stop": "ask a run to write a checkpoint and stop",
        "export": "write a run's weights to a safetensors file",
    },
    "start otherwise": {
        "render": "write a job script for `sbatch`, and submit nothing",
        "join": "run this process's share of a run, where torchrun, srun, mpiexec, Kubeflow or SkyPilot has started it",
        "env": "print the environment variables that a worker gets (RANK, MASTER_ADDR, ...), and where each comes from",
    },
    "look": {
        "report": "write an HTML page on a run or a sweep: where its time went, loss, slow ranks, cost, and what to set",
        "checkpoints": "list a run's checkpoints; verify their files; print a hash of the newest",
    },
    "steer": {
        "sweep": "follow a sweep, start its points that are not submitted or have failed, or cancel it",
        "requeue": "ask a run to write a checkpoint and go back into Slurm's queue; with --now, ask Slurm to start it at once",
        "cancel": "kill a run at once, without a new checkpoint",
        "delete": "delete a run: its checkpoints, metrics and logs",
    },
    "prove": {
        "certify": "test that your own script resumes: stop it, kill it at chosen moments, and compare the results",
        "drill": "test this cluster: inject a fault into a short run, and check that the run recovers from it",
        "replay": "compute some steps of a run again, and compare them with what it recorded",
        "bisect": "find the first step and tensor in which two runs differ, and what differed before it",
        "audit": "compute random segments of a run again, and say whether they give what it recorded",
    },
    "site": {
        "doctor": "say whether this site, and with --nodes its nodes, are ready for a run, and what to do",
        "config": "print the keys of the configuration: type, default and meaning",
        "site": "show the site profile (a cluster's default settings) used on this host, list all, or write a new one",
        "container": "build a container image for runs, or check that an image has what a run needs",
        "completion": "print a shell script for tab completion of commands, options, keys and runs",
    },
}
"""Group -> verb -> what it does, as `--help` shows them; each verb is a module of `verbs`, imported when the user calls it."""
VERBS = tuple(verb for group in GROUPS.values() for verb in group)

_NEGATIVE_NUMBER = re.compile(r"-\.?\d")
SCRIPT_VERBS = frozenset({"certify", "join", "render", "submit"})
"""Verbs that take the command of a script after `--`, as `args.command`."""
_DASHED_SETTING = re.compile(r"--(?P<key>[a-z_][\w.-]*)=")
INTERRUPTED_CODE = 130
BROKEN_PIPE_CODE = 141
_NO_ROOM_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. Without `argv`, run the command in `sys.argv`."""
    if argv is None:
        open_closed_streams()
        # Modules, functions and classes are no garbage. By default, Python searches for some whenever 700 more objects exist,
        # and once more at its end: a tenth of a short command.
        gc.set_threshold(20_000, 10, 10)
        atexit.register(gc.freeze)
    with guarded_terminal():
        return _main(sys.argv[1:] if argv is None else list(argv))


def _main(words: list[str]) -> int:
    try:
        code = _dispatch(words, os.environ)
        sys.stdout.flush()
    except DdpHpcError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    except BrokenPipeError:  # the reader closed the pipe
        drop_output()
        return BROKEN_PIPE_CODE
    except OSError as error:
        explained = _system_error_message(error)
        if explained is None:
            raise  # it concerns no file of the user's, so it is an error in ddp-hpc
        print(f"error: {explained}", file=sys.stderr)
        return FAILED
    return code


def _system_error_message(error: OSError) -> str | None:
    """Return the message for an error of the system; None where it concerns nothing of the user's."""
    if isinstance(error, PermissionError) and error.filename is not None and (owner := _other_owner(error.filename)):
        return (
            f"{error.filename} cannot be used: {error.strerror}. It belongs to {owner}; ask for access. How to share a run "
            'without its secrets: docs/security.md, "A run\'s directory".'
        )
    if error.filename is not None:
        return f"{error.filename} cannot be used: {error.strerror}. Check the path, its permissions, and the free space there."
    if error.errno in _NO_ROOM_ERRNOS:  # write(2) knows no name
        return _no_room_message(error)
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()  # noqa: PTH109  `Path.cwd` is the same
        except FileNotFoundError:
            return (
                "The directory that this shell is in was deleted. Run `cd` to one that exists, and repeat the command."
            )
    return None


def _other_owner(filename: str | bytes) -> str | None:
    """Return the user who owns a file, or the closed directory that it is in; None where that is this user, or not known."""
    from pathlib import Path  # late: `--help` needs no paths

    for place in [path := Path(os.fsdecode(filename)).absolute(), *path.parents]:
        with suppress(OSError, KeyError):
            return None if place.stat().st_uid == os.geteuid() else place.owner()
    return None


def _no_room_message(error: OSError) -> str:
    """Return what to tell where something could not be written; drop the output if it was that."""
    try:
        print(flush=True)  # a flush alone has nothing to write where the output is not buffered
    except OSError:
        drop_output()
        return (
            f"the output of this command could not be written: {error.strerror}. Free some space, or send the output elsewhere. "
            "The command may have done its work all the same: a run that it has submitted goes on, and `ddp-hpc list` shows it."
        )
    return f"a file that this command writes could not be written: {error.strerror}. Free some space, and repeat the command."


def _dispatch(words: list[str], environment: Mapping[str, str]) -> int:
    if not words or words[0] not in VERBS:
        parser = _top_parser()
        parser.parse_args(words if words[:1] and words[0].startswith("-") else [])
        parser.error(
            f"{words[0]!r} is not a command. {did_you_mean(words[0], VERBS)}`ddp-hpc --help` lists them."
            if words
            else "which command? `ddp-hpc --help` lists them."
        )
    name, *rest = words
    verb = importlib.import_module(f"ddp_hpc.cli.verbs.{name}")
    parser = argparse.ArgumentParser(prog=f"ddp-hpc {name}", description=verb.__doc__, allow_abbrev=False)
    verb.add_arguments(parser)
    number = rest.index("--") if name in SCRIPT_VERBS and "--" in rest else None
    parser.set_defaults(command=None if number is None else rest[number + 1 :])
    rest = rest[:number]
    words = [_undashed_setting(word) for word in rest]
    # In Python 3.11, `parse_intermixed_args` makes the text of the usage first, which takes as long as all other parsing.
    parse = parser.parse_known_intermixed_args if _has_mixed_options(words) else parser.parse_known_args
    args, unknown = parse(words)
    script = next((word for word in words if word.endswith(".py") and "=" not in word), None)
    if name in SCRIPT_VERBS and number is None and script is not None:
        parser.error(f"a script's command stands after `--`: `ddp-hpc {name} -- python {script}`")
    if unknown:
        hint = did_you_mean(unknown[0], parser._option_string_actions, cutoff=0.7)  # noqa: SLF001  argparse has no other list
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. {hint}`ddp-hpc {name} --help` lists the options.")
    code: int = verb.run(args, environment)
    return code


def _has_mixed_options(words: Sequence[str]) -> bool:
    """Return whether options stand between other words, where some words may be the values of options."""
    if any(word in {"-", "--"} or " " in word or _NEGATIVE_NUMBER.match(word) for word in words):
        return True  # words that begin with a dash and may be no options
    others = [number for number, word in enumerate(words) if not word.startswith("-")]
    return others != list(range(others[0], others[-1] + 1)) if others else False


def _undashed_setting(word: str) -> str:
    """Return `train.lr=0.1` for `--train.lr=0.1`, and anything else as it is."""
    match = _DASHED_SETTING.match(word)
    if match is None:
        return word
    from ddp_hpc.run.spec import RunSpec  # late: only such a word waits for it

    is_key = "." in match["key"] or match["key"] in RunSpec.__dataclass_fields__
    return word[2:] if is_key else word


def _top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddp-hpc",
        usage="ddp-hpc [-h] [--version] COMMAND ...",
        description="Run PyTorch DDP training on a laptop or a Slurm cluster, and resume it after preemptions and failures.",
        epilog="`ddp-hpc COMMAND --help` describes one command.",
        allow_abbrev=False,
        add_help=False,
    )
    for title, verbs in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, text in verbs.items():
            group.add_argument(name, nargs="?", help=text)  # for the text alone
    options = parser.add_argument_group("options")
    options.add_argument("-h", "--help", action="help", help="show this help")
    options.add_argument("--version", action="version", version=f"ddp-hpc {__version__}", help="show the version")
    return parser
