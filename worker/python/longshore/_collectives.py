"""Collectives of torch.distributed, of tensors in the host's memory or an accelerator's.

Those of the host are waited for by the host, which looks for failures of other ranks meanwhile. Those of a device are done behind what
the stream of their caller has got; streams wait for them, and the host goes on.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, distributed

from longshore import _device, _waits


class Collective:
    """A collective under way. It keeps its tensors until it was waited for.

    Args:
        work: what torch.distributed has returned for it.
        tensors: what it reads and writes, of one device.
    """

    def __init__(self, work: Any, tensors: Sequence[Tensor]) -> None:
        self._work = work
        self._tensors = list(tensors)
        self._is_of_device = _device.accelerator.has(tensors[0])

    def is_done(self) -> bool:
        """Whether it has come to its end."""
        done: bool = self._work.is_completed()
        return done

    def wait(self, what: str) -> None:
        """Waits for one of the host. Lets this thread's stream wait for one of a device.

        Args:
            what: what the ranks do, for messages.

        Raises:
            LongshoreError: as :func:`longshore._waits.wait` does.
        """
        if self._is_of_device:
            self._work.wait()
        else:
            _waits.wait(self._work, what)
        self._tensors.clear()


def all_gather(whole: Tensor, own: Tensor, group: Any) -> Collective:
    """Gives all ranks what each of them has, end to end. ``own`` may be this rank's part of ``whole``."""
    if _device.accelerator.has(whole):
        work = _device.accelerator.all_gather(whole, own, group)
    else:
        work = distributed.all_gather_into_tensor(whole, own, group, async_op=True)
    return Collective(work, [whole, own])


def reduce_scatter(slots: Tensor, rank: int) -> tuple[Collective, Tensor]:
    """Adds up all ranks' rows, one for each of them.

    Args:
        slots: (ranks, elements). What becomes of them is not said.

    Returns:
        The collective, and memory for this rank's row of the sum.
    """
    if _device.accelerator.has(slots):
        part = _device.empty_beside(slots, slots.shape[1:], slots.dtype)
        return Collective(_device.accelerator.reduce_scatter(part, slots), [part, slots]), part
    # As gloo's reduce_scatter_tensor does with a copy of its own, of which nobody can say when it is done.
    part = slots[rank]
    return Collective(distributed.all_reduce(slots, async_op=True), [part, slots]), part


def all_reduce(tensor: Tensor) -> Collective:
    """Adds up all ranks' tensors in their place."""
    has = _device.accelerator.has(tensor)
    work = _device.accelerator.all_reduce(tensor) if has else distributed.all_reduce(tensor, async_op=True)
    return Collective(work, [tensor])
