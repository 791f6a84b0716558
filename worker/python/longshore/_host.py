"""Gradients as host memory: addresses for the Rust half, and copies of gradients that have none.

A gradient of the CPU whose elements lie end to end is read where it is. One of an accelerator is copied on a stream of our own,
behind the work that makes it: to where it leaves from, if that memory is page-locked, and else into page-locked memory of torch's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore import _device
from longshore._locked import LockedMemory, Straight
from longshore._params import Param, check_gradient

#: Parameter, address, elements, type: what the Rust half takes.
Place = tuple[int, int, int, str]


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's own memory can be used."""
    return tensor.is_contiguous() and not _device.accelerator.has(tensor)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A gradient on its way: where it can be read, once its copy is done, and what keeps its memory until then."""

    place: Place
    held: tuple[Tensor, ...]
    copied: Any = None

    @property
    def on_device(self) -> int:
        """Bytes of the device's memory that it holds."""
        return sum(tensor.nbytes for tensor in self.held[1:])

    def push(self, job: Any, scale: float = 1.0) -> None:
        """Waits until it can be read, and pushes it."""
        self.wait()
        job.push([self.place], scale)

    def wait(self) -> None:
        """Blocks until it can be read, without the GIL."""
        if self.copied is not None:
            _device.accelerator.wait(self.copied)


class Gradients:
    """Gradients of one step as host memory.

    Attributes:
        locked: the memory that gradients leave from, if a device may copy them there.
    """

    def __init__(self) -> None:
        self.locked: LockedMemory | None = None
        self._staged: dict[int, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        #: What was taken by :meth:`take` and may still be copied, or is not copied yet.
        self._leaving: list[Leaving] = []
        self._straight: list[Straight] = []

    def take(self, param: Param, gradient: Tensor, scale: float = 1.0) -> list[Place]:
        """Checks a gradient that is to leave times ``scale``, and starts copying it if it has to be. What this thread gives to the
        device from now on comes after the copy.

        Returns:
            Its place for :meth:`push`; none where :meth:`push` has the device copy it.
        """
        if is_plain(gradient):
            check_gradient(param, gradient)
            return [(param.index, gradient.data_ptr(), param.elements, param.wire)]
        leaving = self.start(param, gradient, scale)
        if isinstance(leaving, Straight):
            self._straight.append(leaving)
            return []
        if leaving.copied is not None:
            self._leaving.append(leaving)
            _device.accelerator.let_wait(_device.accelerator.current_stream(gradient.device), leaving.copied)
        return [leaving.place]

    def start(self, param: Param, gradient: Tensor, scale: float = 1.0) -> Leaving | Straight:
        """Checks a gradient that is to leave times ``scale``, and starts copying it if it has to be. What was started before for this
        parameter must have been read."""
        check_gradient(param, gradient)
        if is_plain(gradient):
            return Leaving((param.index, gradient.data_ptr(), param.elements, param.wire), (gradient,))
        if self.locked is not None and _device.accelerator.has(gradient) and self.locked.takes(gradient, scale):
            made = _device.accelerator.record(_device.accelerator.current_stream(gradient.device))
            return Straight(param, gradient, made, self._stream(gradient.device), self.locked)
        staged = self._staging(param, gradient)
        place = (param.index, staged.data_ptr(), param.elements, param.wire)
        if not _device.accelerator.has(gradient):
            staged.copy_(gradient)
            return Leaving(place, (staged,))
        stream = self._stream(gradient.device)
        made = _device.accelerator.record(_device.accelerator.current_stream(gradient.device))
        _device.accelerator.let_wait(stream, made)
        _device.accelerator.copy(staged, gradient, stream)
        return Leaving(place, (staged, gradient), _device.accelerator.record(stream))

    def _staging(self, param: Param, gradient: Tensor) -> Tensor:
        staged = self._staged.get(param.index)
        if staged is None or staged.dtype is not gradient.dtype:
            if _device.accelerator.has(gradient):
                staged = _device.accelerator.locked(param.shape, gradient.dtype)
            else:
                staged = torch.empty(param.shape, dtype=gradient.dtype, device="cpu")
            self._staged[param.index] = staged
        return staged

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = _device.accelerator.new_stream(device)
        return self._streams[device]

    def push(self, job: Any, places: list[Place], scale: float = 1.0) -> None:
        """Pushes what was taken: these are its places."""
        for leaving in self._leaving:
            leaving.wait()
        job.push(places, scale)
        for straight in self._straight:
            straight.push(job)
        self.release()

    def release(self) -> None:
        """Lets go of what was taken."""
        self._leaving.clear()
        self._straight.clear()
