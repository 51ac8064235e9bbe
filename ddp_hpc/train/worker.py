"""One process of the training: joins the group, builds the recipe, runs the loop, returns an exit code."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ddp_hpc.base.errors import ConfigError, exit_code_of
from ddp_hpc.base.exit_codes import FINISHED, STOPPED
from ddp_hpc.base.names import shorten_names
from ddp_hpc.base.processes import unclaimed_stop_signals
from ddp_hpc.cluster.rank_probe.deadlines import Deadline, HangCollector, deadline_file
from ddp_hpc.cluster.rank_probe.folder import socket_of
from ddp_hpc.cluster.rank_probe.server import serve
from ddp_hpc.cluster.rendezvous.worker_env import PROBE_FOLDER, PROBES_ITSELF, USERS_CODE
from ddp_hpc.cluster.slow_ranks.reporter import reporter_of
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.failure_reports import Phase, WorkerFailure, is_lost_connection, make_failure, write_failure
from ddp_hpc.run.run_dir.joined_ranks import forget_missing, write_missing
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_rendezvous_token
from ddp_hpc.run.run_dir.replays import AttemptInputs, write_inputs
from ddp_hpc.run.run_dir.software_versions import change_texts, environment_here, newest_environment, write_environment
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.missing_files import missing_path_problems, refuse_missing
from ddp_hpc.train import process_group
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.nonfinite import explain_nan_check
from ddp_hpc.train.engine.optimizer import build_optimizer
from ddp_hpc.train.engine.replay_trace import set_up_replay
from ddp_hpc.train.engine.training import Training, assemble_training, configure_torch
from ddp_hpc.train.fork_safety import no_openmp_pool, why_not_fork
from ddp_hpc.train.late_compiler import DYNAMO, import_compiler_late
from ddp_hpc.train.process_group import Group, RankInfo
from ddp_hpc.train.recipe import TARGETS, build_recipe, check_args, code_hashes, load_builder, refuse_other_return
from ddp_hpc.train.recording.beside import WAIT_S_BY_ENDING
from ddp_hpc.train.recording.rank_log import redirect_output
from ddp_hpc.train.state import rng
from ddp_hpc.train.state.initial_weights import find_weights
from ddp_hpc.train.state.optimizer_state import refuse_other_optimizer
from ddp_hpc.train.stop import StopFlag
from ddp_hpc.train.watchdog import TEARDOWN_S, Watchdog, leave_within

log = logging.getLogger(__name__)

_HOST_INDEPENDENT_ERRORS = (ImportError, SyntaxError, NameError, AttributeError, TypeError)
"""Errors of an import that hardly depend on the host; others may (a device, a variable, a file)."""
INDUCTOR = "_inductor"
_MOST_SHOWN = 8
"""How many changes of the environment are logged one by one."""


def preload(run_path: str) -> str:
    """Import what every worker needs; return why workers must not be forked from this process, or an empty text."""
    spec = load_resolved(RunDir(Path(run_path)).config, is_patient=True)
    with no_openmp_pool():
        builder = load_builder(spec.recipe.target)
        if spec.recipe.target in TARGETS:  # it imports torchvision late, for not every run has it
            getattr(sys.modules[builder.__module__], "import_early", lambda _: None)(spec.recipe.args)
        if spec.train.compile or spec.train.deterministic or torch.__version__ < "2.7":
            importlib.import_module(DYNAMO)  # every worker would import it: DDP of PyTorch 2.6 does in any case
        if spec.profile.kind == "torch" and hasattr(torch, INDUCTOR):
            importlib.import_module(f"torch.{INDUCTOR}.config")  # PyTorch's profiler would, amid the training
        import_compiler_late()
        # What an optimizer imports is imported here once. Without a step or a backward pass: with GPUs, these start CUDA or
        # threads, and then this process must not fork.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]).zero_grad()
    return why_not_fork(spec.recipe.target)


def check(spec: RunSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """Check what needs neither data nor devices: the recipe's function and arguments, the first weights, the optimizer of a resume."""
    yield from _check_function(spec, environ)
    yield from missing_path_problems(spec.recipe.args)
    if spec.checkpoint.keep_best and spec.checkpoint.best_metric != "loss":
        yield f"only the job knows the recipe's metrics, so `checkpoint.best_metric` ({spec.checkpoint.best_metric!r}) may be none of them"
    run = RunDir(spec.path)
    steps = checkpoint_names.committed_steps(run)
    if steps:
        saved = checkpoint_store.read_manifest(checkpoint_names.checkpoint_path(run, steps[-1]))
        if saved.made.get("has_recipes_optimizer") is False:
            mine = build_optimizer(spec.optimizer, torch.nn.Linear(1, 1), spec.train.lr)
            refuse_other_optimizer(type(mine).__name__, saved.state["optimizer"])
        if spec.recipe != load_resolved(run.config).recipe:
            yield f"`recipe` has changed since step {steps[-1]}, and only the job builds the model, so it may not fit the checkpoint"
    elif spec.train.init_from is not None:
        try:
            find_weights(spec.train.init_from, runs_dir=spec.path.parent)
            yield "only the job builds the model, so the weights of `train.init_from` may not fit it"
        except ConfigError as error:
            yield refuse_missing(error, spec.train.init_from, spec)


def _check_function(spec: RunSpec, environ: Mapping[str, str]) -> Iterator[str]:
    target, other, is_users = spec.recipe.target, spec.environment_key, bool(environ.get(USERS_CODE))
    try:
        builder = load_builder(target)
        check_args(target, builder, spec.recipe.args)
        refuse_other_return(target, builder)
    except ConfigError as error:
        is_unknown_import = error.__cause__ is not None and not isinstance(error.__cause__, _HOST_INDEPENDENT_ERRORS)
        if is_unknown_import:
            yield f"a node may have what this host lacks: {error}"
        elif other and not (is_users and isinstance(error.__cause__, TypeError | None)):
            yield f"`{other}` may give the job another Python: {error}"
        else:
            raise


def main(run_path: str, environ: Mapping[str, str], *, attempt: int, listen_fd: int | None = None) -> int:
    """Run one worker to its end; return its exit code. An exception is written to the run's errors."""
    run = RunDir(Path(run_path))
    rank_info = process_group.rank_info_from_environ(environ)
    redirect_output(run.rank_log(attempt, rank_info.rank), is_rank_zero=rank_info.is_rank_zero)
    flag = StopFlag(run.stop_request, unclaimed_stop_signals())
    flag.listen()
    deadline = _serve_rank_probe(run, attempt, rank_info.rank, environ)
    training: Training | None = None
    phase: Phase = "joining"
    try:
        spec = load_resolved(run.config, is_patient=True)
        allowance = run.allowance(attempt) if rank_info.is_rank_zero else None
        watchdog = Watchdog(
            spec.restart.hang_timeout_s, touches_log=rank_info.is_rank_zero, allowance=allowance, deadline=deadline
        )
        group = _join(run, spec, rank_info, environ, attempt=attempt, listen_fd=listen_fd)
        watchdog.allow(spec.restart.build_timeout_s)  # joining has its own timeout: other nodes may start later
        phase = "building"
        configure_torch(spec)  # the same seed on every rank
        recipe = build_recipe(spec.recipe.target, spec.recipe.args)
        # Recipes take different times on different nodes; the first collective has a shorter timeout, so wait here before it.
        group.barrier_through_store("built", silence_s=spec.restart.build_timeout_s)
        watchdog.feed()
        phase = "training"
        training = assemble_training(spec, recipe, run, group, attempt=attempt, stop=flag, watchdog=watchdog)
        if rank_info.is_rank_zero:
            _record_environment(run, attempt, environ)
            _record_inputs(run, attempt, environ, rank_info.world_size)
        set_up_replay(training)
        rng.seed_everything("rank", spec.seed, 0, rank_info.rank)  # from here on, ranks draw different numbers
        # From here on, report when this rank launches its collectives, and how long its phases take.
        folder = environ.get(PROBE_FOLDER)
        reporter_of(run, attempt, environ, folder, phases=training.phases.times_so_far, has_store=bool(folder)).start()
        code = _train_and_close(training, watchdog)
    except BaseException as raised:  # noqa: BLE001  whatever ends a worker is recorded
        step = training.state.position.step if training else 0
        error = explain_nan_check(raised, run, rank=rank_info.rank, step=step) or raised
        failure = make_failure(error, rank=rank_info.rank, log=run.rank_log(attempt, rank_info.rank), phase=phase)
        is_lost = is_lost_connection(failure.exception)
        _report(run, attempt, replace(failure, step=step, is_secondary=is_lost), training)
        if training:
            training.phases.close()
        return exit_code_of(error)
    del training, group
    process_group.leave_process_group()
    return code


def _train_and_close(training: Training, watchdog: Watchdog) -> int:
    """Train, and close all records; return the exit code. From the end of the training on, the process exits within a bound."""
    code = FINISHED if train(training) else STOPPED
    training.phases.close()
    # All is committed, so neither a record nor a teardown that hangs must keep the job. The recorders may take their time.
    leave_within(max(WAIT_S_BY_ENDING.values()) + TEARDOWN_S, lambda: os._exit(code))
    watchdog.dismiss()
    training.recorder.close("finished" if code == FINISHED else "stopped")
    for observer in training.observers:
        observer.close()
    return code


def _serve_rank_probe(run: RunDir, attempt: int, rank: int, environ: Mapping[str, str]) -> Deadline | None:
    """Answer this node's questions about stacks and collectives from here on, as far as this PyTorch can.

    Return where this rank writes when its watchdog would end it, as its node asks shortly before.
    """
    folder = Path(environ[PROBE_FOLDER]) if PROBE_FOLDER in environ else None
    why_not = "this node has no directory for sockets"
    if folder:
        why_not = serve(socket_of(folder, rank), num_ranks=int(environ.get("LOCAL_WORLD_SIZE", "1")))
    if why_not and rank == 0:
        log.info("a hang is reported without the ranks' collectives, because %s", why_not)
    if folder is None:
        return None
    deadline = Deadline(deadline_file(folder, rank))
    deadline.put_off(float("inf"))
    if PROBES_ITSELF in environ and not why_not:
        # No agent runs beside it, so a thread asks: in vain only where another thread holds the interpreter (GIL).
        collector = HangCollector(run, attempt, folder, [rank])
        threading.Thread(target=collector.look_for_ever, name="hang collector", daemon=True).start()
    return deadline


def _join(  # noqa: PLR0913  a rank, and what it needs to join the others
    run: RunDir, spec: RunSpec, rank_info: RankInfo, environ: Mapping[str, str], *, attempt: int, listen_fd: int | None
) -> Group:
    """Choose this rank's device, and join the process group."""
    visible, is_task = environ.get("CUDA_VISIBLE_DEVICES"), spec.launcher == "srun"
    num_gpus, timeout_s = spec.resources.num_gpus, spec.restart.hang_timeout_s
    device = process_group.choose_device(rank_info, num_gpus, visible=visible, may_be_alone=is_task)
    token = read_rendezvous_token(run.rendezvous_token(attempt)) if rank_info.world_size > 1 else ""

    report = partial(write_missing, run, attempt, workers_per_node=rank_info.local_world_size)
    group = process_group.join(
        rank_info, device, token=token, listen_fd=listen_fd, timeout_s=timeout_s, report_missing=report
    )
    if rank_info.rank == 0:
        forget_missing(run, attempt)  # also what the supervisor may have written
    return group


def _record_environment(run: RunDir, attempt: int, environ: Mapping[str, str]) -> None:
    """Record the software and hardware of this attempt; log what differs from the attempt before."""
    try:
        here = environment_here(environ)
        before = newest_environment(run, before=attempt)
        write_environment(run, attempt, here)
    except (ConfigError, OSError, ValueError) as error:  # a missing record must not end the training
        log.warning("cannot record the environment of this attempt: %s. The training goes on without it.", error)
        return
    changed = list(change_texts(before[1], here)) if before else []
    if before and changed:
        log.warning(
            "the environment is not as in attempt %d, so results may differ: %s. The training goes on.",
            before[0],
            shorten_names(changed, _MOST_SHOWN, between="; "),
        )


def _record_inputs(run: RunDir, attempt: int, environ: Mapping[str, str], world_size: int) -> None:
    """Record what `ddp-hpc replay` needs to compute the steps of this attempt again."""
    folders = filter(None, environ.get(USERS_CODE, "").split(os.pathsep))
    paths = tuple(dict.fromkeys(str(Path(path).resolve()) for path in folders))
    try:
        inputs = AttemptInputs(
            attempt=attempt,
            world_size=world_size,
            config=run.config.read_text(encoding="utf-8"),
            import_paths=paths,
            work_dir=str(Path.cwd()),
            code=code_hashes(paths),
        )
        write_inputs(run, inputs)
    except OSError as error:  # a missing record must not end the training
        log.warning(
            "cannot record what this attempt computes with: %s. The training goes on; `ddp-hpc replay` then uses the newest configuration.",
            error,
        )


def _report(run: RunDir, attempt: int, failure: WorkerFailure, training: Training | None) -> None:
    """Write down why this worker ends; then let the recorders have the last numbers."""
    log.error("%s", failure.exception if failure.is_plain else failure.traceback)
    write_failure(run.rank_error(attempt, failure.rank), failure)
    if training:
        training.recorder.record_progress(training.state.position, now=True)
        training.recorder.close("failed")
