"""Memory of the host that is page-locked for a device, piece by piece, until it is released."""

import bisect
import os
import weakref
from typing import Any

import torch

from longshore import _device


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
