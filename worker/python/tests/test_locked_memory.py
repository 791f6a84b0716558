"""Copies between a device and memory that is shared with servers, where the device can page-lock that: gradients go where they leave from,
and weights come from where servers keep them. Otherwise copies go through torch's page-locked memory."""

import gc
import logging
from pathlib import Path
from typing import Any

import accelerator
import pytest
import torch
from accelerator import Immediate, Layers, Simulated, same
from conftest import Server
from models import Recorded
from test_order_on_a_device import on
from torch import Tensor

import longshore
from longshore import errors
from longshore.transfer import device as _device
from longshore.transfer import pinned

#: Width of the model. A weight has WIDTH ** 2 elements, more than a shard.
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


@pytest.mark.parametrize("most", [1024, 1])
def test_gradients_and_weights_go_straight_between_the_device_and_servers(most: int, expected: list[Tensor]) -> None:
    """With ``most`` of 1, a further copy waits for the copies under way."""
    device = Simulated(0)
    with on(device) as patch:
        patch.setattr(pinned, "_MOST", most)
        assert same(train(device), expected)
        assert device.copies["to torch's"] == 0
        # Four parameters have a gradient, and each of the two weights lies in two shards. A bias may share a copy with
        # a neighbour.
        assert 2 * STEPS * 4 <= device.copies["to registered"] <= 2 * STEPS * (4 + 1 + 1)
        assert (device.copies["from registered"] > 0, device.copies["from torch's"]) == (True, 0)
        assert device.registered == {}, "the memory is unregistered when the optimizer is closed"


@pytest.mark.parametrize(("transport", "memory"), [("memfd", "registered"), ("tcp", "torch's")])
def test_small_tensors_share_one_copy_each_way(transport: str, memory: str) -> None:
    device = Simulated(0)
    with accelerator.on(device):
        model = Layers(device, width=64, depth=8)  # without padding between parameters
        optimizer = longshore.AdamW(model.layers.named_parameters(), transport=transport, streaming=True)
        for step in range(STEPS):
            model.loss(step).backward()
            optimizer.step()
        optimizer.flush()
        assert dict(device.copies) == {f"to {memory}": STEPS, f"from {memory}": STEPS}
        optimizer.close()


@pytest.mark.parametrize("limit", [0, 1])
def test_where_memory_cannot_be_locked_both_go_as_before(limit: int, expected: list[Tensor], caplog: pytest.LogCaptureFixture) -> None:
    class Limited(Simulated):
        """Page-locks at most this many pieces."""

        def register(self, address: int, nbytes: int, device: torch.device, *, read_only: bool = False) -> None:
            if read_only or len(self.registered or {}) == limit:
                raise _device.NotRegistered("it may lock no more: raise the limit")
            super().register(address, nbytes, device)

    device = Limited(0)
    with on(device), caplog.at_level(logging.WARNING, "longshore"):
        assert same(train(device), expected)
    assert device.copies["to torch's"] > 0 and device.copies["from torch's"] > 0
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"{way} through torch's page-locked memory, with one more copy on the host: it may lock no more: raise the limit"
        for way in ("gradients go", "weights come")
    ]
    assert device.registered == {}


def test_an_optimizer_that_is_gone_leaves_nothing_registered() -> None:
    device = Simulated(0)
    with on(device):
        train(device, is_closed=False)
        gc.collect()
        assert device.copies["to registered"] > 0
        assert device.registered == {}


@pytest.mark.parametrize(
    ("options", "goes"),
    [
        ({"gradient_dtype": "bf16"}, "from"),
        ({"accumulate_on": "worker"}, "from"),
        ({"image_dtype": "bf16"}, "to"),
        ({"transport": "tcp"}, None),
    ],
    ids=str,
)
def test_what_the_host_converts_or_nobody_may_read_goes_as_before(options: dict[str, Any], goes: str | None) -> None:
    found = []
    for device in (Simulated(0), Simulated(4)):
        with on(device):
            found.append(train(device, **options))
            straight = {way for way in ("to", "from") if device.copies[f"{way} registered"]}
            assert straight == ({goes} if goes is not None and device.registered is not None else set())
    assert same(*found)


def test_a_gradient_that_the_device_could_not_copy_makes_no_step() -> None:
    class Lost(Simulated):
        def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
            if self.copies["to registered"] == 2:
                raise RuntimeError("the device is lost")
            super().copy(target, source, stream)

    device = Lost(0)
    with on(device):
        model = Layers(device)
        optimizer = longshore.AdamW(model.named_parameters(), missing_gradients="zeros")
        model.loss(0).backward()
        with pytest.raises(RuntimeError, match="the device is lost"):
            optimizer.step()
        with pytest.raises(errors.UsageError, match="the last step was interrupted"):
            optimizer.step()
        optimizer.close()
        assert device.registered == {}


def test_memory_of_a_server_that_was_restarted_is_let_go_of(tmp_path: Path) -> None:
    device = Simulated(0)
    with Server("--state-dir", str(tmp_path)) as server, on(device):
        model = Layers(device)
        options = {"servers": server.address, "job": "restarted", "tier": "nvme", "missing_gradients": "zeros"}
        optimizer = longshore.AdamW(model.named_parameters(), streaming=True, **options)
        registered: list[set[int]] = []
        for step in range(6):
            if step == 3:
                server.start_again()
            model.loss(step).backward()
            optimizer.step()
            assert device.registered is not None
            registered.append(set(device.registered))
        optimizer.close()
        assert device.registered == {}
    assert device.copies["from registered"] > 0
    assert registered[2] - registered[5] and registered[5] - registered[2]


def test_a_server_that_overwrites_what_a_device_still_copies_fails_the_step() -> None:
    device = Simulated(0)
    with on(device):
        model = Layers(device)
        optimizer = longshore.AdamW(model.named_parameters(), streaming=True, missing_gradients="zeros")
        for number in range(2):
            model.loss(number).backward()
            optimizer.step()
        connection: Any = optimizer._connection
        model.loss(2).backward()

        class Gone:
            def check(self) -> None:
                raise errors.LongshoreError("overwritten")

        # From now on, copies come too late: their memory counts as overwritten.
        connection.weights.lending.copy(Gone(), [], [], {})
        with pytest.raises(errors.LongshoreError, match="overwritten"):
            optimizer.step()
        optimizer.close()


@pytest.mark.parametrize(("streaming", "everything"), [(True, True), (True, False), (False, True), (False, False)])
def test_copies_end_before_the_last_gradient_leaves(streaming: bool, everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may then have the step decided, and a server overwrites the weights that a delayed step read."""
    device = Simulated(0)
    with on(device):
        model = Layers(device)
        used = (model.layers if everything else model).named_parameters()
        options: dict[str, Any] = {} if everything else {"missing_gradients": "zeros"}
        optimizer = longshore.AdamW(used, streaming=streaming, **options)
        model.loss(0).backward()
        optimizer.step()
        optimizer.zero_grad()
        connection: Any = optimizer._connection
        notes: list[str] = []
        finish = connection.weights.lending.finish
        monkeypatch.setattr(connection.weights.lending, "finish", lambda: (notes.append("finish"), finish()))
        called = ("push_together", "push", "push_zeros", "commit")
        connection.job = Recorded(connection.job, lambda name, *_: notes.append(name) if name in called else None)
        if optimizer._stream is not None and optimizer._stream._pusher is not None:
            optimizer._stream._pusher._job = connection.job
        model.loss(1).backward()
        optimizer.step()
        leaving = [note for note in notes if note != "commit"]
        last = max(place for place, note in enumerate(leaving) if note.startswith("push"))
        assert leaving[last] == ("push_together" if everything else "push_zeros")
        if streaming:
            assert leaving[last - 1] == "finish"
        else:
            assert leaving[0] == "finish", "it is all pushed at once"
        assert notes[-2:] == ["finish", "commit"], "what was read since then has come, too"
        optimizer.close()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_device_that_is_not_there_registers_nothing(device: str) -> None:
    if device != "cpu" and torch.cuda.is_available():
        pytest.skip("the device is there")
    with pytest.raises(_device.NotRegistered, match="CUDA or ROCm|torch cannot call cudaHostRegister"):
        _device.Accelerator().register(4096, 4096, torch.device(device))
