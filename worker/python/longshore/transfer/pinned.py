"""Page-locked memory of the host. Gradients leave from it, weights are lent from it, and other copies pass through it.

A job owns its :class:`LockedMemory` and its :class:`Lending`, which register memory of the Rust half with the device. Both are used on the
training thread and on the pusher's. Staging memory belongs to the fetcher of a model in units.
"""

import bisect
import collections
import contextlib
import ctypes
import logging
import operator
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from longshore.errors import LongshoreError
from longshore.transfer import device as _device


class Registered:
    """Pieces of memory that are registered with a device. Each has an object that keeps it mapped."""

    def __init__(self, *, read_only: bool = False) -> None:
        self._read_only = read_only
        #: The pieces' start addresses, sorted.
        self._starts: list[int] = []
        #: By start address: the number of bytes, the device, and the object that keeps the piece mapped.
        self._pieces: dict[int, tuple[int, torch.device, Any]] = {}
        self._release = weakref.finalize(self, _unregister, os.getpid(), self._pieces)
        # At the interpreter's end nothing is unregistered, since the process's memory ends too.
        self._release.atexit = False

    def finds(self, address: int, nbytes: int) -> bool:
        """Returns whether the bytes lie in one piece."""
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address + nbytes <= self._starts[at] + self._pieces[self._starts[at]][0]

    def starts(self) -> list[int]:
        """Returns the pieces' start addresses."""
        return list(self._starts)

    def add(self, address: int, nbytes: int, device: torch.device, keeper: Any) -> None:
        """Registers a piece.

        Raises:
            NotRegistered: if the device cannot lock the memory.
        """
        _device.accelerator.register(address, nbytes, device, read_only=self._read_only)
        self._pieces[address] = nbytes, device, keeper
        bisect.insort(self._starts, address)

    def remove(self, address: int) -> None:
        """Unregisters a piece. No copy may be under way in it."""
        self._starts.remove(address)
        _unregister(os.getpid(), {address: self._pieces.pop(address)})

    def release(self) -> None:
        """Unregisters all pieces. No copy may be under way in them."""
        self._starts.clear()
        self._release()


def _unregister(process: int, pieces: dict[int, tuple[int, torch.device, Any]]) -> None:
    """Unregisters pieces and drops the objects that keep them mapped. A fork only drops them: the registration is its parent's."""
    if os.getpid() == process:
        for address, (_, device, _) in pieces.items():
            _device.accelerator.unregister(address, device)
    pieces.clear()


_LOGGER = logging.getLogger("longshore.worker")


class LockedMemory:
    """The job's gradient memory, registered piece by piece with a device.

    The first gradient in a piece registers it until :meth:`release`, since each step uses the piece again. Only a write of
    :meth:`Job.push_together` calls :meth:`holds`, so calls never overlap.

    Args:
        dtype: the type in which gradients leave.
    """

    def __init__(self, job: Any, dtype: torch.dtype) -> None:
        self._job, self._dtype = job, dtype
        #: The Rust half's gradient memory. The reference keeps pieces at their addresses, as page-locking needs. None
        #: until :meth:`takes` asks for it, and if no server reads gradients from this process's memory.
        self._memory: Any = None
        self._is_asked = False
        #: Number of pieces seen so far, and the pieces that are registered.
        self._known = 0
        self._registered = Registered()
        #: False once a piece could not be registered, the memory is released, or no server reads it.
        self._is_usable = True

    def takes(self, gradient: Tensor, scale: float) -> bool:
        """Returns whether a device's gradient is copied as its bytes are, without conversion or scaling."""
        fits = self._is_usable and scale == 1.0 and gradient.dtype is self._dtype and gradient.is_contiguous()
        if fits and not self._is_asked:
            self._is_asked = True
            self._memory = self._job.gradient_memory()
            self._is_usable = fits = self._memory is not None
        return fits

    def holds(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Returns whether the bytes are page-locked, after registering a new piece if needed. The first failure is logged in one line and
        ends all registering."""
        found = self._registered.finds(address, nbytes)
        return found or (self._is_usable and self._register(device) and self._registered.finds(address, nbytes))

    def _register(self, device: torch.device) -> bool:
        """Registers the pieces that are new since the last call. Returns whether all could be."""
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
        """Unregisters all pieces. The job must be closed, with no copy under way."""
        self._is_usable = False
        self._registered.release()
        self._memory = None


def host_tensor(address: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Returns the host's memory at an address as a tensor that does not keep it alive."""
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def host_of(address: int, bucket: list[Tensor]) -> Tensor:
    """Returns the host's memory of a bucket, as :func:`host_tensor` does."""
    return host_tensor(address, sum(map(Tensor.numel, bucket)), bucket[0].dtype)


def part_of(flat: Tensor, first: int, elements: int) -> Tensor:
    """Returns consecutive elements of a flat tensor."""
    return flat if elements == flat.numel() else flat[first : first + elements]


#: Largest bucket in bytes. A larger one gains nothing: the link already takes longer for this one than the host takes
#: to begin the next copy.
BUCKET_BYTES = 1024 * 1024


def buckets(places: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
    """Sorts a device's flat tensors by their addresses in the host's memory. Tensors that lie end to end there share a bucket, which one
    copy moves.

    Yields:
        The address of each bucket, and its tensors in order. A tensor larger than a bucket is alone.
    """
    start = end = 0
    bucket: list[Tensor] = []
    for address, tensor in sorted(places, key=operator.itemgetter(0)):
        nbytes = tensor.nbytes
        is_next = bucket and address == end and end + nbytes - start <= BUCKET_BYTES
        if not is_next or tensor.dtype is not bucket[0].dtype or tensor.device != bucket[0].device:
            if bucket:
                yield start, bucket
            start, bucket = address, []
        bucket.append(tensor)
        end = address + nbytes
    if bucket:
        yield start, bucket


#: A run of weights that are consecutive in a server's memory: address, index of the first in the target, and number.
Run = tuple[int, int, int]
#: Largest number of entries in :class:`Lending`'s list of copies. A further one waits for all of them. A step of a
#: large model has fewer.
_MOST = 1024


class Lending:
    """Weights that a job's servers lend from their own memory. The memory is registered with a device at the first copy, until
    :meth:`release`.

    Args:
        dtype: the type that servers round weights to.
    """

    def __init__(self, job: Any, dtype: torch.dtype) -> None:
        self._job, self._dtype = job, dtype
        self._memory = Registered(read_only=True)
        self._is_usable = True
        self._process = os.getpid()
        #: Lent weights that devices may still copy, each with the events after their copies, and host memory that the
        #: copies read. A thread waits for the events under the lock.
        self._lent: collections.deque[tuple[Any, list[Any], list[Tensor]]] = collections.deque()
        self._lock = threading.RLock()

    def fits(self, tensor: Tensor) -> bool:
        """Returns whether the tensor can take weights exactly as servers have them."""
        is_plain = tensor.is_contiguous() and not tensor.is_neg()
        return self._is_usable and _device.accelerator.has(tensor) and tensor.dtype is self._dtype and is_plain

    @torch.no_grad()
    def copy(self, lent: Any, runs: list[list[Run]], targets: list[Tensor], streams: _device.Streams) -> None:
        """Has devices copy weights from servers' memory.

        Args:
            lent, runs: the Rust half's lent weights, and their runs by target.
            targets: flat memory of devices.
            streams: the devices' streams for copies.
        """
        held: list[Tensor] = []
        parts = ((run[0], part_of(target, *run[1:])) for target, of_target in zip(targets, runs, strict=True) for run in of_target)
        sources = [(self._source(address, bucket, held), bucket) for address, bucket in buckets(parts)]
        try:
            for source, bucket in sources:
                _device.copy_together_in(bucket, source, streams[bucket[0].device])
        finally:
            self.hold(lent, held, targets, streams)

    def _source(self, address: int, bucket: list[Tensor], held: list[Tensor]) -> Tensor:
        """Returns the source of a bucket: servers' memory, or a host copy of it, kept in ``held``."""
        source = host_of(address, bucket)
        if not self._holds(address, source.nbytes, bucket[0].device):
            source = _device.accelerator.locked(source.shape, source.dtype).copy_(source)
            held.append(source)
        return source

    def hold(self, lent: Any, held: list[Tensor], targets: list[Tensor], streams: _device.Streams) -> None:
        """Keeps lent weights, or None, and memory of the host until their copies to the targets are done."""
        events = [_device.accelerator.record(streams[device]) for device in {target.device for target in targets}]
        self._lent.append((lent, events, held))
        # The end of a step empties the list. An evaluation has no such end, so the list is emptied here.
        if len(self._lent) > _MOST:
            self.finish()

    def finish(self) -> None:
        """Waits until no device copies weights from servers' memory. Servers may overwrite these once all gradients of their step have
        left.

        Raises:
            LongshoreError: if a server has overwritten them earlier, so that a copy may be torn.
        """
        if os.getpid() != self._process:
            return  # a fork has no device
        with self._lock:
            lent = []
            while self._lent:
                found, events, held = self._lent.popleft()
                for event in events:
                    _device.accelerator.wait(event)
                del held
                lent.append(found)
            for found in lent:
                if found is not None:
                    found.check()

    def _holds(self, address: int, nbytes: int, device: torch.device) -> bool:
        found = self._memory.finds(address, nbytes)
        return found or (self._is_usable and self._register(device) and self._memory.finds(address, nbytes))

    def _register(self, device: torch.device) -> bool:
        """Registers servers' current memory. A restarted server has other memory than before."""
        memories = {memory.address: memory for memory in self._job.image_memory()}
        gone = [address for address in self._memory.starts() if address not in memories]
        if gone:
            self.finish()
        for address in gone:
            self._memory.remove(address)
        try:
            for address, memory in memories.items():
                if not self._memory.finds(address, memory.nbytes):
                    self._memory.add(address, memory.nbytes, device, memory)
        except _device.NotRegistered as error:
            self._is_usable = False
            _LOGGER.warning("weights come through torch's page-locked memory, with one more copy on the host: %s", error)
        return self._is_usable

    def renewed(self, job: Any) -> "Lending":
        """Releases this object and returns one for another job."""
        self.release()
        return Lending(job, self._dtype)

    def release(self) -> None:
        """Unregisters all memory, once no copy is under way."""
        self._is_usable = False
        with contextlib.suppress(LongshoreError):
            self.finish()
        self._memory.release()


def host_memory(tensor: Tensor) -> Tensor:
    """Returns host memory of a tensor's shape and type, page-locked if the tensor is on a device."""
    if _device.accelerator.has(tensor):
        return _device.accelerator.locked(tensor.shape, tensor.dtype)
    return _device.host_empty(tensor.shape, tensor.dtype)


class Slabs:
    """Host memory that tensors pass through in each step. Small ones of a device lie end to end there, in the order of their first use."""

    def __init__(self) -> None:
        self._free: dict[torch.dtype, Tensor] = {}

    def take(self, tensor: Tensor) -> Tensor:
        """Returns memory of a tensor's shape and type."""
        count, most = tensor.numel(), BUCKET_BYTES // tensor.itemsize
        if not _device.accelerator.has(tensor) or 2 * count > most:
            return host_memory(tensor)
        free = self._free.get(tensor.dtype)
        if free is None or free.numel() < count:
            free = _device.accelerator.locked([most], tensor.dtype)
        self._free[tensor.dtype] = free[count:]
        return free[:count].view(tensor.shape)


class Staging:
    """Host memory that weights pass through, reused for tensors of the same size and type."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, bool], list[tuple[Tensor, Any]]] = {}

    def take(self, tensor: Tensor) -> Tensor:
        free = self._free.get((tensor.shape, tensor.dtype, _device.accelerator.has(tensor)))
        if not free:
            return host_memory(tensor)
        staged, copied = free.pop(0)
        if copied is not None:
            _device.accelerator.wait(copied)
        return staged

    def give_back(self, staged: Tensor, copied: Any) -> None:
        """Takes staging memory back. ``copied`` is the event after the last copy that reads it."""
        self._free.setdefault((staged.shape, staged.dtype, copied is not None), []).append((staged, copied))
