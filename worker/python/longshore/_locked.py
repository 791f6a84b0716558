"""The memory that gradients leave from, page-locked where the device can do that: then the device copies them there itself."""

import ctypes
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore import _device
from longshore._params import Param
from longshore._registered import Registered

_LOGGER = logging.getLogger("longshore.worker")


class LockedMemory:
    """The pieces of that memory which are registered with a device. Each is registered when the first gradient comes to it, and until
    :meth:`release`, since each step uses it again. Only a write of :meth:`Job.push_with` calls :meth:`holds`: one at a time.

    Args:
        job: the Rust half's.
        dtype: what gradients leave in.
    """

    def __init__(self, job: Any, dtype: torch.dtype) -> None:
        self._job, self._dtype = job, dtype
        #: The Rust half's, which keeps the memory mapped and its pages in place; None where no server may read it.
        self._memory: Any = None
        self._is_asked = False
        #: How many pieces of it were looked at, and those that are registered.
        self._known = 0
        self._registered = Registered()
        #: Whether gradients may still go this way.
        self._is_usable = True

    def takes(self, gradient: Tensor, scale: float) -> bool:
        """Whether a gradient of a device goes there as it is: as bytes that nobody has to convert or to multiply."""
        fits = self._is_usable and scale == 1.0 and gradient.dtype is self._dtype and gradient.is_contiguous()
        if fits and not self._is_asked:
            self._is_asked = True
            self._memory = self._job.gradient_memory()
            self._is_usable = fits = self._memory is not None
        return fits

    def holds(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Whether these bytes are page-locked, in a piece that is registered now if it was not. One that cannot be is the last that is
        tried, and one line is logged."""
        found = self._registered.finds(address, nbytes)
        return found or (self._is_usable and self._register(device) and self._registered.finds(address, nbytes))

    def _register(self, device: torch.device) -> bool:
        """Registers the pieces that have come since the last time."""
        for address, nbytes in self._memory.pieces(self._known):
            self._known += 1
            try:
                self._registered.add(address, nbytes, device, self._memory)
            except _device.NotRegistered as error:
                self._is_usable = False
                _LOGGER.warning("gradients go through torch's page-locked memory, with one more copy on the host: %s", error)
                return False
        return True

    def release(self) -> None:
        """Unregisters all of it. The job is closed, and no copy is under way."""
        self._is_usable = False
        self._registered.release()
        self._memory = None


@dataclass(frozen=True, slots=True)
class Straight:
    """A gradient that its device copies to where it leaves from, once it is made.

    Attributes:
        param, gradient: whose it is, and what must stay until it has been pushed.
        made: the event after which it is there.
        stream: that of the copy.
    """

    param: Param
    gradient: Tensor
    made: Any
    stream: Any
    locked: LockedMemory

    @property
    def on_device(self) -> int:
        """Bytes of the device's memory that it holds."""
        return self.gradient.nbytes

    def push(self, job: Any, scale: float = 1.0) -> None:
        """Waits until it is made, without the job, which others use meanwhile. Then pushes it."""
        assert scale == 1.0, scale
        _device.accelerator.wait(self.made)
        job.push_with(self.param.index, self.param.elements, self._copy)

    def _copy(self, address: int, first: int, elements: int) -> None:
        """Copies elements, from one on, to an address. They are there when this returns, and a copy is over however it ends: the
        memory may go to another gradient then."""
        part = self.gradient.view(-1)[first : first + elements]
        target = host_tensor(address, elements, part.dtype)
        if not self.locked.holds(address, part.nbytes, part.device):
            target.copy_(_device.accelerator.to_host(part))
            return
        try:
            _device.accelerator.copy(target, part, self.stream)
        finally:
            _device.accelerator.wait(_device.accelerator.record(self.stream))


def host_tensor(address: int, elements: int, dtype: torch.dtype) -> Tensor:
    """The host's memory at an address as a tensor, which does not keep it."""
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
