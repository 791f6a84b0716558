"""Small gradients of the host, which leave together: a call for each of them takes longer than what it copies."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from longshore._host import Gradients, Place
from longshore._params import Param

if TYPE_CHECKING:
    from longshore._connection import Connection

#: So many elements leave at once. A chunk has more, and leaves this process when it is whole, so that servers wait no longer for it.
ENOUGH = 64 * 1024


class Together:
    """Gradients of one micro-step that were taken and have not been pushed, in the order in which they came.

    Attributes:
        connection: whose they are; None where there are none.
        is_enough: whether they are to be pushed now.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.connection: Connection | None = None
        self.is_enough = False
        self._places: list[Place] = []
        #: What keeps their memory.
        self._held: list[Tensor] = []
        self._elements = 0

    def add(self, connection: "Connection", param: Param, gradient: Tensor) -> None:
        """Checks a gradient, and keeps it until it is pushed."""
        self._places += self._gradients.take(param, gradient)
        self._held.append(gradient)
        self._elements += param.elements
        self.is_enough = self._elements >= ENOUGH
        self.connection = connection

    def push(self, job: Any) -> None:
        """Pushes them. Where that fails or is interrupted they stay."""
        if self._places:
            self._gradients.push(job, self._places)
            self.forget()

    def forget(self) -> None:
        """Lets go of them."""
        self._places.clear()
        self._held.clear()
        self._gradients.release()
        self._elements = 0
        self.is_enough = False
        self.connection = None
