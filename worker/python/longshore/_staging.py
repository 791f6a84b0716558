"""Memory of the host for weights, and that of it which they go through on their way to a device, used again and again."""

from typing import Any

import torch
from torch import Tensor

from longshore import _device


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
