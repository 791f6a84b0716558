"""Gradients that stay on their device after they have left, since weights will be amended with them there."""

from dataclasses import dataclass
from torch import Tensor

from longshore import _amend, _device
from longshore._params import DTYPES

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class HeldGradient:
    """A gradient as it lies on the device, and how it was sent."""

    gradient: Tensor
    sent: _amend.Sent


class Held:
    """The gradients of the step in hand, and of the last one that ended, by the job's parameter.

    Args:
        image_dtype, gradient_dtype: the job's.
    """

    def __init__(self, image_dtype: str, gradient_dtype: str) -> None:
        self.image_dtype, self.wire = _BY_NAME[image_dtype], _BY_NAME[gradient_dtype]
        self._now: dict[int, HeldGradient] = {}
        self.last: dict[int, HeldGradient] = {}

    def keep(self, index: int, gradient: Tensor, scale: float) -> None:
        """Keeps a gradient of the step in hand that leaves, times ``scale``. It is kept as it is: nobody may write to it."""
        if _device.accelerator.has(gradient):
            self._now[index] = HeldGradient(gradient, _amend.Sent(self.wire, scale))

    def end_step(self) -> None:
        """All gradients of the step in hand have left."""
        self.last, self._now = self._now, {}
