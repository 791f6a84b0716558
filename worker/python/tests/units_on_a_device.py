"""A model in units on the simulated accelerator of accelerator.py. Storages release device memory and get it again."""

import collections
import contextlib
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
import torch
from accelerator import Immediate, Layers, Linear, Simulated, Stream, fill_with_nan
from torch import Tensor, nn

import longshore
from longshore.transfer import device as _device
from longshore.units import fetch as _fetch


class _OfStorages(Simulated):
    """A simulated device whose storages can change their size, like those of torch's devices. :meth:`alias` maps a tensor's address to its
    present memory. Released memory belongs to the stream that allocated it, and later operations of that stream may write to it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: By a storage's address: its present memory and the stream that owns it. None while it has none.
        self.memory: dict[int, tuple[np.ndarray, Stream] | None] = {}
        #: Memory released by storages, by stream and number of elements. Allocations take it first.
        self.free: dict[tuple[Stream, int], list[np.ndarray]] = collections.defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        stream = self.current_stream(torch.device("cpu"))
        free = self.free[stream, int(np.prod(shape))] if dtype is torch.float32 else []
        if not free:
            return super().empty(shape, dtype, device)
        memory = free.pop()
        self.blocks[memory.ctypes.data] = memory
        return torch.from_numpy(memory).view(tuple(shape))

    def alias(self, tensor: Tensor) -> Tensor:
        base = self._address(tensor)
        if base not in self.memory:
            return super().alias(tensor)
        found = self.memory[base]
        assert found is not None, "it is used while its memory is away"
        with torch._C.DisableTorchFunctionSubclass():
            start = tensor.data_ptr() - base
        raw = torch.from_numpy(found[0]).view(torch.uint8)[start : start + tensor.numel() * tensor.element_size()]
        return raw.view(tensor.dtype).view(tensor.shape)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Takes a storage's memory, or gives it memory of this thread's stream that had another owner before."""
        base = storage.data_ptr()
        before = self.memory.get(base, (self.blocks[base], self.main))
        if before is not None and not nbytes:
            self.memory[base] = None
            if before[0] is not self.blocks[base]:  # its address names the storage
                self.free[before[1], len(before[0])].append(before[0])
            self.give(before[1], functools.partial(fill_with_nan, before[0]))
        elif before is None and nbytes:
            stream, like = self.current_stream(torch.device("cpu")), self.blocks[base]
            free = self.free[stream, len(like)]
            memory = free.pop() if free else np.empty_like(like)
            self.memory[base] = memory, stream
            self.give(stream, functools.partial(fill_with_nan, memory))


class LateStorages(_OfStorages):
    """Does everything late, in a random legal order."""


class ImmediateStorages(_OfStorages, Immediate):
    """Does everything at once."""


@contextlib.contextmanager
def on(device: _OfStorages, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the block the package uses the simulated accelerator, whose tensors' storages can change their size."""
    resize, resizable = torch.UntypedStorage.resize_, torch.UntypedStorage.resizable

    def is_there(storage: torch.UntypedStorage) -> bool:
        return storage.data_ptr() in device.blocks

    with monkeypatch.context() as patch:
        patch.setattr(_device, "accelerator", device)
        patch.setattr(
            torch.UntypedStorage, "resize_", lambda storage, n: device.resize(storage, n) if is_there(storage) else resize(storage, n)
        )
        patch.setattr(torch.UntypedStorage, "resizable", lambda storage: is_there(storage) or resizable(storage))
        yield


class Layer(nn.Module):
    def __init__(self, device: Simulated, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.device, self.weight, self.bias = device, weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return Linear.apply(self.device, x, self.weight, self.bias)


class Cut(Layers):
    """The layers of :class:`Layers` as modules."""

    def __init__(self, device: Simulated, depth: int) -> None:
        super().__init__(device, depth=depth)
        self.layers = nn.ModuleList(Layer(device, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True))
        self.last = Layer(device, self.head, self.head_bias)
        del self.weights, self.biases, self.head, self.head_bias

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        return self.last(self(self.batch(step)))

    @torch.no_grad()
    def part(self, step: int, layers: slice) -> Tensor:
        """Returns the output of some of the layers for a batch."""
        x = self.batch(step)
        for layer in self.layers[layers]:
            x = layer(x)
        return x


def ended(
    device: Simulated, model: nn.Module, optimizer: longshore.AdamW, results: list[Tensor], *, in_units: bool = True
) -> list[Tensor]:
    """Ends a run. Returns these results and the last weights, once the device has done everything."""
    optimizer.flush()
    for parameter in model.parameters():
        with longshore.GatheredParameters(parameter) if in_units else contextlib.nullcontext():
            results.append(parameter.detach())
            device.synchronize()
            results[-1] = device.alias(results[-1]).clone()
    device.synchronize()
    found = [device.alias(result).clone() for result in results]
    optimizer.close()
    return found


def advance(fetch: _fetch.Fetch) -> None:
    """Like the package's own function, once everything has come to the host."""
    if fetch.read is not None:
        wait([fetch.read])
    fetch._copy()
