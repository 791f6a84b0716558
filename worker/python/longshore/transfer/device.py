"""What the package asks of an accelerator: streams, events, page-locked memory, and copies and collectives that go on in the background.

Nothing else in the package names any of it. Tests put an accelerator of their own in its place.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

#: cudaHostRegisterPortable: the memory is page-locked for all devices of the process. cudaHostRegisterReadOnly: it is mapped to be read.
_PORTABLE, _READ_ONLY = 1, 8
#: cudaErrorNotSupported.
_NOT_SUPPORTED = 801


class NotRegistered(Exception):
    """Memory that a device cannot page-lock: why, and what helps."""


class Accelerator:
    """The accelerator of ``torch.accelerator``. Streams and events are torch's."""

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the accelerator's memory."""
        return not tensor.is_cpu

    def current_stream(self, device: torch.device) -> Any:
        """The stream that this thread's work on the device goes to."""
        return torch.accelerator.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        """A stream of our own, which is in no order with any other."""
        return torch.Stream(device=device)

    def record(self, stream: Any) -> Any:
        """An event that is done once all that was given to the stream so far is done."""
        return stream.record_event()

    def let_wait(self, stream: Any, event: Any) -> None:
        """Lets what is given to the stream from now on wait for the event. The host does not wait."""
        stream.wait_event(event)

    def wait(self, event: Any) -> None:
        """Blocks until the event is done, without the GIL."""
        event.synchronize()

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can copy to and from in the background."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def register(self, address: int, nbytes: int, device: torch.device, *, read_only: bool = False) -> None:
        """Page-locks memory of the host that torch has not allocated: after this :meth:`copy` works with it as with that of
        :meth:`locked`, on all devices of this one's type. It must stay mapped, with the pages that it has, until :meth:`unregister`,
        and no byte of it may be registered already.

        Args:
            address, nbytes: whole pages.
            device: one of its type.
            read_only: this process may not write there, and neither will a copy.

        Raises:
            NotRegistered: where it cannot be.
        """
        if device.type != "cuda":
            raise NotRegistered(f"torch page-locks no memory but its own for devices of type {device.type}, and this needs CUDA or ROCm")
        try:
            # A thread that has no current device would make a context on the first one, whichever this process uses.
            with torch.cuda.device(device):
                code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE | (_READ_ONLY if read_only else 0)))
        except (RuntimeError, AssertionError) as error:  # there is no driver, or torch is built without CUDA
            raise NotRegistered(f"torch cannot call cudaHostRegister: {error}") from error
        if code:
            _forget_error(device)
            remedy = "raise the limit of locked memory (ulimit -l, or the container's memlock), and see that the host has that much memory free"
            if code == _NOT_SUPPORTED:
                remedy = "this device, or its driver, cannot lock memory of this kind"
            raise NotRegistered(f"cudaHostRegister of {nbytes} bytes returned {code} ({_meaning(code)}): {remedy}")

    def unregister(self, address: int, device: torch.device) -> None:
        """Ends what :meth:`register` began with this address and device. No copy may be under way there."""
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
        if code:
            _forget_error(device)
            logging.getLogger("longshore.worker").warning("cudaHostUnregister returned %d (%s)", code, _meaning(code))

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Gives a copy to the stream. Both ends must stay until an event after it is done."""
        self.run(stream, functools.partial(target.copy_, non_blocking=True), [source])

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the device, which belongs to this thread's stream."""
        return torch.empty(shape, dtype=dtype, device=device)

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        """Has a tensor's memory stay, whoever lets go of it and whichever stream it belongs to, until what the stream has been given by
        then is done."""
        tensor.record_stream(stream)

    def run(self, stream: Any, act: Callable[..., object], tensors: Sequence[Tensor | None]) -> None:
        """Gives operations of torch to the stream: those of ``act``, which is called with these tensors. They must stay until an
        event after it is done."""
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            act(*tensors)
        finally:
            torch.accelerator.set_stream(before)

    def all_gather(self, whole: Tensor, own: Tensor, group: Any) -> Any:
        """Begins a collective behind what this thread's stream has been given, on a stream of the process group's own: ``whole``
        gets all ranks' ``own``, which may be its part of that.

        Returns:
            torch.distributed's work. Its ``wait()`` lets this thread's stream wait, and not the host. Both tensors must stay until
            their memory's streams wait for it, too.
        """
        return distributed.all_gather_into_tensor(whole, own, group, async_op=True)

    def reduce_scatter(self, part: Tensor, slots: Tensor) -> Any:
        """Begins, as :meth:`all_gather` does, to add up all ranks' ``slots``, of which ``part`` gets this rank's row."""
        return distributed.reduce_scatter_tensor(part, slots.view(-1), async_op=True)

    def all_reduce(self, tensor: Tensor) -> Any:
        """Begins, as :meth:`all_gather` does, to add up all ranks' tensors in their place."""
        return distributed.all_reduce(tensor, async_op=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory, which is whole when this returns."""
        return tensor.to("cpu")


def _meaning(code: int) -> str:
    return str(torch.cuda.CudaError(code))


def _forget_error(device: torch.device) -> None:
    """Takes the error of a failed call out of the runtime, which tells it to this thread's next launch of a kernel otherwise."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


accelerator = Accelerator()


def empty_beside(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory where a tensor lies. A device's belongs to this thread's stream."""
    if accelerator.has(tensor):
        return accelerator.empty(shape, dtype, tensor.device)
    return torch.empty(shape, dtype=dtype, device=tensor.device)


def run_where(tensors: Sequence[Tensor], act: Callable[..., object]) -> None:
    """Calls ``act`` with tensors of one device, whose operations this thread's stream does, or with those of the host at once."""
    if accelerator.has(tensors[0]):
        accelerator.run(accelerator.current_stream(tensors[0].device), act, tensors)
    else:
        act(*tensors)
