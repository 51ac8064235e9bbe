"""The family of errors we raise for users: what was asked, what was found, what to do."""

from __future__ import annotations

from ddp_hpc.exit_codes import DIVERGED, FAILED, FENCED


class DdpHpcError(Exception):
    """Base of every error that is told to the user in words instead of a traceback."""

    exit_code = 1


def exit_code_of(error: BaseException) -> int:
    """Return what a process exits with that ends because of `error`, one of ours or any other."""
    return error.exit_code if isinstance(error, DdpHpcError) else FAILED


class ConfigError(DdpHpcError):
    """The user asked for something that cannot be; nothing was trained."""

    exit_code = 2


class RunNotFoundError(ConfigError):
    """No run of that name or directory."""


class RunBusyError(ConfigError):
    """Another process is working on this run."""


class CheckpointError(DdpHpcError):
    """A checkpoint could not be written."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint on disk is not what was committed."""


class NewerFormatError(ConfigError):
    """A checkpoint was written by a newer ddp_hpc, in a way that this one does not know."""


class WorkerError(DdpHpcError):
    """A worker ended in a way that ends the run."""


class FencedError(DdpHpcError):
    """Another attempt has taken the run over; nothing more may be written."""

    exit_code = FENCED


class DivergedError(DdpHpcError):
    """The training came to numbers that are not finite; trying the same again comes to the same."""

    exit_code = DIVERGED


class SlurmRefusalError(ConfigError):
    """Slurm has answered, and refuses what it was asked."""

    def __init__(self, message: str, code: str = "") -> None:
        """Keep the name that Slurm has for the refusal (slurm_errno.h); empty where we have no use for it."""
        super().__init__(message)
        self.code = code


class SlurmUnavailableError(DdpHpcError):
    """Slurm is here but does not answer; what it runs goes on."""


class UnreadableError(DdpHpcError):
    """A file system does not say what is there: neither that a file holds, nor that it is missing or damaged."""
