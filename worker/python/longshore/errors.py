"""What Longshore raises. Every message names what is wrong and what to do about it.

Where one value is at fault, an error has it as ``field``, ``value``, ``limit`` and ``remedy``; elsewhere these are None.
"""


class LongshoreError(RuntimeError):
    """The base of all others."""

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
    """A parameter got no gradient in this step, and nobody has said what that means. The step was not made."""


class UsageError(LongshoreError):
    """Calls in the wrong order, or in another process than the one that built the optimizer."""


class StateError(LongshoreError):
    """State that is another job's, of another version, or lost."""


class GroupsError(StateError, ValueError):
    """State of other param groups than the optimizer has. It is a ``ValueError`` with torch's words, as torch's optimizers raise one."""


class OutdatedError(StateError):
    """A step that this process built on was taken back, since a server lost it together with a rank's process. Nothing is lost on
    the servers: end all ranks and start them again."""


class UnreachableError(LongshoreError, ConnectionError):
    """A server cannot be reached."""


class UntrustedError(LongshoreError, ConnectionError):
    """A server and this process do not trust each other: a certificate is missing, expired, of another name or another authority."""


class RefusedError(LongshoreError):
    """A server refused a call and says why. Nothing changed there."""


class FencedError(LongshoreError):
    """Another process has taken this rank."""


class WaitError(LongshoreError, TimeoutError):
    """A wait reached its deadline. The message says for whom."""


class PausedError(LongshoreError):
    """The job is paused until an operator resumes it."""


class ShortageError(LongshoreError, MemoryError):
    """Something does not fit into its memory budget."""


def invalid(field: str, value: object, limit: str, remedy: str, kind: type[LongshoreError] = InvalidError) -> LongshoreError:
    """An error about one value, worded as the servers word theirs."""
    message = f"{field} is {value}, but must be {limit}: {remedy}"
    return kind(message, field=field, value=value, limit=limit, remedy=remedy)
