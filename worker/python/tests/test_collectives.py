"""Waits for collectives, ranks' messages in the process group's store, and weights that ranks gather, in one process: what needs no other
rank."""

import ctypes
import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn

from longshore import errors
from longshore.distributed import collectives
from longshore.distributed.ranks import Reduced, gather_frozen
from longshore.transfer.params import DTYPES, Param

CPU = torch.device("cpu")


class Work:
    """A collective whose first wait gives up just before its end."""

    def __init__(self, failure: str | None) -> None:
        self._failure = failure
        self.waits = 0

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def group(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_failed", "_failed_in"):
        monkeypatch.setattr(collectives, name, None)


def test_what_ends_just_after_a_look_has_not_failed(group: None) -> None:
    work = Work(None)
    collectives.wait(work, "weights")
    assert work.waits == 2
    with pytest.raises(errors.WaitError, match=r"waited for weights, and another rank has ended.*Connection closed"):
        collectives.wait(Work("Connection closed by peer"), "weights")


def test_a_process_group_whose_collectives_are_out_of_step_is_refused(group: None) -> None:
    for error in (collectives.known(MemoryError("that all ranks know")), MemoryError("of all ranks")):
        collectives.begin()
        with pytest.raises(MemoryError), collectives.telling():
            raise error
    collectives.begin()
    with pytest.raises(MemoryError), collectives.telling():
        raise MemoryError("no memory")
    with pytest.raises(errors.LongshoreError, match="no memory"):
        collectives._raise_failure()  # as a rank does that waits for this one
    for _ in range(2):
        with pytest.raises(errors.UsageError, match="rank 0 has failed in the midst of.*no memory"):
            collectives.begin()
    distributed.destroy_process_group()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    collectives.begin()
    collectives.refuse()


def test_what_ranks_said_before_torchrun_started_them_again_is_not_heard(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    collectives.begin()
    distributed.distributed_c10d._get_default_store().set(collectives._key(), '[0, ["MemoryError", "no memory", null]]')
    with pytest.raises(errors.LongshoreError, match="rank 0 failed, so that no rank can go on: no memory"):
        collectives._raise_failure()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    collectives._raise_failure()
    # Agents of several hosts may count restarts differently, so the key does not contain the count there.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert collectives.key("x") == "longshore/0/x"


@pytest.fixture
def without_the_cpu() -> Iterator[None]:
    """A process group without a backend for CPU tensors, as with nccl alone."""
    distributed.init_process_group("cuda:gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        distributed.all_reduce(torch.zeros(1))
    yield
    distributed.destroy_process_group()


class Stub:
    """A job whose weights are 0, 1, 2, ..."""

    def fetch(self, version: int, places: list[tuple[Any, int]]) -> "Stub":
        self.read_weights([place for place, _ in places])
        return self

    def read(self) -> None:
        pass

    def read_weights(self, places: list[tuple[int, int, int, str]]) -> None:
        for _, address, elements, _ in places:
            weights = torch.arange(elements, dtype=torch.float32)
            ctypes.memmove(address, weights.data_ptr(), weights.nbytes)


def test_weights_of_the_host_are_gathered_where_the_group_is_of_devices(without_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks would exchange their findings through the device, which this host does not have.
    monkeypatch.setattr(collectives, "together", lambda act: [act()])
    tensor = nn.Parameter(torch.zeros(64 * 1024))  # enough elements for a collective
    param = Param(0, "base", 0, tensor, tensor.shape, tensor.dtype, DTYPES[tensor.dtype], tensor.numel())
    [(_, frozen)] = gather_frozen(Stub(), 0, [param], 0, 1)
    Reduced([param]).read(Stub())
    for found in (frozen, tensor.detach()):
        assert torch.equal(found, torch.arange(len(tensor), dtype=torch.float32))
    assert collectives.group_of(CPU) is collectives.group_of(CPU), "one group for all of them"
    assert collectives.group_of(torch.device("cuda")) is distributed.distributed_c10d._get_default_group()


def test_a_device_that_no_backend_is_for_is_named(without_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    for device in ("xpu", "cpu"):
        message = rf"init_process_group\(backend=\) is without one for weights on {device}, .*init_process_group\(\) without backend="
        with pytest.raises(errors.UsageError, match=message):
            collectives.group_of(torch.device(device))
