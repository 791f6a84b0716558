"""Weights that ranks gather from each other, in one process: the parts that need no other rank."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from longshore import errors
from longshore.distributed import agree
from longshore.distributed.gathered import Gathered, gather_frozen
from longshore.transfer.params import DTYPES, Param
from longshore.transfer.partitions import layout

#: Enough elements for a collective.
ELEMENTS = 64 * 1024


@pytest.fixture
def without_the_cpu() -> Iterator[None]:
    """A process group without a backend for CPU tensors, as with nccl alone."""
    distributed.init_process_group("cuda:gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            distributed.all_reduce(torch.zeros(1))
        yield
    finally:
        distributed.destroy_process_group()


class Stub:
    """A job whose weights are 0, 1, 2, ..."""

    def fetch(self, version: int, places: list[tuple[tuple[int, int, int, str], int]]) -> "Stub":
        self.read_weights([(index, address, elements, wire) for (index, address, elements, wire), _ in places])
        return self

    def read(self) -> None:
        pass

    def read_weights(self, places: list[tuple[int, int, int, str]]) -> None:
        for _, address, elements, _ in places:
            weights = torch.arange(elements, dtype=torch.float32)
            ctypes.memmove(address, weights.data_ptr(), weights.nbytes)


def param() -> Param:
    tensor = nn.Parameter(torch.zeros(ELEMENTS))
    return Param(0, "base", 0, tensor, tensor.shape, tensor.dtype, DTYPES[tensor.dtype], ELEMENTS)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange their findings through the device, which is missing here."""
    monkeypatch.setattr(agree, "together", lambda act: [act()])


def expected() -> Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32)


def test_weights_of_the_host_are_gathered_where_the_group_is_of_devices(without_the_cpu: None, alone: None) -> None:
    [(_, frozen)] = gather_frozen(Stub(), 0, [param()], 0, 1)
    assert torch.equal(frozen, expected())
    trained = param()
    Gathered(layout([trained], 1), 0, 1).read(Stub())
    assert torch.equal(trained.tensor.detach(), expected())


def test_one_group_is_made_for_all_of_them(without_the_cpu: None) -> None:
    cpu = torch.device("cpu")
    assert agree.group_of(cpu) is agree.group_of(cpu)
    assert agree.group_of(torch.device("cuda")) is distributed.distributed_c10d._get_default_group()


def test_a_device_that_no_backend_is_for_is_named(without_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"init_process_group\(backend=\) is without one for weights on {}, .*init_process_group\(\) without backend="
    with pytest.raises(errors.UsageError, match=message.format("xpu")):
        agree.group_of(torch.device("xpu"))
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    with pytest.raises(errors.UsageError, match=message.format("cpu")):
        agree.group_of(torch.device("cpu"))
