"""The table of diagnoses: which evidence names which defect, in which words, and which line mends it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.prove.certify.evidence import Evidence

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)


@dataclass(frozen=True)
class Defect:
    """A defect that a run has shown."""

    name: str
    what: str
    """What is wrong."""
    evidence: str
    """What has shown it."""
    mend: str
    """Lines of code that mend it."""
    is_sure: bool = True
    """Whether the evidence fits this defect only."""


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    name: str
    what: str
    mend: str
    shows: Callable[[Evidence], str]
    """Returns what in the evidence shows the defect; nothing where it does not."""
    is_sure: Callable[[Evidence], bool] = lambda _: True
    """Tells whether that evidence fits no other defect."""
    covers: frozenset[str] = frozenset()
    """Defects whose evidence follows from this one."""


def diagnose(evidence: Evidence) -> list[Defect]:
    """Return the defects that the evidence shows: the sure ones, or else all that are possible."""
    found = [
        Defect(rule.name, rule.what, shown, rule.mend, rule.is_sure(evidence))
        for rule in RULES
        if (shown := rule.shows(evidence))
    ]
    covered = {name for rule in RULES if any(one.name == rule.name for one in found) for name in rule.covers}
    found = [one for one in found if one.name not in covered]
    sure = [one for one in found if one.is_sure]
    return sure or found


def _saves_in_handler(seen: Evidence) -> str:
    is_of_signal = bool({f"SIG{seen.fault.stop_signal}", "SIG*"} & seen.source.saving_signals)
    if not seen.fault.is_stop or not is_of_signal or seen.signal_action != "caught":
        return ""
    effect = (
        "a file was saved after the signal, in the middle of a step" if seen.saved_after_signal else "the signal came"
    )
    return f"the handler at {seen.source.saving_handler} saves; {effect}"


def _loaders_die(seen: Evidence) -> str:
    if not seen.fault.is_stop or not seen.loader_died or (seen.has_stopped and not seen.failed_ranks):
        return ""
    return f"after the signal, the script ended with: {seen.loader_died}"


def _ranks_disagree(seen: Evidence) -> str:
    if not seen.fault.is_stop or seen.signal_action != "caught" or seen.loader_died or _saves_in_handler(seen):
        return ""
    if seen.hung_in == "collective":
        return "after the stop signal, a rank waits in a collective for another that has exited"
    if seen.lost_ranks:
        ranks = ", ".join(map(str, sorted(seen.lost_ranks)))
        return f"the ranks got the signal at different moments; rank {ranks} lost the connection to a rank that had exited earlier"
    return ""


def _uses_half_written(seen: Evidence) -> str:
    if not seen.half_written:
        return ""
    if seen.load_error:
        return f"{seen.half_written[0]} was cut off by a kill while the script wrote it under its final name; the next attempt failed with: {seen.load_error}"
    if seen.outcome == "failed" or (seen.outcome == "hung" and seen.resumed_at is None):
        return f"{seen.half_written[0]} was cut off by a kill while the script wrote it under its final name, and the script did not resume"
    broken = [one.file for one in seen.differences if one.file in seen.half_written and not one.path]
    if broken:
        return f"{broken[0]} was cut off by a kill while the script wrote it under its final name, and is incomplete at the end, too"
    if seen.starts_over and seen.read_half_written:
        return f"{seen.read_half_written} was cut off by a kill while the script wrote it under its final name; the script read it and started over"
    return ""


def _is_not_atomic(seen: Evidence) -> str:
    """The same, where no kill has cut a file off."""
    if seen.half_written or seen.fault.is_stop:
        return ""
    if seen.load_error:
        return f"the attempt after the fault failed with: {seen.load_error}"
    if seen.fault.moment == "in a save" and seen.in_place and not seen.was_in_save:
        return f"{seen.in_place[0]} is saved under the name that the script loads; no kill came while the file was open, but a later one may"
    return ""


def _differs(seen: Evidence) -> bool:
    """Tell whether the run came back to another end, which is its own fault."""
    if not seen.came_back or seen.outcome == "untouched":
        return False
    if seen.is_deterministic is False or seen.has_same_weights:
        return False  # undisturbed runs differ, too; or only printed losses differ, as those of a running mean do
    return bool(seen.differences) or bool(seen.first_loss_differs) or bool(seen.later_loss_differs)


_FAR = 3
"""So many positions too early cannot come from output that was seen late."""


def _resumes_wrong_file(seen: Evidence) -> str:
    if not seen.came_back and not seen.starts_over:
        return ""
    if seen.starts_over and not seen.read_states:
        return ""
    if seen.resumed_at is None or seen.should_resume_at is None or seen.num_too_early < 1:
        return ""
    others = [path for path in seen.read_states if path != seen.newest_state]
    if not others or (len(others) < len(seen.read_states) and seen.num_too_early < _FAR):
        return ""
    which = f"it read {', '.join(others)}, but the newest is {seen.newest_state}"
    sort = (
        f"; {seen.source.sorts_names} compares the names as text, so that `10` comes before `9`"
        if seen.source.sorts_names
        else ""
    )
    best = (
        "; the best saved state is not always the newest"
        if any("best" in path.lower() for path in seen.read_states)
        else ""
    )
    at, should = _text(seen.resumed_at), _text(seen.should_resume_at)
    return f"the script continued at {seen.unit} {at} instead of {should}: {which}{sort or best}"


def _starts_over(seen: Evidence) -> str:
    if not seen.starts_over or seen.read_states or seen.read_half_written:
        return ""
    if seen.resumed_at is None:
        return (
            f"{seen.newest_state} existed, but the script read no saved state, and saved as often as without the fault"
        )
    return f"{seen.newest_state} existed, but the script read no saved state and began at its first {seen.unit}"


def _ends_early(seen: Evidence) -> str:
    if seen.ended_at is None:
        return ""
    return f"the script ended with exit code 0 at {seen.unit} {_text(seen.ended_at)}, but the undisturbed run goes on after that"


_COUNTERS = {"step", "steps", "global_step", "iteration", "iter", "num_steps", "batches_done"}


def _miscounts(seen: Evidence) -> str:
    """Return a counter of the script's own that ends elsewhere; a scheduler that is off by one leaves it alone."""
    if not _differs(seen):
        return ""
    own = [
        one
        for one in seen.differences
        if one.path.rpartition(".")[2] in _COUNTERS and one.here.isdigit() and one.undisturbed.isdigit()
    ]
    if not own:
        return ""
    return (
        f"{own[0].path} in {own[0].file} is {own[0].here} at the end, and {own[0].undisturbed} in the undisturbed run"
    )


def _has_other_lr(seen: Evidence) -> str:
    """Return which value of a learning rate scheduler is another one."""
    off = [one for one in seen.differences if one.path.rpartition(".")[2] in {"last_epoch", "_step_count"}]
    if off:
        return f"{off[0].path} in {off[0].file} is {off[0].here} at the end, and {off[0].undisturbed} in the undisturbed run"
    if seen.lr_differs is not None:
        position, here, other = seen.lr_differs
        return f"the learning rate at {seen.unit} {_text(position)} is {here:g}, and {other:g} in the undisturbed run"
    rates = [one for one in seen.differences if one.path.rpartition(".")[2] == "lr"]
    if rates and _is_optimizer_whole(seen):
        return f"{rates[0].path} in {rates[0].file} is {rates[0].here} at the end, and {rates[0].undisturbed} in the undisturbed run"
    return ""


def _is_optimizer_whole(seen: Evidence) -> bool:
    return seen.checkpoint is not None and seen.checkpoint.has_optimizer


def _is_all_saved(seen: Evidence) -> bool:
    """Tell whether the saved states have all that a first loss depends on, so that only the order of the data is left."""
    saved = seen.checkpoint
    return saved is not None and saved.has_optimizer and (saved.has_rng or not seen.source.draws_random)


def _has_unsaved_scheduler(seen: Evidence) -> bool:
    return seen.checkpoint is not None and not seen.checkpoint.has_lr_scheduler


def _begins_anew(seen: Evidence) -> bool:
    """Tell whether the first learning rate that differs is the first one of the training."""
    return seen.lr_differs is not None and seen.lr_differs[1] == seen.first_lr


def _scheduler_off(seen: Evidence) -> str:
    if not _differs(seen) or (_has_unsaved_scheduler(seen) and _begins_anew(seen)):
        return ""
    return _has_other_lr(seen)


def _scheduler_unsaved(seen: Evidence) -> str:
    if not _differs(seen) or not _has_unsaved_scheduler(seen) or (seen.lr_differs and not _begins_anew(seen)):
        return ""
    shown = _has_other_lr(seen)
    return f"its saved states have no `last_epoch` of a scheduler; {shown}" if shown else ""


def _optimizer_unsaved(seen: Evidence) -> str:
    if not _differs(seen) or seen.checkpoint is None or seen.checkpoint.has_optimizer:
        return ""
    if seen.first_loss_differs and not seen.source.stateful_optimizer:
        return ""
    same = (
        "the first loss after the resume is the same, later ones are not; " if seen.first_loss_differs is False else ""
    )
    return f"{same}its saved states have no `param_groups`, which every optimizer's state has"


def _optimizer_unloaded(seen: Evidence) -> str:
    has_moments = _is_optimizer_whole(seen) and bool(seen.source.stateful_optimizer) and not seen.source.loads_optimizer
    if not _differs(seen) or not has_moments or seen.first_loss_differs is not False or not seen.later_loss_differs:
        return ""
    return "the first loss after the resume is the same, later ones are not; the optimizer's state is saved, but no `optimizer.load_state_dict` was found"


def _rng_unsaved(seen: Evidence) -> str:
    if not _differs(seen) or not seen.source.draws_random or (seen.checkpoint is not None and seen.checkpoint.has_rng):
        return ""
    if _has_other_lr(seen) or not _is_optimizer_whole(seen):
        return ""
    return f"{seen.source.draws_random} draws random numbers in each step, but the saved states have no state of a random generator"


def _weights_unloaded(seen: Evidence) -> str:
    if not _differs(seen) or not seen.first_loss_differs or not seen.source.loads_loosely:
        return ""
    return f"the first loss after the resume differs; {seen.source.loads_loosely} loads with `strict=False`"


def _reshuffled(seen: Evidence) -> str:
    if seen.first_losses_differ and seen.source.seeded_by_clock:
        return f"two undisturbed runs differ at their first loss already; {seen.source.seeded_by_clock} takes its seed from a clock"
    if not _differs(seen) or seen.first_loss_differs is False or _has_other_lr(seen):
        return ""
    if seen.resumed_at is None and seen.scale.unit:
        return ""  # nothing was trained
    if seen.source.seeded_by_clock:
        return f"the first loss after the resume differs; {seen.source.seeded_by_clock} takes its seed from a clock"
    # With `set_epoch`, a DistributedSampler's order depends on the epoch alone; so something else is likelier, if there is any.
    is_fixed = bool(seen.source.sets_epoch) and not _is_all_saved(seen)
    where = seen.source.shuffles or ("" if is_fixed else seen.source.distributed_sampler)
    if not where:
        return ""
    epoch = "" if seen.source.sets_epoch else ", and no `set_epoch` was found"
    what = "the first loss after the resume" if seen.first_loss_differs else "its result"
    return f"{what} differs; {where} shuffles{epoch}"


def _doubles_metrics(seen: Evidence) -> str:
    if not seen.came_back or not seen.doubled:
        return ""
    return f"{seen.doubled[0]} has the lines of one {seen.unit} twice; in the undisturbed run, once"


def _ignores_signal(seen: Evidence) -> str:
    if not seen.fault.is_stop:
        return ""
    name = f"SIG{seen.fault.stop_signal}"
    if seen.signal_action == "ignored":
        return f"the script ignores {name} (by /proc/PID/status), and printed {seen.num_after_signal} more {seen.unit}s"
    if seen.ran_on and seen.signal_action == "caught":
        return f"the script catches {name}, and went on for {seen.num_after_signal} {seen.unit}s, to its end or until it was killed"
    return ""


def _hangs_in_teardown(seen: Evidence) -> str:
    if seen.hung_in != "teardown":
        return ""
    return f"a rank does not exit; its stack: {innermost(seen.stacks)}"


def _hangs(seen: Evidence) -> str:
    if seen.hung_in not in {"collective", "elsewhere"} or _ranks_disagree(seen):
        return ""
    return f"the script stopped printing and computing; a rank's stack: {innermost(seen.stacks)}"


def innermost(stacks: Mapping[int, str]) -> str:
    """Return the innermost frames of the first rank's main thread, whose stack faulthandler writes last, in one line."""
    for rank, text in sorted(stacks.items()):
        *_, main = _THREAD.split(text)
        frames = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
        if frames:
            return f"rank {rank}: " + " < ".join(frame.replace('File "', "").replace('"', "") for frame in frames[:3])
    return "none could be read"


def _text(position: Sequence[float]) -> str:
    return "/".join(map(str, position))


def _is_only(*others: Callable[[Evidence], str]) -> Callable[[Evidence], bool]:
    """Tell that none of the others fits."""
    return lambda seen: not any(other(seen) for other in others)


_AGREE = "flag = torch.tensor(int(stop_asked)); dist.all_reduce(flag, dist.ReduceOp.MAX)  # each step, on all ranks\nif flag.item(): save(); break"
_ATOMIC = "torch.save(state, path + '.tmp'); os.replace(path + '.tmp', path)"

RULES: Sequence[Rule] = (
    Rule(
        "save in the signal handler",
        "The signal handler saves. It runs between any two lines of Python, so it may save weights in the middle of an update, and "
        "each rank saves at another step.",
        f"def on_signal(*_): global stop_asked; stop_asked = True   # the handler only sets a flag\n{_AGREE}",
        _saves_in_handler,
        is_sure=lambda seen: seen.saved_after_signal,
        covers=frozenset(
            {
                "data reshuffled",
                "ends too early",
                "goes on at the wrong step",
                "metrics doubled",
                "optimizer not saved",
                "RNG not saved",
                "scheduler not saved",
                "scheduler off by one",
            }
        ),
    ),
    Rule(
        "loader workers die first",
        "The signal reaches the processes of the DataLoader, too. It kills them, and the training fails before it has saved.",
        "DataLoader(..., worker_init_fn=lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN))",
        _loaders_die,
    ),
    Rule(
        "ranks do not agree on the step of the stop",
        "Each rank stops when it sees the signal itself, so one leaves while the others wait for it in a collective.",
        _AGREE,
        _ranks_disagree,
    ),
    Rule(
        "half-written file used",
        "The script saves directly under the name that it loads from, so a kill in a save leaves a file that cannot be read.",
        _ATOMIC,
        _uses_half_written,
    ),
    Rule(
        "half-written file used",
        "When the script resumes, it cannot read its saved state.",
        _ATOMIC,
        _is_not_atomic,
        is_sure=lambda _: False,
    ),
    Rule(
        "starts over",
        "The script does not load what it has saved.",
        "if os.path.exists(path): state = torch.load(path); model.load_state_dict(state['model']); start = state['step']",
        _starts_over,
    ),
    Rule(
        "ends too early",
        "The script ends as if it had finished, with work left to do: a file says that it is done, or its counter is wrong.",
        "open('done', 'w').close()   # as the very last line, after the results are saved",
        _ends_early,
    ),
    Rule(
        "resumes from the wrong file",
        "The script resumes from a saved state that is not the newest.",
        "newest = max(Path('checkpoints').glob('epoch_*.pt'), key=lambda p: int(re.search(r'\\d+', p.name)[0]))",
        _resumes_wrong_file,
        is_sure=lambda seen: seen.newest_state not in seen.read_states,
    ),
    Rule(
        "goes on at the wrong step",
        "When the script resumes, it repeats a step that its weights have already seen, or skips one.",
        "state['step'] = step + 1   # the step to go on with: the one after the step that the weights have seen",
        _miscounts,
        covers=frozenset({"scheduler off by one", "scheduler not saved", "data reshuffled", "RNG not saved"}),
    ),
    Rule(
        "weights not loaded",
        "The names in the saved state are not those of the model, for instance because one of them is wrapped in DDP, and "
        "`strict=False` hides that.",
        "model.module.load_state_dict(state['model'])   # without `strict=False`",
        _weights_unloaded,
        covers=frozenset({"data reshuffled", "RNG not saved"}),
    ),
    Rule(
        "scheduler off by one",
        "When the script resumes, its learning rate scheduler is at another step than the training.",
        "lr_scheduler.load_state_dict(state['lr_scheduler'])   # and no `lr_scheduler.step()` that was counted already",
        _scheduler_off,
        is_sure=lambda seen: (
            not _optimizer_unsaved(seen) and (not _has_unsaved_scheduler(seen) or seen.lr_differs is not None)
        ),
    ),
    Rule(
        "scheduler not saved",
        "When the script resumes, its learning rate scheduler starts over.",
        "state['lr_scheduler'] = lr_scheduler.state_dict(); ...; lr_scheduler.load_state_dict(state['lr_scheduler'])",
        _scheduler_unsaved,
        is_sure=lambda seen: not _optimizer_unsaved(seen) and seen.lr_differs is not None,
    ),
    Rule(
        "optimizer not saved",
        "When the script resumes, its optimizer starts over: momentum and moments are lost.",
        "state['optimizer'] = optimizer.state_dict(); ...; optimizer.load_state_dict(state['optimizer'])",
        _optimizer_unsaved,
    ),
    Rule(
        "optimizer not saved",
        "The optimizer's state is saved, but not loaded.",
        "optimizer.load_state_dict(state['optimizer'])",
        _optimizer_unloaded,
        is_sure=_is_only(_has_other_lr),
    ),
    Rule(
        "RNG not saved",
        "When the script resumes, its random generators start over, so dropout and augmentation draw other numbers.",
        "state['rng'] = torch.get_rng_state(); ...; torch.set_rng_state(state['rng'])   # of each rank",
        _rng_unsaved,
        is_sure=_is_only(_reshuffled),
    ),
    Rule(
        "data reshuffled",
        "When the script resumes, it trains on the samples in another order.",
        "sampler = DistributedSampler(data, seed=0); sampler.set_epoch(epoch)   # in each epoch; then skip the batches that are done",
        _reshuffled,
        is_sure=lambda seen: bool(seen.source.seeded_by_clock) or (_is_all_saved(seen) and not seen.source.sets_epoch),
    ),
    Rule(
        "metrics doubled",
        "The script appends to its log again what it had written before the fault.",
        "lines = [line for line in open(log) if step_of(line) <= state['step']]; open(log, 'w').writelines(lines)   # when it resumes",
        _doubles_metrics,
    ),
    Rule(
        "ignores the stop signal",
        "The script does not stop when it is asked to, so Slurm kills it when the grace time is over, and unsaved work is lost.",
        f"signal.signal(signal.SIGTERM, lambda *_: globals().update(stop_asked=True))\n{_AGREE}",
        _ignores_signal,
    ),
    Rule(
        "hangs in teardown",
        "The training is over, but a process does not exit: it waits for a thread, a queue or another rank.",
        "threading.Thread(target=..., daemon=True)   # or end it in a `finally`; `dist.destroy_process_group()` on all ranks",
        _hangs_in_teardown,
    ),
    Rule(
        "hangs",
        "A rank waits without a timeout.",
        "dist.init_process_group('nccl', timeout=timedelta(minutes=10))   # so that a wait for a lost rank ends",
        _hangs,
    ),
)
"""The most specific first."""
