"""Units on a device: weights are copied from page-locked memory on a separate stream, and no computation uses them before."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from host_accelerator import OnHost
from torch import Tensor
from units import Accountant, Deep, optimizer_of, pair, same, train, weight_bytes

import longshore
from longshore.transfer import device as _device


class Late(OnHost):
    """An accelerator in host memory. Torch's computation is done at once. The package's copies run when they are awaited, and spoil their
    targets until then."""

    def __init__(self, ignores: str | None = None) -> None:
        self.main: list[Callable[[], None]] = []
        self.locked_memory: dict[int, Tensor] = {}
        self.copies = 0
        self.ignores = ignores

    def has(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # the tensor's unit need not be here
            return tensor.data_ptr() not in self.locked_memory

    def current_stream(self, device: torch.device) -> Any:
        return self.main

    def new_stream(self, device: torch.device) -> Any:
        return []

    def record(self, stream: Any) -> Any:
        return stream

    def let_wait(self, stream: Any, event: Any) -> None:
        if stream is self.main and self.ignores != "let_wait":
            self.wait(event)

    def wait(self, event: Any) -> None:
        while event:
            event.pop(0)()

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory = torch.empty(shape, dtype=dtype)
        self.locked_memory[memory.data_ptr()] = memory
        return memory

    def register(self, address: int, nbytes: int, device: torch.device, *, read_only: bool = False) -> None:
        raise _device.NotRegistered("it cannot")

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        self.copies += 1
        if stream is self.main:
            target.copy_(source)
            return
        with torch.no_grad():
            spoilt, target = target, target.detach()
            spoilt.detach().fill_(float("nan"))

        def act() -> None:
            with torch.no_grad():
                target.copy_(source)

        stream.append(act)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()


@pytest.mark.parametrize(
    ("frozen", "options"),
    [(0, {}), (8, {}), (0, {"delay": 1}), (8, {"delay": 1})],
)
def test_weights_come_before_they_are_used(monkeypatch: pytest.MonkeyPatch, frozen: int, options: dict[str, Any]) -> None:
    whole, cut = pair(Deep)
    for model in (whole, cut):
        for layer in model.layers[:frozen]:
            layer.requires_grad_(False)
    options = {**options, "warmup_steps": 1}
    plain = optimizer_of(whole, **options)
    train(whole, plain)
    plain.flush()
    device = Late()
    with monkeypatch.context() as patch:
        patch.setattr(_device, "accelerator", device)
        accountant = Accountant(cut)
        optimizer = optimizer_of(cut, **options)
        longshore.shard(cut, optimizer, budget := weight_bytes(cut) // 5)
        with accountant:
            train(cut, optimizer)
        accountant.check(budget)
        optimizer.flush()
        same(whole, cut)
        optimizer.close()
    assert device.copies > 64


def test_the_wait_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cut = pair(Deep)
    with monkeypatch.context() as patch:
        patch.setattr(_device, "accelerator", Late(ignores="let_wait"))
        optimizer = optimizer_of(cut)
        longshore.shard(cut, optimizer, weight_bytes(cut) // 5)
        with torch.no_grad():
            assert cut(cut.inputs(0)).isnan().any()
