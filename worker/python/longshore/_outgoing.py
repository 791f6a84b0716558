"""Gradients on their way to the Rust half, one after the other: an accelerator copies one while the one before is pushed."""

from typing import Any

from torch import Tensor

from longshore._host import Gradients, Leaving
from longshore._locked import Straight
from longshore._params import Param


class Outgoing:
    """Gradients of one micro-step that leave one after the other."""

    def __init__(self) -> None:
        self.gradients = Gradients()
        #: Those that an accelerator copies to the host, oldest first, with what to multiply them by.
        self._copying: list[tuple[Leaving | Straight, float]] = []

    def send(self, job: Any, param: Param, gradient: Tensor, scale: float) -> None:
        """Sends a gradient times ``scale``. One of an accelerator leaves with the next one, or at the end."""
        self.push_copied(job)
        leaving = self.gradients.start(param, gradient, scale)
        if isinstance(leaving, Leaving) and leaving.copied is None:
            leaving.push(job, scale)
        else:
            self._copying.append((leaving, scale))

    def push_copied(self, job: Any) -> None:
        """Waits for the copies under way, and sends what they brought."""
        for leaving, scale in self._copying:
            leaving.push(job, scale)
        self._copying.clear()
