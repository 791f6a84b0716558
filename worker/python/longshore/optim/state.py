"""The state of an optimizer's current step, in one object that the parts of the optimizer share.

====================== ================================================= =====================================
state                  meaning                                           goes on with
====================== ================================================= =====================================
``IDLE``               nothing of the step has left                      a gradient, ``step()``
``COLLECTING``         gradients of a backward pass are leaving          its other gradients, ``step()``
``PASSED``             whole backward passes have left                   another pass, ``step()``
``PUSHED``             all have left, and the commit has not finished    ``flush()``
``TORN``               parameters may hold weights of two versions       ``flush()``
``GIVEN_UP``           the step is dropped, and the job joined again     ``zero_grad()``, ``flush()``
====================== ================================================= =====================================

A finished commit, read or join returns to ``IDLE``. The training thread and autograd's threads change the state, never at the same time.
"""

import enum

from longshore.errors import UsageError


class State(enum.Enum):
    """State of a step."""

    IDLE = enum.auto()
    COLLECTING = enum.auto()
    PASSED = enum.auto()
    PUSHED = enum.auto()
    TORN = enum.auto()
    GIVEN_UP = enum.auto()


_COLLECTING = State.COLLECTING
_INTERRUPTED = "the last step was interrupted, so this gradient is not of the newest weights: call optimizer.flush() and compute it again"
_WHY = {
    State.PUSHED: _INTERRUPTED,
    State.TORN: _INTERRUPTED,
    State.GIVEN_UP: (
        "the step in hand was given up, and joining its job again was interrupted: call zero_grad() or flush() of the optimizer, which go on "
        "with that, and compute the step's gradients again"
    ),
}


class Step:
    """The current step.

    Attributes:
        state: as in the table above.
        taken: parameters whose gradients of the current backward pass have left.
        passes: number of whole backward passes.
        made: number of steps made before a commit that has not finished.
        version: the version that the parameters hold while the step is given up.
    """

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self.end()

    def end(self) -> None:
        """Begins the next step: parameters have the newest weights, or wait for them."""
        self.state = State.IDLE
        self.taken.clear()
        self.passes = 0
        self.made: int | None = None
        self.version: int | None = None

    def refuse(self, *states: State) -> None:
        """Raises if the step is in one of these states, with the way to go on."""
        if self.state in states:
            raise UsageError(_WHY[self.state])

    def check_open(self) -> None:
        """Raises unless gradients may leave."""
        self.refuse(State.PUSHED, State.TORN, State.GIVEN_UP)

    @property
    def has_begun(self) -> bool:
        """True if gradients have left of a step that is not decided yet."""
        return bool(self.taken or self.passes)

    def take(self, param: int) -> None:
        """Notes that a parameter's gradient leaves."""
        self.taken.add(param)
        self.state = _COLLECTING

    def end_pass(self) -> None:
        """Ends a backward pass."""
        self.check_open()
        self.taken.clear()
        self.passes += 1
        self.state = State.PASSED

    def push(self, made: int) -> None:
        """Marks that all gradients have left. The decision makes one more step than ``made``."""
        self.check_open()
        self.passes, self.made, self.state = 0, made, State.PUSHED

    def tear(self) -> None:
        """Marks that parameters are being written, until :meth:`mend`."""
        if self.state is not State.GIVEN_UP:
            self.state = State.TORN

    def mend(self) -> None:
        """Marks that parameters have weights of one version."""
        if self.state is not State.GIVEN_UP:
            self.state = State.COLLECTING if self.taken else State.PASSED if self.passes else State.IDLE

    def give_up(self, version: int) -> None:
        """Marks that the step is dropped. The parameters hold ``version``."""
        self.version, self.state = version, State.GIVEN_UP
