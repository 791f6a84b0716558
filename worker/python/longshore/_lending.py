"""Weights that lie in the memory of a server of this host. A device copies them from there itself, where it can page-lock that."""

import collections
import logging
import threading
from typing import Any

import torch

from longshore import _device
from longshore._params import Param
from longshore._registered import Registered

_LOGGER = logging.getLogger("longshore.worker")


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
        #: What devices may still copy, each with the events after its copies, and who waits for these.
        self._lent: collections.deque[tuple[Any, list[Any]]] = collections.deque()
        self._lock = threading.RLock()

    def fits(self, param: Param) -> bool:
        """Whether a parameter of a device can have its weights as they lie there."""
        tensor = param.tensor
        return self._is_usable and _device.accelerator.has(tensor) and tensor.dtype is self._dtype and tensor.is_contiguous()

    def take(self, params: list[Param]) -> Any:
        """Waits for the weights of parameters that fit.

        Returns:
            The Rust half's, with the runs of each parameter; None where they do not lie in memory that their devices can copy from.
        """
        lent = self._job.lent_weights([param.index for param in params])
        if lent is None:
            return None
        for param, runs in zip(params, lent.runs, strict=True):
            if not all(self._holds(address, elements * param.dtype.itemsize, param.tensor.device) for address, _, elements in runs):
                return None
        return lent

    def keep(self, lent: Any, copied: list[Any]) -> None:
        """Devices copy these until the events."""
        self._lent.append((lent, copied))

    def finish(self) -> None:
        """Waits until no device copies weights from servers' memory. They may be overwritten once a step that was made with them has left.

        Raises:
            LongshoreError: where a server has overwritten them before that, so that what was copied may be torn.
        """
        with self._lock:
            while self._lent:
                lent, copied = self._lent.popleft()
                for event in copied:
                    _device.accelerator.wait(event)
                lent.check()

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

    def release(self) -> None:
        """Unregisters all of it, once nothing is copied."""
        self._is_usable = False
        with self._lock:
            for _, copied in self._lent:
                for event in copied:
                    _device.accelerator.wait(event)
            self._lent.clear()
        self._memory.release()
