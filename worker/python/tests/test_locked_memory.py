"""A device copies gradients into the memory from which they are sent, where it can page-lock that. Otherwise copies stay as they were."""

import gc
import logging
from typing import Any

import pytest
import torch
from accelerator import Immediate, Layers, Simulated, same
from test_order_on_a_device import on
from torch import Tensor

import longshore
from longshore import errors
from longshore.transfer import device as _device
from longshore.transfer import pinned

#: A weight has more elements than a shard.
WIDTH = 300
STEPS = 3


def train(device: Simulated, is_closed: bool = True, **options: Any) -> list[Tensor]:
    """Returns the weights after some steps of two backward passes each."""
    model = Layers(device, width=WIDTH, depth=2)
    optimizer = longshore.AdamW(model.named_parameters(), missing_gradients="zeros", streaming=True, accumulate=2, **options)
    for step in range(STEPS):
        for number in range(2):
            model.loss(2 * step + number).backward()
        optimizer.step()
    optimizer.flush()
    device.synchronize()
    found = [device.alias(parameter.detach()).clone() for parameter in model.parameters()]
    if is_closed:
        optimizer.close()
    return found


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """Returns the result in the host's memory."""
    return train(Immediate(4))


def test_gradients_and_weights_go_straight_between_the_device_and_servers(expected: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    device = Simulated(0)
    with on(device, monkeypatch):
        assert same(train(device), expected)
        assert device.copies["to torch's"] == 0
        # Four parameters have a gradient: one of them lies in two shards, and one in three.
        assert device.copies["to registered"] == 2 * STEPS * (4 + 1 + 2)
        assert (device.copies["from registered"] > 0, device.copies["from torch's"]) == (True, 0)
        assert device.registered == {}, "the memory is unregistered when the optimizer is closed"


@pytest.mark.parametrize("limit", [0, 1])
def test_where_memory_cannot_be_locked_both_go_as_before(
    limit: int, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Limited(Simulated):
        """Page-locks at most this many pieces."""

        def register(self, address: int, nbytes: int, device: torch.device, *, read_only: bool = False) -> None:
            if read_only or len(self.registered or {}) == limit:
                raise _device.NotRegistered("it may lock no more: raise the limit")
            super().register(address, nbytes, device)

    device = Limited(0)
    with on(device, monkeypatch), caplog.at_level(logging.WARNING, "longshore"):
        assert same(train(device), expected)
    assert device.copies["to torch's"] > 0 and device.copies["from torch's"] > 0
    ways = {"gradients go", "weights come"}
    assert {record.getMessage() for record in caplog.records} == {
        f"{way} through torch's page-locked memory, with one more copy on the host: it may lock no more: raise the limit" for way in ways
    }
    assert len(caplog.records) == len(ways)
    assert device.registered == {}


def test_an_optimizer_that_is_gone_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Simulated(0)
    with on(device, monkeypatch):
        train(device, is_closed=False)
        gc.collect()
        assert device.copies["to registered"] > 0
        assert device.registered == {}


@pytest.mark.parametrize("options", [{"gradient_dtype": "bf16"}, {"accumulate_on": "worker"}, {"transport": "tcp"}], ids=str)
def test_gradients_that_the_host_converts_or_nobody_may_read_go_as_before(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for device in (Simulated(0), Simulated(4)):
        with on(device, monkeypatch):
            found.append(train(device, **options))
            assert (device.copies["to registered"], device.copies["to torch's"] > 0) == (0, True)
    assert same(*found)


def test_memory_takes_what_leaves_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Job:
        def gradient_memory(self) -> object:
            return self

    memory = pinned.LockedMemory(Job(), torch.bfloat16)
    gradient = torch.ones(4, 4, dtype=torch.bfloat16)
    assert memory.takes(gradient, 1.0)
    assert not memory.takes(gradient, 0.5)
    assert not memory.takes(gradient.T[:2], 1.0)
    assert not memory.takes(gradient.half(), 1.0)


def test_a_gradient_that_the_device_could_not_copy_makes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Simulated):
        def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
            if self.copies["to registered"] == 3:
                raise RuntimeError("the device is lost")
            super().copy(target, source, stream)

    device = Lost(0)
    with on(device, monkeypatch):
        model = Layers(device)
        optimizer = longshore.AdamW(model.named_parameters(), missing_gradients="zeros")
        model.loss(0).backward()
        with pytest.raises(RuntimeError, match="the device is lost"):
            optimizer.step()
        with pytest.raises(errors.UsageError, match="interrupted while its gradients were leaving"):
            optimizer.step()
        optimizer.close()
        assert device.registered == {}


class Cuda:
    """The part of the CUDA runtime that torch has. Its second and later calls fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.fails_with = 2

    def cudaHostRegister(self, *given: int) -> int:
        self.calls.append(given)
        return 0 if len(self.calls) == 1 else self.fails_with

    def cudaHostUnregister(self, *given: int) -> int:
        self.calls.append(given)
        return 0


def test_memory_is_registered_by_the_cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, devices, forgotten = Cuda(), [], []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda device: devices.append(device) or torch.no_grad())
    monkeypatch.setattr(_device, "_meaning", lambda code: f"error {code}")
    monkeypatch.setattr(_device, "_forget_error", forgotten.append)
    accelerator, device = _device.Accelerator(), torch.device("cuda:1")
    accelerator.register(4096, 8192, device)
    assert (devices, forgotten) == ([device], [])
    with pytest.raises(_device.NotRegistered, match="of 4096 bytes returned 2 .error 2.: raise the limit of locked memory .ulimit -l"):
        accelerator.register(65536, 4096, device)
    assert forgotten == [device], "or the next kernel of this thread would raise it"
    cuda.fails_with = 801
    with pytest.raises(_device.NotRegistered, match="returned 801 .error 801.: this device, or its driver, cannot lock memory of this kind"):
        accelerator.register(65536, 4096, device, read_only=True)
    accelerator.unregister(4096, device)
    assert devices == [device] * 4, "another device would get a context of this process"
    assert cuda.calls == [(4096, 8192, 1), (65536, 4096, 1), (65536, 4096, 9), (4096,)]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_device_that_is_not_there_registers_nothing(device: str) -> None:
    if device != "cpu" and torch.cuda.is_available():
        pytest.skip("the device is there")
    with pytest.raises(_device.NotRegistered, match="CUDA or ROCm|torch cannot call cudaHostRegister"):
        _device.Accelerator().register(4096, 4096, torch.device(device))
