"""Longshore's exceptions. Every message names the fault and the remedy.

An error about one value has it as ``field``, ``value``, ``limit`` and ``remedy``; these are None in other errors.
"""

import sys
import warnings


class LongshoreError(RuntimeError):
    """The base class of all errors here."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        limit: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.limit = limit
        self.remedy = remedy


class InvalidError(LongshoreError, ValueError):
    """An option, a parameter or a hyperparameter that cannot be used. Nothing was sent."""


class GradientError(LongshoreError, ValueError):
    """A gradient that does not fit its parameter. The step was not made."""


class MissingGradientError(GradientError):
    """A parameter got no gradient in this step, and ``missing_gradients`` does not allow it. The step was not made."""


class UsageError(LongshoreError):
    """Calls in the wrong order, or in another process than the one that built the optimizer."""


class StateError(LongshoreError):
    """State that is another job's, of another version, or lost."""


class GroupsError(StateError, ValueError):
    """State of other param groups than the optimizer's. Like torch's optimizers, raised as a ``ValueError`` with torch's message."""


class OutdatedError(StateError):
    """A step that this process built on was taken back: a server lost it together with a rank's process. Servers keep all other state:
    end all ranks and start them again. A process that was replaced raises :class:`FencedError`."""


class UnreachableError(LongshoreError, ConnectionError):
    """A server cannot be reached."""


class UntrustedError(LongshoreError, ConnectionError):
    """A server and this process do not trust each other: a certificate is missing, expired, or of another name or authority."""


class RefusedError(LongshoreError):
    """A server refused a call, with a reason. Nothing changed on the server."""


class FencedError(LongshoreError):
    """Another process has taken over this rank, or another optimizer of this process with the same job."""


class WaitError(LongshoreError, TimeoutError):
    """A wait reached its deadline. The message names the awaited party."""


class PausedError(LongshoreError):
    """The job is paused until an operator resumes it."""


class ShortageError(LongshoreError, MemoryError):
    """A memory budget is too small for its content."""


def invalid(field: str, value: object, limit: str, remedy: str, kind: type[LongshoreError] = InvalidError) -> LongshoreError:
    """Returns an error about one value, worded like the servers' errors."""
    message = f"{field} is {value}, but must be {limit}: {remedy}"
    return kind(message, field=field, value=value, limit=limit, remedy=remedy)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the caller's line: the nearest one outside of this package and of PyTorch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("longshore", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
