"""Page-locked memory of the host: gradients leave from it, weights are lent from it, and other copies go through it.

A job owns its :class:`LockedMemory` and its :class:`Lending`, which register memory of the Rust half with the device. Both are used on the
training thread and on the pusher's. Staging memory belongs to the fetcher of a model in units.
"""

import bisect
import collections
import contextlib
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.errors import LongshoreError
from longshore.transfer import device as _device
from longshore.transfer.params import Param


class Registered:
    """Pieces of memory that are registered with a device, each with what keeps it mapped meanwhile.

    Args:
        read_only: this process may only read them.
    """

    def __init__(self, *, read_only: bool = False) -> None:
        self._read_only = read_only
        #: Where each begins, in order; and by that its bytes, its device, and what keeps it.
        self._starts: list[int] = []
        self._pieces: dict[int, tuple[int, torch.device, Any]] = {}
        self._release = weakref.finalize(self, _unregister, os.getpid(), self._pieces)
        # At the interpreter's end the process's memory goes with it.
        self._release.atexit = False

    def finds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes lie in one of the pieces."""
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address + nbytes <= self._starts[at] + self._pieces[self._starts[at]][0]

    def starts(self) -> list[int]:
        """Where the pieces begin."""
        return list(self._starts)

    def add(self, address: int, nbytes: int, device: torch.device, keeper: Any) -> None:
        """Registers a piece.

        Raises:
            NotRegistered: where it cannot be.
        """
        _device.accelerator.register(address, nbytes, device, read_only=self._read_only)
        self._pieces[address] = nbytes, device, keeper
        bisect.insort(self._starts, address)

    def remove(self, address: int) -> None:
        """Unregisters a piece. No copy may be under way there."""
        self._starts.remove(address)
        _unregister(os.getpid(), {address: self._pieces.pop(address)})

    def release(self) -> None:
        """Unregisters all pieces. No copy may be under way there."""
        self._starts.clear()
        self._release()


def _unregister(process: int, pieces: dict[int, tuple[int, torch.device, Any]]) -> None:
    """Unregisters pieces, and lets go of what keeps them. In a fork they are the parent's."""
    if os.getpid() == process:
        for address, (_, device, _) in pieces.items():
            _device.accelerator.unregister(address, device)
    pieces.clear()


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


#: Weights that lie in a row: their address, the first of them among a target's elements, and how many.
Run = tuple[int, int, int]
#: Copies that are not waited for, at the most. A step of a large model has fewer.
_MOST = 1024


class Lending:
    """What a job's servers lend of their memory, registered with a device when weights are first copied from it, and until
    :meth:`release`.

    Args:
        job: the Rust half's.
        dtype: what servers round weights to.
    """

    def __init__(self, job: Any, dtype: torch.dtype) -> None:
        self._job, self._dtype = job, dtype
        self._memory = Registered(read_only=True)
        self._is_usable = True
        self._process = os.getpid()
        #: What devices may still copy, each with the events after its copies, and copies of it on the host. Under the lock somebody waits
        #: for these.
        self._lent: collections.deque[tuple[Any, list[Any], list[Tensor]]] = collections.deque()
        self._lock = threading.RLock()

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor can have its weights as they lie there."""
        return self._is_usable and _device.accelerator.has(tensor) and tensor.dtype is self._dtype and tensor.is_contiguous()

    def copy(self, lent: Any, runs: list[list[Run]], targets: list[Tensor], stream: Callable[[torch.device], Any]) -> None:
        """Has devices copy weights from where they lie.

        Args:
            lent, runs: the Rust half's, and what it says of each target.
            targets: flat memory of devices.
            stream: of a device, for copies.
        """
        held: list[Tensor] = []
        sources = [[self._source(run, target, held) for run in of_target] for target, of_target in zip(targets, runs, strict=True)]
        try:
            for target, of_target, from_there in zip(targets, runs, sources, strict=True):
                for (_, first, elements), source in zip(of_target, from_there, strict=True):
                    _device.accelerator.copy(target[first : first + elements], source, stream(target.device))
        finally:
            self._keep(lent, targets, stream, held)

    def _source(self, run: Run, target: Tensor, held: list[Tensor]) -> Tensor:
        """Memory that a target's device copies from: a run where it lies, or a copy of it on the host, which ``held`` keeps."""
        address, _, elements = run
        source = host_tensor(address, elements, target.dtype)
        if not self._holds(address, source.nbytes, target.device):
            source = _device.accelerator.locked(source.shape, source.dtype).copy_(source)
            held.append(source)
        return source

    def hold(self, memory: list[Tensor], targets: list[Tensor], stream: Callable[[torch.device], Any]) -> None:
        """Keeps memory of the host until what was copied from there is in the targets."""
        self._keep(None, targets, stream, memory)

    def _keep(self, lent: Any, targets: list[Tensor], stream: Callable[[torch.device], Any], held: list[Tensor]) -> None:
        events = [_device.accelerator.record(stream(device)) for device in {target.device for target in targets}]
        self._lent.append((lent, events, held))
        # Evaluations fetch units and end no step.
        if len(self._lent) > _MOST:
            self.finish()

    def finish(self) -> None:
        """Waits until no device copies weights from servers' memory. They may be overwritten once the gradients have left of a step that
        was made with them.

        Raises:
            LongshoreError: where a server has overwritten them before that, so that what was copied may be torn.
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
        """Registers the memory of servers as they are now. A server that was started again has other memory."""
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
        """What stands in its place where weights come from another job from now on."""
        self.release()
        return Lending(job, self._dtype)

    def release(self) -> None:
        """Unregisters all of it, once nothing is copied."""
        self._is_usable = False
        with contextlib.suppress(LongshoreError):
            self.finish()
        self._memory.release()


def host_memory(tensor: Tensor) -> Tensor:
    """Memory of the host for such a tensor, page-locked where a device copies from it."""
    if _device.accelerator.has(tensor):
        return _device.accelerator.locked(tensor.shape, tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


class Staging:
    """Host memory that weights go through: what was used once is used again for others of the same size."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, bool], list[tuple[Tensor, Any]]] = {}

    def take(self, tensor: Tensor) -> Tensor:
        free = self._free.get(_kind(tensor.shape, tensor.dtype, _device.accelerator.has(tensor)))
        if not free:
            return host_memory(tensor)
        staged, copied = free.pop(0)
        if copied is not None:
            _device.accelerator.wait(copied)
        return staged

    def give_back(self, staged: Tensor, copied: Any) -> None:
        """``copied`` is the event after the last copy that reads it."""
        kind = _kind(staged.shape, staged.dtype, copied is not None)
        self._free.setdefault(kind, []).append((staged, copied))


def _kind(shape: torch.Size, dtype: torch.dtype, is_locked: bool) -> tuple[torch.Size, torch.dtype, bool]:
    return shape, dtype, is_locked
