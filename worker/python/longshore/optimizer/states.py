"""The state of an optimizer's current step. All parts of the optimizer share one :class:`Step`.

====================== ================================================= =====================================
state                  meaning                                           goes on with
====================== ================================================= =====================================
``IDLE``               nothing of the step has left                      a gradient, ``step()``
``COLLECTING``         gradients of a backward pass are leaving          its other gradients, ``step()``
``PASSED``             whole backward passes have left                   another pass, ``step()``
``PUSHED``             ``step()`` sends and commits, or was interrupted  ``flush()``
``TORN``               parameters may hold weights of two versions       ``flush()``
``GIVEN_UP``           the step is dropped, and the job joined again     ``zero_grad()``, ``flush()``
``BROKEN``             other ranks wait for a step that was interrupted  a restart of all ranks
====================== ================================================= =====================================

A finished commit, read or join returns to ``IDLE``. The training thread changes the state, and so do autograd's
threads, of which a backward has one for each device. Streaming's hooks therefore hold the lock of the step.

A signal's handler, as that of Ctrl-C, may raise after any call of Python. So a state is set before the act that it
describes, and an interrupted act leaves the state that tells how to go on.
"""

import enum
import threading

from longshore.errors import UsageError


class State(enum.Enum):
    """State of a step."""

    IDLE = enum.auto()
    COLLECTING = enum.auto()
    PASSED = enum.auto()
    PUSHED = enum.auto()
    TORN = enum.auto()
    GIVEN_UP = enum.auto()
    BROKEN = enum.auto()


_COLLECTING = State.COLLECTING
_INTERRUPTED = (
    "the last step was interrupted, so this gradient may not be of the newest weights: call optimizer.flush() and zero_grad(), and compute it "
    "again"
)
_WHY = {
    State.PUSHED: _INTERRUPTED,
    State.TORN: _INTERRUPTED,
    State.GIVEN_UP: (
        "the step in hand was given up, and joining its job again was interrupted: call zero_grad() or flush() of the optimizer, which go on "
        "with that, and compute the step's gradients again"
    ),
    State.BROKEN: (
        "this step was interrupted after gradients had left, and other ranks wait for it: end all ranks and start them again, and they go on "
        "from the last step"
    ),
}


class Step:
    """The current step.

    Attributes:
        state: as in the table above.
        taken: parameters whose gradients of the current backward pass have left.
        passes: number of whole backward passes.
        running: autograd's numbers of backward passes that have sent gradients and not run to their end. -1 stands for
            a ``step()`` that was refused or interrupted, until another backward has run.
        lock: held while a hook takes a gradient, and while ``step()`` ends the passes.
        made: number of steps made before the step that ``step()`` is sending and committing.
        version: the version that the parameters hold while the step is given up.
    """

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self.running: set[int] = set()
        self.lock = threading.RLock()
        self.end()

    def end(self) -> None:
        """Begins the next step: parameters have the newest weights, or wait for them."""
        self.taken.clear()
        self.running.clear()
        self.passes = 0
        self.made: int | None = None
        self.version: int | None = None
        self.state = self._untorn = State.IDLE

    def refuse(self, *states: State) -> None:
        """Raises if the step is in one of these states, with the way to go on."""
        if self.state in states:
            raise UsageError(_WHY[self.state])

    def check_open(self) -> None:
        """Raises unless gradients may leave."""
        self.refuse(*_WHY)

    @property
    def has_begun(self) -> bool:
        """True if gradients have left of a step that is not decided yet."""
        return self.state in (State.COLLECTING, State.PASSED, State.GIVEN_UP)

    def take(self, param: int) -> None:
        """Notes that a parameter's gradient leaves."""
        self.state = _COLLECTING
        self.taken.add(param)

    def end_pass(self) -> None:
        """Ends a backward pass."""
        self.check_open()
        self.passes, self.state = self.passes + 1, State.PASSED
        self.taken.clear()

    def push(self, made: int) -> None:
        """Marks that ``step()`` sends and commits. The decision makes one more step than ``made``."""
        self.check_open()
        self.passes, self.made, self.state = 0, made, State.PUSHED

    def tear(self) -> None:
        """Marks that parameters are being written, until :meth:`mend`."""
        if self.state not in (State.TORN, State.GIVEN_UP):
            self._untorn, self.state = self.state, State.TORN

    def mend(self) -> None:
        """Marks that parameters have weights of one version."""
        if self.state is State.TORN:
            self.state = self._untorn

    def give_up(self, version: int) -> None:
        """Marks that the step is dropped. The parameters hold ``version``."""
        self.version, self.state = version, State.GIVEN_UP
