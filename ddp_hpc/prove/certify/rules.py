"""The table of defects: which evidence shows which defect, in which words, and which line mends it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.prove.certify.evidence import TrialEvidence


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


def diagnose(evidence: TrialEvidence) -> list[Defect]:
    """Return the defects that the evidence shows."""
    shown = {name: shows(evidence) for name, (*_, shows) in RULES.items()}
    return [Defect(name, RULES[name][0], text, RULES[name][1]) for name, text in shown.items() if text]


# --- what in the evidence shows a defect; empty where nothing does -------------------------------------------------------


def _ignored_signal_text(seen: TrialEvidence) -> str:
    name, action = f"SIG{seen.fault.stop_signal}", seen.injected_fault.signal_action
    if action == "ignored":
        return f"the script ignores {name} (by /proc/PID/status), and printed {seen.num_after_signal} more {seen.unit}s"
    if seen.has_run_on and action == "caught":
        return f"the script catches {name}, and went on for {seen.num_after_signal} {seen.unit}s, to its end or until it was killed"
    return ""


def _dead_loader_text(seen: TrialEvidence) -> str:
    is_shown = seen.fault.is_stop and seen.dead_loader_line
    return f"after the signal, the script ended with: {seen.dead_loader_line}" if is_shown else ""


def _disagreement_text(seen: TrialEvidence) -> str:
    if seen.injected_fault.signal_action != "caught" or seen.dead_loader_line:
        return ""
    if seen.is_waiting_in_collective:
        return "after the stop signal, a rank waits in a collective for another that has exited"
    if seen.faulty_attempt.lost_ranks:
        ranks = ", ".join(map(str, sorted(seen.faulty_attempt.lost_ranks)))
        return f"the ranks got the signal at different moments; rank {ranks} lost the connection to a rank that had exited earlier"
    return ""


def _half_written_text(seen: TrialEvidence) -> str:
    for file in () if seen.file_missing_beside else seen.cut_off_files:
        cut_off = f"{file} was cut off by a kill while the script wrote it under its final name"
        if seen.record.outcome in {"failed", "hung"} and seen.resume_point is None:
            return f"{cut_off}, and the script did not resume: {seen.error}"
        if seen.has_started_over and file in seen.states_read:
            return f"{cut_off}; the script read it and started over"
        if any(one.file == file and not one.path for one in seen.differences):
            return f"{cut_off}, and is incomplete at the end, too"
    if seen.fault.moment == "in a save" and (spared := seen.states_spared_in_place) and not seen.file_missing_beside:
        return f"{spared[0]} is saved under the name that the script loads; no kill came while the file was open, but a later one may"
    return ""


def _torn_directory_text(seen: TrialEvidence) -> str:
    if seen.record.outcome != "failed" or seen.resume_point is not None or not (missing := seen.file_missing_beside):
        return ""
    return f"a kill left the directory without {missing}, and the script did not resume: {seen.error}"


def _start_over_text(seen: TrialEvidence) -> str:
    if not seen.has_started_over or seen.states_read:
        return ""
    did = "saved as often as without the fault" if seen.resume_point is None else f"began at its first {seen.unit}"
    return f"{seen.newest_state} existed, but the script read no saved state, and {did}"


def _wrong_file_text(seen: TrialEvidence) -> str:
    newest = seen.acceptable_states
    if not newest or not seen.states_read or {*newest}.intersection(seen.states_read) or not seen.num_repeated:
        return ""
    return (
        f"the script continued at {seen.unit} {position_text(seen.resume_point)}, and did {seen.unit}s again: "
        f"it read {', '.join(seen.states_read)}, but the newest is {newest[0]}"
    )


def _miscount_text(seen: TrialEvidence) -> str:
    """Return a counter of the script's own that ends elsewhere; a scheduler that is off by one leaves it alone."""
    return _wrong_number_evidence(
        seen, {"step", "steps", "global_step", "iteration", "iter", "num_steps", "num_updates", "batches_done"}
    )


def _wrong_number_evidence(seen: TrialEvidence, names: set[str]) -> str:
    """Return the first number of these names that is another one at the end; `step` of an optimizer's moments is a tensor."""
    for one in seen.lasting_differences if seen.has_other_end else ():
        if one.path.rpartition(".")[2] in names and not one.here.startswith("tensor"):
            return f"{one.path} in {one.file} is {one.here} at the end, and {one.undisturbed} in the undisturbed run"
    return ""


def _scheduler_off_text(seen: TrialEvidence) -> str:
    """Return a value of a scheduler that is another one, or the learning rate that it has set."""
    saved = seen.baseline.saved_contents
    if _miscount_text(seen) or saved is None:
        return ""
    of_optimizer = {"lr"} if saved.has_optimizer else set()
    shown = _wrong_number_evidence(seen, {"last_epoch", "_step_count"}) or _wrong_number_evidence(seen, of_optimizer)
    missing = "" if saved.has_lr_scheduler else "its saved states have no `last_epoch` of a scheduler; "
    return f"{missing}{shown}" if shown else ""


def _lost_optimizer_text(seen: TrialEvidence) -> str:
    saved = seen.baseline.saved_contents
    if not seen.has_other_end or saved is None or saved.has_optimizer:
        return ""
    is_later = seen.loss_diff_flags[:1] == [False] and any(seen.loss_diff_flags)
    same = "the first loss after the resume is the same, later ones are not; " if is_later else ""
    return f"{same}its saved states have no `param_groups`, which every optimizer's state has"


def _doubled_metrics_text(seen: TrialEvidence) -> str:
    if not seen.has_come_back or seen.doubled_row is None:
        return ""
    file, line = seen.doubled_row
    return f"{file} has the line {line[:60]!r} more often than in the undisturbed run"


def position_text(position: Sequence[float] | None) -> str:
    """Return a position as a reader knows it: `3`, or `1/20` for the step of an epoch."""
    return "/".join(map(str, position or ()))


_STOP_SYNC_CODE = "flag = torch.tensor(int(stop_asked)); dist.all_reduce(flag, dist.ReduceOp.MAX)  # each step, on all ranks\nif flag.item(): save(); break"

RULES: Mapping[str, tuple[str, str, Callable[[TrialEvidence], str]]] = {
    "loader workers die first": (
        "The signal reaches the processes of the DataLoader, too. It kills them, and the training fails before it has saved.",
        "DataLoader(..., worker_init_fn=lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN))",
        _dead_loader_text,
    ),
    "ranks do not agree on the step of the stop": (
        "Each rank stops when it sees the signal itself, so one leaves while the others wait for it in a collective.",
        _STOP_SYNC_CODE,
        _disagreement_text,
    ),
    "ignores the stop signal": (
        "The script does not stop when it is asked to, so Slurm kills it when the grace time is over, and unsaved work is lost.",
        f"signal.signal(signal.SIGTERM, lambda *_: globals().update(stop_asked=True))\n{_STOP_SYNC_CODE}",
        _ignored_signal_text,
    ),
    "half-written file used": (
        "The script saves directly under the name that it loads from, so a kill in a save leaves a file that cannot be read.",
        "torch.save(state, path + '.tmp'); os.replace(path + '.tmp', path)   # also of a text file that names the newest state",
        _half_written_text,
    ),
    "half-written directory used": (
        "The script writes the files of a saved state one after another into the directory that it loads, so a kill in a save leaves only some of them.",
        "save(path + '.tmp'); os.rename(path + '.tmp', path)   # or resume from the newest directory that has a trainer_state.json (Transformers), a .metadata (torch.distributed.checkpoint)",
        _torn_directory_text,
    ),
    "starts over": (
        "The script does not load what it has saved.",
        "if os.path.exists(path): state = torch.load(path); model.load_state_dict(state['model']); start = state['step']",
        _start_over_text,
    ),
    "resumes from the wrong file": (
        "The script resumes from a saved state that is not the newest.",
        "newest = max(Path('checkpoints').glob('epoch_*.pt'), key=lambda p: int(re.search(r'\\d+', p.name)[0]))",
        _wrong_file_text,
    ),
    "goes on at the wrong step": (
        "When the script resumes, it repeats a step that its weights have already seen, or skips one.",
        "state['step'] = step + 1   # the step to go on with: the one after the step that the weights have seen",
        _miscount_text,
    ),
    "optimizer not restored": (
        "When the script resumes, its optimizer starts over: momentum and moments are lost, if it keeps any.",
        "state['optimizer'] = optimizer.state_dict(); ...; optimizer.load_state_dict(state['optimizer'])",
        _lost_optimizer_text,
    ),
    "scheduler not restored": (
        "When the script resumes, its learning rate scheduler is at another step than the training.",
        "state['lr_scheduler'] = lr_scheduler.state_dict(); ...; lr_scheduler.load_state_dict(state['lr_scheduler'])",
        _scheduler_off_text,
    ),
    "metrics doubled": (
        "The script appends to its log again what it had written before the fault.",
        "lines = [line for line in open(log) if step_of(line) <= state['step']]; open(log, 'w').writelines(lines)   # when it resumes",
        _doubled_metrics_text,
    ),
}
"""Name -> what is wrong, the lines that mend it, and what shows it; the most specific first."""
