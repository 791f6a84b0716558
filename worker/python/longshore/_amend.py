"""What servers and the worker's host do to amend weights, as operations of torch: the same bits, wherever the weights lie."""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Elements that share a rate, as in limits.rs.
RATE_ELEMENTS = 64

#: How many elements are amended at a time: what that takes of the device beside weights and gradient, 16 bytes each, is 64 MiB.
TILE = 4 * 1024 * 1024

_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Sent:
    """How a gradient was sent: times ``scale``, in the wire's type."""

    wire: torch.dtype
    scale: float = 1.0

    def of(self, gradient: Tensor) -> Tensor:
        """The gradient as servers have it, in fp32."""
        if self.scale != 1.0:
            gradient = gradient.float() * self.scale
        return gradient.to(self.wire).float()


@dataclass(frozen=True, slots=True)
class Step:
    """What the rates are multiplied by, and the most that an element is moved by. Both are fp32 numbers."""

    multiplier: float
    limit: float


def rates_of(elements: int) -> int:
    """How many rates so many elements have."""
    return -(-elements // RATE_ELEMENTS)


def amend(target: Tensor, image: Tensor, rates: Tensor, gradient: Tensor | None, sent: Sent, step: Step | None) -> None:
    """Writes the amended image into the target: ``image - clamp(rate * (gradient * multiplier), limit)``, in single fp32 operations
    in this order, rounded to the image's type. Each is an operation of its own, so that no compiler fuses two of them.

    Args:
        target: the parameter. It may be the memory of the image.
        image: its elements end to end.
        gradient: None counts as zeros.
        step: None amends nothing.
    """
    is_plain = target.is_contiguous()
    written = target.view(-1) if is_plain else torch.empty(len(image), dtype=target.dtype, device=target.device)
    elements = None if gradient is None or step is None else gradient.reshape(-1)
    for start in range(0, len(image), TILE):
        end = min(start + TILE, len(image))
        part = image[start:end]
        if step is not None:
            given = torch.zeros(end - start, device=image.device) if elements is None else sent.of(elements[start:end])
            part = _amended(part, rates[start // RATE_ELEMENTS : rates_of(end)], given, step)
        written[start:end].copy_(part)
    if not is_plain:
        target.copy_(written.view(target.shape))


def _amended(image: Tensor, rates: Tensor, gradient: Tensor, step: Step) -> Tensor:
    whole = len(image) // RATE_ELEMENTS * RATE_ELEMENTS
    moved = gradient * step.multiplier
    moved[:whole].view(-1, RATE_ELEMENTS).mul_(rates[: whole // RATE_ELEMENTS, None])
    if whole < len(image):
        moved[whole:].mul_(rates[-1])
    # Not clamp: this leaves the sign of a zero and a NaN as they are.
    moved.masked_fill_(moved > step.limit, step.limit)
    moved.masked_fill_(moved < -step.limit, -step.limit)
    amended = image.float() - moved
    rounded = amended.to(image.dtype)
    # Devices have NaNs of their own. Servers have one.
    return rounded.masked_fill_(amended.isnan(), _NAN)
