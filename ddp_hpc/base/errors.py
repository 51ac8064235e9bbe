"""The errors that users see: each says what was asked, what was found, and what to do.

A `ConfigError` or `SlurmUnavailableError` ends the command with its text, so a function that raises one, or lets it pass, need not say so.
"""

from __future__ import annotations

from ddp_hpc.base.exit_codes import DIVERGED, FAILED, FENCED, NOT_SAVED, RANKS_DIFFER, REFUSED, STOPPED


class DdpHpcError(Exception):
    """Base of every error that the user sees as a message instead of a traceback."""

    exit_code = 1


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends because of `error`, of this family or any other."""
    return error.exit_code if isinstance(error, DdpHpcError) else FAILED


def text_of(error: BaseException) -> str:
    """Return an exception's message, in Python's words where its own `__str__` raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  a user's exception may raise anything
        return "<exception str() failed>"


class ConfigError(DdpHpcError):
    """The configuration is invalid; nothing was trained."""

    exit_code = 2


class RunNotFoundError(ConfigError):
    """No run of that name or directory."""


class RunBusyError(ConfigError):
    """Another process is working on this run."""


class CheckpointError(DdpHpcError):
    """A checkpoint could not be written."""


class NotSavedError(CheckpointError):
    """Saves have failed for so long that the training ends."""

    exit_code = NOT_SAVED


class CorruptCheckpointError(CheckpointError):
    """A checkpoint on disk differs from what was committed."""


class NewerFormatError(ConfigError):
    """A checkpoint was written by a newer ddp_hpc, in a way that this one does not know."""


class WorkerError(DdpHpcError):
    """A worker ended in a way that ends the run."""


class NotReplayedError(WorkerError):
    """Steps of a run could not be computed again, which says nothing of the run."""

    exit_code = REFUSED


class FencedError(DdpHpcError):
    """Another attempt has taken the run over; nothing more may be written."""

    exit_code = FENCED


class StopAskedError(DdpHpcError):
    """The ranks were asked to stop before the first step: there is nothing new to save."""

    exit_code = STOPPED


class DivergedError(DdpHpcError):
    """The losses or weights are not finite; the same again ends in the same way."""

    exit_code = DIVERGED


class RanksDifferError(DdpHpcError):
    """The ranks do not have equal weights: one of them has computed, or kept, something wrong."""

    exit_code = RANKS_DIFFER


class SlurmRefusalError(ConfigError):
    """Slurm has answered, and refuses what it was asked."""

    def __init__(self, message: str, code: str = "", printed: str = "") -> None:
        """Keep all that the command printed, and the name that Slurm has for the refusal (slurm_errno.h), where we have a use for it."""
        super().__init__(message)
        self.code, self.printed = code, printed


class SlurmUnavailableError(DdpHpcError):
    """Slurm is installed but does not answer; its jobs keep running."""


class SlurmBusyError(SlurmUnavailableError):
    """Slurm answers, but accepts no job at the moment; its command waits and asks again, and was ended."""


class UnreadableError(DdpHpcError):
    """A file system does not answer: it is not known whether a file is whole, missing or damaged."""


class NotARecordError(OSError):
    """Something else than a file lies where a run keeps a record, or a file that is far too large for one.

    Unlike most errors of a file system, it is an answer: to try again does not help.
    """
