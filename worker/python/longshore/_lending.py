"""Weights that lie in the memory of a server of this host. A device copies them from there itself, where it can page-lock that."""

import collections
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longshore import _device
from longshore._locked import host_tensor
from longshore._registered import Registered
from longshore.errors import LongshoreError

_LOGGER = logging.getLogger("longshore.worker")

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
