"""Weights in servers' memory: their places, the time for which they are valid, and registration with a device."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from accelerator import Layers, Simulated
from models import Mlp
from test_order_on_a_device import on
from torch import Tensor

import longshore
from longshore import errors
from longshore.transfer import device as _device
from longshore.transfer import pinned
from longshore.transfer.pinned import Lending, Registered


def step(model: Mlp, optimizer: longshore.AdamW, number: int) -> None:
    model.loss(number).backward()
    optimizer.step()
    optimizer.zero_grad()


def lent(optimizer: longshore.AdamW, indices: list[int]) -> Any:
    connection = optimizer._connection
    assert connection is not None
    return connection.job.lent_weights(indices)


def at(runs: list[tuple[int, int, int]]) -> bytes:
    """Returns the memory's content, element after element."""
    expected = 0
    found = b""
    for address, first, elements in runs:
        assert first == expected
        expected += elements
        found += ctypes.string_at(address, 4 * elements)
    return found


def test_weights_lie_where_the_job_says_until_they_are_overwritten() -> None:
    torch.manual_seed(0)
    # A weight that lies in several shards.
    model = Mlp(width=600)
    optimizer = longshore.AdamW(model.named_parameters(), streaming=True, lr=1e-2)
    step(model, optimizer, 0)
    params = list(model.parameters())
    weights = lent(optimizer, list(range(len(params))))
    assert [at(runs) for runs in weights.runs()] == [parameter.detach().numpy().tobytes() for parameter in params]
    weights.check()
    step(model, optimizer, 1)
    weights.check()
    step(model, optimizer, 2)
    optimizer.flush()
    with pytest.raises(errors.LongshoreError, match="kept by its server"):
        weights.check()
    optimizer.close()


def test_other_weights_lie_nowhere() -> None:
    """Weights over a network, and weights already read."""
    for transport, expects in (("tcp", False), ("memfd", True)):
        model = Mlp()
        optimizer = longshore.AdamW(model.named_parameters(), streaming=True, transport=transport)
        step(model, optimizer, 0)
        weights = lent(optimizer, [0])
        assert (weights.runs() is not None) == expects
        with pytest.raises(errors.InvalidError, match="tensor is 99, but must be below 8 parameters"):
            lent(optimizer, [99])
        optimizer.flush()
        [parameter.sum() for parameter in model.parameters()]
        assert lent(optimizer, [0]) is None
        optimizer.close()


@dataclass
class Memory:
    address: int
    nbytes: int


@dataclass
class Listed:
    """Records registrations and waits."""

    limit: int = 9
    notes: list[Any] = field(default_factory=list)
    events: int = 0

    def has(self, tensor: Tensor) -> bool:
        return True

    def register(self, address: int, nbytes: int, device: torch.device, *, read_only: bool = False) -> None:
        if sum(note == "register" for note, _ in self.notes) == self.limit:
            raise _device.NotRegistered("no more")
        self.notes.append(("register", (address, nbytes, read_only)))

    def unregister(self, address: int, device: torch.device) -> None:
        self.notes.append(("unregister", address))

    def wait(self, event: Any) -> None:
        self.notes.append(("wait", event))

    def stream(self, device: torch.device) -> str:
        return str(device)

    def record(self, stream: str) -> int:
        self.notes.append(("record", stream))
        self.events += 1
        return self.events

    def locked(self, shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor, stream: str) -> None:
        self.notes.append(("copy", (source.data_ptr(), source.numel())))
        if self.limit == 0:  # the source is there
            target.copy_(source)


@dataclass
class Found:
    """The Rust half's description of weights."""

    checks: int = 0

    def check(self) -> None:
        self.checks += 1


@dataclass
class Job:
    memories: list[Memory]

    def image_memory(self) -> list[Memory]:
        return self.memories


def test_memory_of_a_server_that_is_gone_is_let_go_of_after_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    device, found = Listed(), Found()
    monkeypatch.setattr(_device, "accelerator", device)
    job = Job([Memory(4096, 8192), Memory(65536, 4096)])
    lending, target = Lending(job, torch.float32), torch.zeros(1040)
    assert lending.fits(target)
    lending.copy(found, [[(4096, 0, 1024), (65536, 1024, 16)]], [target], device.stream)
    copies = [("copy", (4096, 1024)), ("copy", (65536, 16))]
    registered = [("register", (4096, 8192, True)), ("register", (65536, 4096, True))]
    assert device.notes == [*registered, *copies, ("record", "cpu")]
    device.notes.clear()
    # The first server was restarted.
    job.memories = [Memory(1 << 20, 8192), job.memories[1]]
    lending.copy(found, [[(1 << 20, 0, 1024)]], [target], device.stream)
    assert device.notes[:3] == [("wait", 1), ("unregister", 4096), ("register", (1 << 20, 8192, True))]
    assert found.checks == 1
    device.notes.clear()
    lending.release()
    assert device.notes[0] == ("wait", 2)
    assert sorted(device.notes[1:]) == [("unregister", 65536), ("unregister", 1 << 20)]
    assert not lending.fits(target)


def test_what_cannot_be_registered_is_copied_on_the_host_first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device, there = Listed(limit=0), torch.arange(16.0)
    monkeypatch.setattr(_device, "accelerator", device)
    lending, target = Lending(Job([Memory(there.data_ptr(), 64)]), torch.float32), torch.zeros(16)
    lending.copy(Found(), [[(there.data_ptr(), 0, 16)]], [target], device.stream)
    assert torch.equal(target, there)
    assert device.notes[0][0] == "copy" and device.notes[0][1] != (there.data_ptr(), 16)
    assert not lending.fits(target), "nobody tries again"
    (record,) = caplog.records
    assert "weights come through torch's page-locked memory" in record.getMessage()
    lending.release()
    assert device.notes[-1] == ("wait", 1)


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "accelerator", Listed())
    lending = Lending(Job([]), torch.bfloat16)
    weights = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert [lending.fits(tensor) for tensor in (weights, weights.float(), weights.T[1:])] == [True, False, False]


def test_pieces_are_found_to_their_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Listed()
    monkeypatch.setattr(_device, "accelerator", device)
    pieces = Registered()
    for address in (8192, 4096 * 8):
        pieces.add(address, 4096, torch.device("cpu"), None)
    assert pieces.finds(8192, 4096) and pieces.finds(12287, 1) and pieces.finds(4096 * 8, 1)
    assert not any(pieces.finds(*place) for place in ((8191, 2), (8192, 4097), (12288, 1), (0, 1)))
    pieces.remove(8192)
    assert pieces.starts() == [4096 * 8] and not pieces.finds(8192, 1)
    del pieces
    assert [note for note in device.notes if note[0] == "unregister"] == [("unregister", 8192), ("unregister", 4096 * 8)]


def test_a_server_that_overwrites_what_a_device_still_copies_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Simulated(0)
    with on(device, monkeypatch):
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

        # Copies from now on come too late.
        connection.weights._lending.copy(Gone(), [], [], lambda device: device)
        with pytest.raises(errors.LongshoreError, match="overwritten"):
            optimizer.step()
        optimizer.close()


class Calls:
    """A job that records pushes."""

    def __init__(self, job: Any, notes: list[str]) -> None:
        self._job, self._notes = job, notes

    def __getattr__(self, name: str) -> Any:
        if name in ("push_together", "push", "push_zeros", "commit"):
            self._notes.append(name)
        return getattr(self._job, name)


@pytest.mark.parametrize(("streaming", "everything"), [(True, True), (True, False), (False, True), (False, False)])
def test_copies_end_before_the_last_gradient_leaves(streaming: bool, everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may then have the step decided, and a server overwrites the weights that a delayed step read."""
    device = Simulated(0)
    with on(device, monkeypatch):
        model = Layers(device)
        named = dict(model.named_parameters())
        used = named if not everything else {name: value for name, value in named.items() if "head" not in name}
        options: dict[str, Any] = {} if everything else {"missing_gradients": "zeros"}
        optimizer = longshore.AdamW(used.items(), streaming=streaming, **options)
        model.loss(0).backward()
        optimizer.step()
        optimizer.zero_grad()
        connection: Any = optimizer._connection
        notes: list[str] = []
        finish = connection.weights._lending.finish
        monkeypatch.setattr(connection.weights._lending, "finish", lambda: (notes.append("finish"), finish()))
        connection.job = Calls(connection.job, notes)
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


def test_copies_that_end_no_step_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, found = Listed(), Found()
    monkeypatch.setattr(_device, "accelerator", device)
    monkeypatch.setattr(pinned, "_MOST", 3)
    lending = Lending(Job([Memory(4096, 8192)]), torch.float32)
    for _ in range(9):
        lending.copy(found, [[(4096, 0, 4)]], [torch.zeros(4)], device.stream)
    assert found.checks == 8 and len(lending._lent) == 1
    lending.release()
