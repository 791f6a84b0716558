"""The package's interface to an accelerator: streams, events, page-locked memory, and asynchronous copies and collectives.

No other module of the package names any of these. Tests replace the accelerator by one of their own.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

#: cudaHostRegisterPortable: the memory is page-locked for all devices of the process. cudaHostRegisterReadOnly: it is mapped read-only.
_PORTABLE, _READ_ONLY = 1, 8
#: cudaErrorNotSupported.
_NOT_SUPPORTED = 801


class NotRegistered(Exception):
    """Raised for memory that a device cannot page-lock, with the reason and a remedy."""


class Accelerator:
    """The accelerator of ``torch.accelerator``. Streams and events are torch's."""

    def has(self, tensor: Tensor) -> bool:
        """Returns whether the tensor lies in the accelerator's memory."""
        return not tensor.is_cpu

    def current_stream(self, device: torch.device) -> Any:
        """Returns the stream of this thread's work on the device."""
        return torch.accelerator.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        """Returns a new stream, in no order with any other."""
        return torch.Stream(device=device)

    def record(self, stream: Any) -> Any:
        """Returns an event that completes once the stream's work so far is done."""
        return stream.record_event()

    def let_wait(self, stream: Any, event: Any) -> None:
        """Makes later work of the stream wait for the event. The host does not wait."""
        stream.wait_event(event)

    def wait(self, event: Any) -> None:
        """Blocks until the event is done, without the GIL."""
        event.synchronize()

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns page-locked host memory, which the device can copy to and from asynchronously."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def register(self, address: int, nbytes: int, device: torch.device, *, read_only: bool = False) -> None:
        """Page-locks host memory that torch has not allocated. :meth:`copy` then uses it like memory of :meth:`locked`, on all devices of
        this type. The memory must stay mapped, with its current pages, until :meth:`unregister`, and no byte of it may be registered
        already.

        Args:
            address, nbytes: whole pages.
            device: a device of the type that copies.
            read_only: whether the memory is mapped read-only; copies only read it too.

        Raises:
            NotRegistered: if the memory cannot be page-locked.
        """
        if device.type != "cuda":
            raise NotRegistered(f"torch page-locks no memory but its own for devices of type {device.type}, and this needs CUDA or ROCm")
        try:
            # On a thread without a current device CUDA would make a context on the first device, possibly an unused one.
            with torch.cuda.device(device):
                code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE | (_READ_ONLY if read_only else 0)))
        except (RuntimeError, AssertionError) as error:  # no driver, or torch is built without CUDA
            raise NotRegistered(f"torch cannot call cudaHostRegister: {error}") from error
        if code:
            _forget_error(device)
            remedy = "raise the limit of locked memory (ulimit -l, or the container's memlock), and see that the host has that much memory free"
            if code == _NOT_SUPPORTED:
                remedy = "this device, or its driver, cannot lock memory of this kind"
            raise NotRegistered(f"cudaHostRegister of {nbytes} bytes returned {code} ({_meaning(code)}): {remedy}")

    def unregister(self, address: int, device: torch.device) -> None:
        """Ends a :meth:`register` with this address and device. No copy may be under way in the memory."""
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
        if code:
            _forget_error(device)
            logging.getLogger("longshore.worker").warning("cudaHostUnregister returned %d (%s)", code, _meaning(code))

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Enqueues a copy on the stream. Both ends must stay until an event after it is done."""
        self.run(stream, functools.partial(target.copy_, non_blocking=True), [source])

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, stream: Any = None) -> Tensor:
        """Returns memory of the device that belongs to ``stream``; by default to this thread's stream."""
        if stream is None:
            return torch.empty(shape, dtype=dtype, device=device)
        made: list[Tensor] = []
        self.run(stream, lambda: made.append(torch.empty(shape, dtype=dtype, device=device)), [])
        return made[0]

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        """Keeps a tensor's memory, once freed, until the stream has done the work queued before. The memory may belong to another
        stream."""
        tensor.record_stream(stream)

    def run(self, stream: Any, act: Callable[..., object], tensors: Sequence[Tensor | None]) -> None:
        """Enqueues the torch operations of ``act(*tensors)`` on the stream. The tensors must stay until an event after it is done."""
        index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)  # also makes the stream's device the current one
        try:
            act(*tensors)
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)

    def all_gather(self, whole: Tensor, own: Tensor, group: Any) -> Any:
        """Begins a collective on the process group's stream, behind this thread's stream. ``whole`` gets all ranks' ``own``, which may be a
        view of ``whole``.

        Returns:
            torch.distributed's work. Its ``wait()`` makes this thread's stream wait, not the host. Both tensors must stay until their
            memory's streams wait for it, too.
        """
        return distributed.all_gather_into_tensor(whole, own, group, async_op=True)

    def reduce_scatter(self, part: Tensor, slots: Tensor) -> Any:
        """Begins a reduce-scatter as :meth:`all_gather` does: ``part`` gets the sum of this rank's row of all ranks' ``slots``."""
        return distributed.reduce_scatter_tensor(part, slots.view(-1), async_op=True)

    def all_reduce(self, tensor: Tensor) -> Any:
        """Begins an in-place sum of all ranks' tensors, as :meth:`all_gather` does."""
        return distributed.all_reduce(tensor, async_op=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Returns a copy in the host's memory, complete on return."""
        return tensor.to("cpu")


def _meaning(code: int) -> str:
    return str(torch.cuda.CudaError(code))


def _forget_error(device: torch.device) -> None:
    """Clears the runtime's error of a failed call, which this thread's next kernel launch would report otherwise."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


accelerator = Accelerator()


class Streams(dict[torch.device, Any]):
    """A stream of the package for each device, made when it is first asked for."""

    def __missing__(self, device: torch.device) -> Any:
        self[device] = stream = accelerator.new_stream(device)
        return stream


def host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns memory of the host for as long as the package wants it, whatever torch's default device and inference mode are."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device="cpu")


def host_number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a tensor of one number on the host, for example a step count. Counts need fp32, since a count in bf16
    would stop at 256."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


_is_cpu = Tensor.is_cpu.__get__  # type: ignore[attr-defined]


def has_any(tensors: Iterable[Tensor]) -> bool:
    """Returns whether any of the tensors lies in the accelerator's memory."""
    # ``map`` calls torch's getter for one tensor after the other in C, without the interpreter between them.
    return not all(map(_is_cpu, tensors)) if type(accelerator) is Accelerator else any(map(accelerator.has, tensors))


def empty_beside(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns memory on the tensor's device. Device memory belongs to this thread's stream."""
    if accelerator.has(tensor):
        return accelerator.empty(shape, dtype, tensor.device)
    return torch.empty(shape, dtype=dtype, device=tensor.device)


def copy_together_out(target: Tensor, sources: Sequence[Tensor], stream: Any) -> None:
    """Enqueues one copy of a device's flat tensors, packed end to end, to flat memory of the host. All must stay as in
    :meth:`Accelerator.copy`. Callers disable gradient mode, once for all their copies."""
    if len(sources) > 1:
        # The packed memory belongs to the stream. After its release here, any reuse comes behind the stream's copy.
        packed = accelerator.empty(target.shape, target.dtype, sources[0].device, stream)
        accelerator.run(stream, lambda packed, *sources: torch.cat(sources, out=packed), [packed, *sources])
        sources = [packed]
    accelerator.copy(target, sources[0], stream)


def copy_together_in(targets: Sequence[Tensor], source: Tensor, stream: Any) -> None:
    """Enqueues one copy of flat memory of the host to a device, which then copies its parts into the device's flat
    tensors. The conditions are those of :func:`copy_together_out`."""
    if len(targets) == 1:
        accelerator.copy(targets[0], source, stream)
        return
    packed = accelerator.empty(source.shape, source.dtype, targets[0].device, stream)
    accelerator.copy(packed, source, stream)
    sizes = [target.numel() for target in targets]
    accelerator.run(stream, lambda packed, *targets: torch._foreach_copy_(targets, packed.split(sizes)), [packed, *targets])


def run_where(tensors: Sequence[Tensor], act: Callable[..., object]) -> None:
    """Calls ``act`` with tensors of one device on this thread's stream, or with tensors of the host at once."""
    if accelerator.has(tensors[0]):
        accelerator.run(accelerator.current_stream(tensors[0].device), act, tensors)
    else:
        act(*tensors)


def is_plain(tensor: Tensor) -> bool:
    """Returns whether the Rust half can use the tensor's own memory. Memory of a lazily negated tensor has the opposite signs."""
    return tensor.is_contiguous() and not tensor.is_neg() and not accelerator.has(tensor)
