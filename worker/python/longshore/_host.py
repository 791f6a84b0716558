"""Gradients as host memory: addresses for the Rust half, and copies of gradients that have none.

A gradient of the CPU whose elements lie end to end is read where it is. One of an accelerator is copied into page-locked
memory on a stream of our own, behind the work that makes it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore import _device
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

    def wait(self) -> None:
        """Blocks until it can be read, without the GIL."""
        if self.copied is not None:
            _device.accelerator.wait(self.copied)


class Gradients:
    """Gradients of one step as host memory."""

    def __init__(self) -> None:
        self._staged: dict[int, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        #: What was taken by :meth:`take` and may still be copied.
        self._leaving: list[Leaving] = []

    def take(self, param: Param, gradient: Tensor) -> Place:
        """Checks a gradient, and starts copying it if it has to be. Call :meth:`wait` before its memory is read, and
        :meth:`release` when it was. What this thread gives to the device from now on comes after the copy."""
        if is_plain(gradient):
            check_gradient(param, gradient)
            return (param.index, gradient.data_ptr(), param.elements, param.wire)
        leaving = self.start(param, gradient)
        if leaving.copied is not None:
            self._leaving.append(leaving)
            _device.accelerator.let_wait(_device.accelerator.current_stream(gradient.device), leaving.copied)
        return leaving.place

    def start(self, param: Param, gradient: Tensor) -> Leaving:
        """Checks a gradient, and starts copying it if it has to be. What was started before for this parameter must have
        been read."""
        check_gradient(param, gradient)
        if is_plain(gradient):
            return Leaving((param.index, gradient.data_ptr(), param.elements, param.wire), (gradient,))
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

    def wait(self) -> None:
        """Waits for the copies of what was taken."""
        for leaving in self._leaving:
            leaving.wait()

    def release(self) -> None:
        """What was taken has been read."""
        self._leaving.clear()
