"""The summary of a run that a command prints at its end: state, reason, directory, and commands to try next."""

from __future__ import annotations

import sys

from ddp_hpc.base import exit_codes
from ddp_hpc.cli.formatting import named_numbers, number
from ddp_hpc.cli.status_text import knows_steps, last_save_text, steps_text
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure, first_failure
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.failed_worker_log import last_lines, log_of
from ddp_hpc.watch.status import RunStatus, continuation_text

EXIT_CODES = {"finished": exit_codes.FINISHED, "stopped": exit_codes.STOPPED, "refused": exit_codes.REFUSED}
"""State of a run that has ended -> exit code; every other state counts as a failure."""

NUM_LOG_LINES = 15


def exit_code(status: RunStatus) -> int:
    """Return the exit code of a command that followed the run to its end."""
    return 0 if status.is_alive else EXIT_CODES.get(status.state, exit_codes.FAILED)


def print_summary(run: RunDir, status: RunStatus, *, word: str, again: str) -> None:
    """Print the summary. `word` names the run on the command line; `again` is the command that submits it again."""
    failure = first_failure(run, status.attempt) if status.state == "failed" and status.attempt is not None else None
    if failure is not None and not failure.is_plain:  # else the reason says all
        print(cause_text(run, failure), file=sys.stderr)
        if status.why_last:
            print(f"why the run ended: {status.why_last}", file=sys.stderr)
    elif status.reason:
        print(f"{status.state}: {status.reason}", file=sys.stderr)
    if status.mended:
        print(f"note: {status.mended}", file=sys.stderr)
    if status.save_error:
        print(f"note: the newest save failed: {status.save_error}", file=sys.stderr)
    print("\n".join([headline(status), f"run   {status.path}", *next_commands(status, word=word, again=again)]))


def headline(status: RunStatus) -> str:
    """Return `demo finished: step 450 of 450; training loss 0.0398; evaluation: loss 0.0512  accuracy 0.9833`."""
    loss = "" if status.loss is None else f"training loss {number(status.loss)}"
    evaluation = f"evaluation: {named_numbers(status.metrics)}" if status.metrics else ""
    if status.saves is None:
        state = "stopped after it wrote a checkpoint" if status.state == "stopped" else status.state
        return "; ".join(filter(None, [f"{status.run} {state}: step {steps_text(status)}", loss, evaluation]))
    step = f"step {steps_text(status)}" if knows_steps(status) else ""
    newest = f"last saved {age}" if (age := last_save_text(status)) else ""
    return "; ".join(filter(None, [f"{status.run} {status.state}", step, loss, evaluation, newest]))


def next_commands(status: RunStatus, *, word: str, again: str) -> list[str]:
    """Return commands to try next, each after its purpose."""
    alive = {"see": f"ddp-hpc status {word}", "logs": f"ddp-hpc logs -f {word}", "stop": f"ddp-hpc stop {word}"}
    why = {"why": f"ddp-hpc why {word}"} if status.state == "failed" else {}
    ended = {**why, "see": f"ddp-hpc status {word}", "logs": f"ddp-hpc logs {word}"}
    effect = continuation_text(status.last_checkpoint, status.saves)
    resume = {} if status.state == "finished" else {"again": f"{again}  # {effect}"}
    weights = {
        "state": f"ddp-hpc checkpoints {word} --digest",
        "model": f"ddp-hpc export {word} -o {status.run}.safetensors",
    }
    has_weights = bool(status.last_checkpoint) and status.saves is None  # what a script's files hold is not known
    steps_ = alive if status.is_alive else {**resume, **ended, **(weights if has_weights else {})}
    return [f"{purpose:<5} {command}" for purpose, command in steps_.items()]


def cause_text(run: RunDir, failure: WorkerFailure) -> str:
    """Return which process failed first, its error, and the last lines of its log."""
    who = "ddp-hpc's agent process" if failure.rank < 0 else f"rank {failure.rank}"
    where = "" if failure.of_script else f", at step {failure.step}"
    host = f" on {failure.host}" if failure.host else ""
    # The report of a hang is the supervisor's, and says itself which rank it is.
    told = [
        f"hang: {failure.exception}" if failure.is_hang else f"{who}{host} failed first{where}: {failure.exception}"
    ]
    log = log_of(run, failure)
    if log is not None:
        told += [f"the last lines of {log}:", *(f"  {line}" for line in last_lines(log, NUM_LOG_LINES))]
    return "\n".join(told)
