"""Every error this package raises on purpose, and the exit code each one means.

    FastMTPError                    1   something failed
    +-- InputError (ValueError)     2   the input is wrong: what, where and how to mend it
    |   +-- ConfigError                 a job file or request
    |   +-- CheckpointError             a model directory
    |   |   +-- UnreadableError             a file of it that cannot be read
    |   |   +-- UnreachableError            a store or hub that does not answer
    |   +-- DataError                   a prompt file
    |   +-- DestinationError            a place to publish to
    +-- GateRejected                3   the result measures no better, so nothing was published
    +-- ProcessError                1   a child process failed, stalled or ran out of time
    +-- ServingError                1   vLLM did not start, died, or does not serve what was asked
    +-- TrainingError               1   training cannot go on, or its result is not to be trusted
    |   +-- Interrupted           128+n   a signal ended it; what was done is saved
    +-- IntegrityError              1   bytes are not what they were

This module imports nothing: the API, the flows and the library all use it.
"""

from __future__ import annotations

from typing import Protocol


class Wrong(Protocol):
    """What an error may carry several of: something wrong, and how to mend it."""

    @property
    def what(self) -> str: ...
    @property
    def mend(self) -> str: ...


class FastMTPError(Exception):
    """Base of all errors of this package. `exit_code` is what the command line ends with."""

    exit_code = 1
    code = "internal_error"


class InputError(FastMTPError, ValueError):
    """Bad input, known before anything costly starts.

    Args:
        what: what is wrong, naming the file, key or value.
        mend: what the user can do about it.
        pointer: JSON pointer to the job field at fault (`/data/prompts`), for problem+json answers.
    """

    exit_code = 2
    code = "invalid_input"

    def __init__(self, what: str, *, mend: str = "", pointer: str = "") -> None:
        super().__init__(f"{what} {mend}".strip())
        self.what = what
        self.mend = mend
        self.pointer = pointer

    def details(self) -> list[str]:
        """Everything that is wrong, one sentence or two each; the first is the error's own message."""
        return [str(self)]


class ConfigError(InputError):
    """A job file or request that does not fit the schema or the operator's policy."""

    code = "invalid_job"


class CheckpointError(InputError):
    """A checkpoint that cannot be used: files, index, config or head. `faults` has everything found wrong with it."""

    code = "invalid_checkpoint"

    def __init__(self, what: str, *, mend: str = "", pointer: str = "", faults: tuple[Wrong, ...] = ()) -> None:
        super().__init__(what, mend=mend, pointer=pointer)
        self.faults = faults

    def details(self) -> list[str]:
        """The message, or what and mend of every fault."""
        return [f"{fault.what} {fault.mend}".strip() for fault in self.faults] or [str(self)]


class UnreadableError(CheckpointError):
    """A file of a checkpoint that cannot be read, or not whole."""


class UnreachableError(CheckpointError):
    """A store or hub that does not answer. What is there may well be usable: somebody else may see it."""

    code = "unreachable"


class DataError(InputError):
    """A prompt file that cannot be used."""

    code = "invalid_data"


class DestinationError(InputError):
    """A destination that cannot be written."""

    code = "invalid_destination"


class GateRejected(FastMTPError):
    """The result measures no better than what it would replace; nothing was published."""

    exit_code = 3
    code = "gate_rejected"


class ProcessError(FastMTPError):
    """A child process failed, stalled or ran out of time. `returncode` is its exit status, if it has one."""

    code = "process_failed"

    def __init__(self, message: str, *, returncode: int | None = None) -> None:
        super().__init__(message)
        self.returncode = returncode


class ServingError(FastMTPError):
    """vLLM did not start, died, or does not serve what was asked."""

    code = "serving_failed"


class TrainingError(FastMTPError):
    """Training cannot go on, or its result is not to be trusted."""

    code = "training_failed"

    def __init__(self, what: str, *, mend: str = "") -> None:
        super().__init__(f"{what} {mend}".strip())


class Interrupted(TrainingError):
    """A signal ended training; what was done is saved, and the same command goes on from there."""

    code = "interrupted"

    def __init__(self, what: str, *, signal_number: int) -> None:
        super().__init__(what, mend="The same command goes on from there.")
        self.exit_code = 128 + signal_number


class IntegrityError(FastMTPError):
    """Bytes differ from what a manifest or a source says."""

    code = "integrity_failed"
