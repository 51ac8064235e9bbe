"""What the undisturbed runs show, and what a run under a fault shows beside them: the facts of which verdicts and defects are made. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from ddp_hpc.prove.certify.faults import TrialFault
from ddp_hpc.prove.certify.file_differences import NO_FILE, FileDifference, align_file_names, differences, doubled_line
from ddp_hpc.prove.certify.output_lines import Position, ProgressScale, losses, positions, scale_from_lines
from ddp_hpc.prove.certify.records import AttemptRecord, InjectedFault, RunRecord
from ddp_hpc.prove.certify.saved_files import DISTCP_SUFFIX, Contents, masked_name

_MOST_MISSING_STEPS = 2
"""So many positions may be missing at the end where a step was counted twice: the script did finish."""
_LOADER_DIED = re.compile(r"DataLoader worker .*(?:exited unexpectedly|is killed by signal)")
_COLLECTIVE = re.compile(
    r"in (?:all_reduce|all_gather\w*|broadcast\w*|barrier|reduce\w*|backward|_engine_run_backward|gather)\b"
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the undisturbed runs have shown, and what is the same in each of them."""

    record: RunRecord
    second: RunRecord | None = None
    """A second undisturbed run, where one was needed."""

    @property
    def attempt(self) -> AttemptRecord:
        return self.record.attempts[-1]

    @cached_property
    def scale(self) -> ProgressScale:
        """How its lines say where the training is."""
        return scale_from_lines(self.attempt.lines)

    @cached_property
    def positions(self) -> list[Position]:
        return positions(self.attempt.lines, self.scale)

    @cached_property
    def _own_differences(self) -> list[FileDifference]:
        """By what the files of two undisturbed runs differ."""
        if self.second is None:
            return []
        return differences(align_file_names(self.second.final, self.record.final), self.record.final)

    @cached_property
    def volatile_values(self) -> frozenset[tuple[str, str]]:
        """Values that differ between two undisturbed runs: times of day, for instance."""
        return frozenset((one.file, one.path) for one in self._own_differences)

    @property
    def is_deterministic(self) -> bool | None:
        """Whether two undisturbed runs print the same losses and save the same tensors; None if there was only one run.

        Of a saved state that cannot be read, its bytes count.
        """
        if self.second is None:
            return None
        same_losses = losses(self.second.attempts[-1].lines, self.scale) == losses(self.attempt.lines, self.scale)
        final = self.record.final
        unread = {file for file in final if final[file].kind == "bytes" and masked_name(file) in self.state_names}
        others = (one for one in self._own_differences if one.undisturbed != NO_FILE != one.here)
        return same_losses and not any(one.here.startswith("tensor") or one.file in unread for one in others)

    @cached_property
    def saved_contents(self) -> Contents | None:
        """The values of all its saved states, as one state may lie in several files; None where none could be read."""
        saved = [one.contents.values for one in self.attempt.saves if one.contents is not None]
        values = {path: text for each in saved for path, text in each.items()}
        return Contents(kind="values", values=values) if values else None

    @cached_property
    def state_names(self) -> frozenset[str]:
        """The kinds of files that it saves; only those with an optimizer, if any has one, as the others are exports."""
        saves = self.attempt.saves
        whole = [one for one in saves if one.contents is not None and one.contents.has_optimizer]
        return frozenset(masked_name(one.path) for one in whole or saves)

    @property
    def steps_between_saves(self) -> float:
        """The most steps, or epochs, that lie between two saves; 0 where that is not known."""
        counts = [0, *(len(positions(self.attempt.lines[: one.num_lines], self.scale)) for one in self.attempt.saves)]
        return max((later - earlier for earlier, later in pairwise(counts)), default=0) * self.scale.stride


@dataclass(frozen=True)
class TrialEvidence:
    """The facts of one run under a fault."""

    fault: TrialFault
    record: RunRecord
    baseline: Baseline

    @property
    def injected_fault(self) -> InjectedFault:
        """The fault; the beginning of a run in which none was injected."""
        return self.record.injected or InjectedFault(attempt=0, at_line=0)

    @property
    def unit(self) -> str:
        return self.baseline.scale.unit or "line"

    @property
    def faulty_attempt(self) -> AttemptRecord:
        """The attempt in which the fault came."""
        return self.record.attempts[self.injected_fault.attempt]

    @property
    def _next_attempts(self) -> Sequence[AttemptRecord]:
        return self.record.attempts[self.injected_fault.attempt + 1 :]

    # --- how it ended --------------------------------------------------------------------------------------------------

    @property
    def has_come_back(self) -> bool:
        """Whether the run went on from what it had saved, to its end."""
        return self.record.outcome in {"finished", "untouched"} and not self.has_started_over and self.early_end is None

    @property
    def _exception(self) -> str:
        """The text of the exception that ended the last attempt."""
        last = self.record.attempts[-1]
        first_causes = [text for rank, text in sorted(last.failed_ranks.items()) if rank not in last.lost_ranks]
        return [*first_causes, *last.failed_ranks.values(), last.reason][0].strip()

    @property
    def error(self) -> str:
        """How the last attempt failed, or where it hangs."""
        if self.record.outcome == "hung":
            return f"the script stopped printing and computing; the stack of {_innermost_frames(self.record)}"
        first, *others = self._exception.splitlines() or [""]
        # PyTorch's `mp.spawn` says only at the end of a traceback what happened in its process.
        return (others[-1] if others and first.endswith(":") else first)[:300].rstrip(": ")

    @property
    def is_waiting_in_collective(self) -> bool:
        """Whether it hangs, and a rank waits for the others."""
        return self.record.outcome == "hung" and any(map(_COLLECTIVE.search, self.record.stacks.values()))

    @property
    def dead_loader_line(self) -> str:
        """The line that says that a loader process died; empty where the attempt did not fail."""
        attempt = self.faulty_attempt
        if self.record.injected is None or (attempt.ending == "stopped" and not attempt.failed_ranks):
            return ""
        texts = [*attempt.failed_ranks.values(), *attempt.logs.values()]
        lines = (line for text in texts for line in text.splitlines())
        return next((line.strip()[:200] for line in lines if _LOADER_DIED.search(line)), "")

    @cached_property
    def num_after_signal(self) -> int:
        """Positions that were printed after the fault in the same attempt."""
        lines = self.faulty_attempt.lines
        before, there = (positions(some, self.baseline.scale) for some in (lines[: self.injected_fault.at_line], lines))
        return len(there) - len(before)

    @property
    def has_run_on(self) -> bool:
        """Whether the script went on after the stop signal to its end, or until it was killed."""
        if not self.fault.is_stop or self.record.injected is None:
            return False
        whole = self.baseline.positions
        has_ended = bool(whole) and positions(self.faulty_attempt.lines, self.baseline.scale)[-1:] == whole[-1:]
        was_killed = any("killed it" in text for text in self.faulty_attempt.failed_ranks.values())
        return was_killed or (has_ended and self.num_after_signal >= max(2, len(whole) // 4))

    # --- from which state it went on, and where ------------------------------------------------------------------------

    @cached_property
    def states_read(self) -> list[str]:
        """Saved states that the script read after the fault: what the undisturbed run read, too, is not its own."""
        found = (path for attempt in self._next_attempts for path in attempt.reads)
        return [path for path in dict.fromkeys(found) if path not in self.baseline.attempt.reads]

    @cached_property
    def _states(self) -> list[str]:
        """The states that the script could have read back, the oldest first: of the kinds that it reads, if it reads any."""
        kinds = self.baseline.state_names.intersection(map(masked_name, self.states_read)) or self.baseline.state_names
        present = self.injected_fault.present
        return [path for path in present if masked_name(path) in kinds and path not in self.baseline.attempt.reads]

    @property
    def newest_state(self) -> str:
        """The newest whole state that the script could have read back."""
        return self._states[-1] if self._states else ""

    @cached_property
    def acceptable_states(self) -> list[str]:
        """The newest state that got its name at once or after which the script went on, and those since.

        One of those since may count only with the file that names it (`latest`), which a kill left unwritten. A script that obeyed a
        stop has written all that it wanted to.
        """
        has_obeyed = self.injected_fault.signal_action == "caught" and self.faulty_attempt.ending == "stopped"
        went_on = {
            save.path
            for number, attempt in enumerate(self.record.attempts[: self.injected_fault.attempt + 1])
            for save in attempt.saves
            if number < self.injected_fault.attempt
            or has_obeyed
            or not save.in_place
            or {*positions(attempt.lines, self.baseline.scale)}
            - {*positions(attempt.lines[: save.num_lines], self.baseline.scale)}
        }
        last = max((number for number, path in enumerate(self._states) if path in went_on), default=0)
        return self._states[last:]

    @property
    def cut_off_files(self) -> list[str]:
        """Files that were cut off, and are of a kind that the undisturbed run has saved to its end, or hold text there."""
        texts = [path for path, contents in self.baseline.record.final.items() if contents.lines]
        kinds = {*map(masked_name, texts), *(masked_name(one.path) for one in self.baseline.attempt.saves)}
        return [path for path in self.injected_fault.half_written if masked_name(path) in kinds]

    @property
    def file_missing_beside(self) -> str:
        """A file that the undisturbed run writes beside a saved state, and that the script misses there after the fault."""
        kinds = set(map(masked_name, self.baseline.record.final))
        saved = (save.path for save in self.faulty_attempt.saves)
        there = {*self.injected_fault.present, *self.injected_fault.half_written}
        for folder in {str(Path(path).parent) for path in (*saved, *there)} - {"."}:
            found = re.search(rf"{re.escape(folder)}/[\w.-]+", self._exception)
            if found and masked_name(found[0]) in kinds and found[0] not in there:
                return found[0]
        return ""

    @property
    def states_spared_in_place(self) -> list[str]:
        """Saved states that the script read back, that are written under their own names, committed by no other file, and cut off by no kill.

        If a kill did come in a save, the script has come back from that: then only those count that each save writes again.
        """
        whole = self.baseline.attempt.saves
        saves = [one for one in (*self.faulty_attempt.saves, *whole) if one.in_place and one.path in self.states_read]
        paths = [one.path for one in saves if not one.path.endswith(DISTCP_SUFFIX)]
        if self.injected_fault.was_in_save:
            written = [one.path for one in whole]
            paths = [one for one in paths if written.count(one) > 1 and one not in self.injected_fault.half_written]
        return list(dict.fromkeys(paths))

    @cached_property
    def _before_fault(self) -> list[Position]:
        earlier = self.record.attempts[: self.injected_fault.attempt + 1]
        return positions([line for attempt in earlier for line in attempt.lines], self.baseline.scale)

    @cached_property
    def _after_fault(self) -> list[Position]:
        lines = (line for attempt in self._next_attempts for line in attempt.lines)
        return positions([line for line in lines if not line.is_mention], self.baseline.scale)

    @cached_property
    def prints_resume(self) -> bool:
        """Whether its output says where it went on: as the undisturbed run's does, and not counted from the resume on."""
        whole, after, scale = self.baseline.positions, self._after_fault, self.baseline.scale
        if whole and after and after[0] == whole[0] and after[-1] != whole[-1] and self.states_read:
            return False
        first = next((line for attempt in self._next_attempts for line in attempt.lines if line.step is not None), None)
        counts_otherwise = scale.unit == "step" and first is not None and scale.position(first) is None
        return len(whole) > 1 and not counts_otherwise

    @property
    def resume_point(self) -> Position | None:
        return self._after_fault[0] if self.prints_resume and self._after_fault else None

    @property
    def has_saved_nothing(self) -> bool:
        """Whether no run has written a file that is known as a saved state, and the script did not go on where it was."""
        is_first = self._after_fault[:1] in ([], self.baseline.positions[:1])
        return not self.baseline.attempt.saves and bool(self._next_attempts) and is_first

    @cached_property
    def has_started_over(self) -> bool:
        """Whether it began again, though it had saved a state after its first position: a state of the very start resumes there."""
        if not self.prints_resume:
            num_saves = len(self.baseline.attempt.saves)
            saves_all_again = any(len(attempt.saves) >= num_saves for attempt in self._next_attempts)
            return bool(self._states) and not self.states_read and saves_all_again
        has_saved = any(
            save.path in {*self._states, *self.states_read}
            and positions(attempt.lines[: save.num_lines], self.baseline.scale)
            for attempt in self.record.attempts[: self.injected_fault.attempt + 1]
            for save in attempt.saves
        )
        return has_saved and len(self._before_fault) > 1 and self._after_fault[:1] == self.baseline.positions[:1]

    @cached_property
    def early_end(self) -> Position | None:
        """The last position, where the script ended well before the last one of the undisturbed run."""
        if not (self.prints_resume and self.has_finished):
            return None
        # A script may print at other steps than the undisturbed one did: at each episode's end, for instance.
        whole, last = self.baseline.positions, max(self._after_fault or self._before_fault, default=())
        numbers = [number for number, one in enumerate(whole) if one <= last]
        if not numbers or len(whole) - 1 - numbers[-1] <= (_MOST_MISSING_STEPS if self._after_fault else 0):
            return None
        return whole[numbers[-1]]

    @property
    def num_repeated(self) -> float:
        """Steps (or epochs) that were done again, at most."""
        repeated = len({*self._before_fault}.intersection(self._after_fault)) if self.prints_resume else 0
        stride = self.baseline.scale.stride
        unprinted = stride - 1 if stride >= 1 else stride
        return repeated * stride + (unprinted if repeated else 0)

    @property
    def is_fault_too_late(self) -> bool:
        """Whether the undisturbed run prints no further step or epoch after the save that was the newest when the fault came."""
        attempts = self.record.attempts[: self.injected_fault.attempt + 1]
        num_saves = sum(save.at < self.injected_fault.at for attempt in attempts for save in attempt.saves)
        whole, scale = self.baseline.attempt, self.baseline.scale
        newest = whole.saves[:num_saves][-1:]
        until_then = [one for save in newest for one in positions(whole.lines[: save.num_lines], scale)]
        return bool(until_then) and len(until_then) == len(self.baseline.positions)

    # --- its result ----------------------------------------------------------------------------------------------------

    @cached_property
    def loss_diff_flags(self) -> list[bool]:
        """Of each loss after the fault, whether the undisturbed run's at the same position is another; without those that have none."""
        undisturbed = losses(self.baseline.attempt.lines, self.baseline.scale)
        mine = losses([line for attempt in self._next_attempts for line in attempt.lines], self.baseline.scale)
        return [loss != undisturbed[position] for position, loss in mine.items() if position in undisturbed]

    @cached_property
    def _ignored_files(self) -> set[str]:
        """Texts that change, and states of the middle of an epoch with the name of one that the undisturbed run saved at its end."""
        changing_texts = {file for file, path in self.baseline.volatile_values if path.startswith("line ")}
        for_the_stop = {one.path for one in self.faulty_attempt.saves if one.at >= self.injected_fault.at}
        return changing_texts | (for_the_stop - {one.path for attempt in self._next_attempts for one in attempt.saves})

    @property
    def has_finished(self) -> bool:
        return self.record.outcome == "finished"

    @cached_property
    def _finals(self) -> dict[str, Contents]:
        """Its final files by the undisturbed run's names."""
        newest = {one.path for one in self.record.attempts[-1].saves}
        return align_file_names(self.record.final, self.baseline.record.final, newest)

    @cached_property
    def differences(self) -> list[FileDifference]:
        """By what its final files differ from the undisturbed run's."""
        if not self.has_finished:
            return []
        # A stop makes one more file, and a directory of the newest files then has other ones: the last file counts.
        saves = [one.path for one in self.baseline.attempt.saves]
        earlier = {*saves} - {*saves[-1:]}
        return [
            one
            for one in differences(self._finals, self.baseline.record.final)
            if (one.file, one.path) not in self.baseline.volatile_values
            and one.file not in self._ignored_files
            and one.undisturbed != NO_FILE
            and not one.is_of_resume
            and not (one.here == NO_FILE and one.file in earlier)
        ]

    @cached_property
    def lasting_differences(self) -> list[FileDifference]:
        """Those of values that are not right again in the file that was saved last with them: `model_best` is of an older step."""
        differing = {(one.file, one.path) for one in self.differences}
        final, last = self.baseline.record.final, dict[str, str]()
        for save in self.baseline.attempt.saves:
            if save.path in final:
                last |= dict.fromkeys(final[save.path].values, save.path)
        return [one for one in self.differences if (last.get(one.path, one.file), one.path) in differing]

    @property
    def doubled_row(self) -> tuple[str, str] | None:
        """A table, and a line that stands there more often than in the undisturbed run's."""
        return doubled_line(self.record.final, self.baseline.record.final) if self.has_finished else None

    @cached_property
    def _common_values(self) -> dict[tuple[str, str], str]:
        """What the final files that both runs have hold: the text of each value, or the kind of a file without values."""
        other = self.baseline.record.final if self.has_finished else {}
        return {
            (file, path): text
            for file in other.keys() & self._finals.keys() - self._ignored_files
            for path, text in (other[file].values or {"": other[file].kind}).items()
        }

    def _is_comparable(self, part: tuple[str, str]) -> bool:
        """Tell whether a part was read, and is the same in two undisturbed runs."""
        contents = self.baseline.record.final[part[0]]
        holds = contents.values or contents.lines or (contents.kind == "bytes" and contents.digest)
        return bool(holds) and part not in self.baseline.volatile_values

    @property
    def comparable(self) -> bool:
        """Whether the final files have anything that can be compared."""
        return any(map(self._is_comparable, self._common_values))

    @property
    def has_same_saved_state(self) -> bool:
        """Whether all weights were compared, and nothing differs but lines of a log, and numbers and texts in older states."""
        weights = [
            part
            for part, text in self._common_values.items()
            if text.startswith("tensor") or (text == "bytes" and masked_name(part[0]) in self.baseline.state_names)
        ]
        others = [one for one in self.differences if one in self.lasting_differences or one.here.startswith("tensor")]
        return bool(weights) and all(map(self._is_comparable, weights)) and all(one.is_of_log for one in others)

    @property
    def has_other_end(self) -> bool:
        """Whether the run came back to another end, and undisturbed runs are all the same."""
        is_same = self.has_same_saved_state or self.baseline.is_deterministic is False
        return self.has_come_back and not is_same and bool(self.differences)


def _innermost_frames(record: RunRecord) -> str:
    """Return in one line the innermost frames of a rank's main thread, whose stack faulthandler writes last.

    It is the first rank that does not wait for the others, if there is one.
    """
    ranks = sorted(record.stacks.items(), key=lambda pair: (_COLLECTIVE.search(pair[1]) is not None, pair[0]))
    for rank, text in ranks:
        *_, main = _THREAD.split(text)
        frames = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
        if frames:
            return f"rank {rank}: " + " < ".join(frame.replace('File "', "").replace('"', "") for frame in frames[:3])
    return "no rank could be read"
