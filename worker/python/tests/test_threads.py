"""Backward passes of several threads at once in streaming mode, as of a model on several devices."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerator import Layers, Simulated, on
from models import same_bits
from torch import nn

import longshore
from longshore.transfer import tensors
from longshore.transfer.device import Accelerator


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Switches between threads at almost every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Towers(nn.ModuleList):
    """Two models without a common parameter. A tower sends several groups of gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)), nn.Linear(8, 20_000)) for _ in range(2))

    def backward(self, tower: int, batch: int) -> None:
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(batch))
        self[tower](inputs).square().mean().backward()


def at_once(*acts: Callable[[], None]) -> None:
    """Runs functions on threads that start together."""
    start = threading.Barrier(len(acts))

    def run(act: Callable[[], None]) -> None:
        start.wait()
        act()

    with ThreadPoolExecutor(len(acts), initializer=lambda: torch.set_num_threads(1)) as pool:
        for result in [pool.submit(run, act) for act in acts]:
            result.result()


def in_turn(*acts: Callable[[], None]) -> None:
    for act in acts:
        act()


def trained(run: Callable[..., None], accumulate: int) -> Towers:
    model = Towers()
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, accumulate=accumulate)
    for batch in range(20):
        for part in range(accumulate):
            run(*(lambda tower=tower: model.backward(tower, accumulate * batch + part) for tower in range(2)))
        optimizer.step()
    assert optimizer.flush() == 20
    optimizer.close()
    return model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_backwards_at_once_give_the_bits_of_one_after_the_other(accumulate: int) -> None:
    expected = trained(in_turn, accumulate)
    for _ in range(5):
        assert same_bits(expected, trained(at_once, accumulate))


def test_a_gradient_waits_for_the_thread_that_reads_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameter may be used before that thread has noted that the group has its weights."""
    model, end, started = Towers(), tensors.end, []
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True)

    def backward(batch: int) -> None:
        in_turn(*(lambda tower=tower: model.backward(tower, batch) for tower in range(2)))

    def paused(group: Any) -> None:
        end(group)
        if not started:
            started.append(pool.submit(backward, 1))
            wait(started, timeout=1)

    backward(0)
    optimizer.step()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(tensors, "end", paused)
        model[0][0].weight.data_ptr()
        started[0].result()
    optimizer.step()
    assert optimizer.flush() == 2
    optimizer.close()


class Within(torch.autograd.Function):
    """Runs something within a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.act()
        return (*gradients, None)


def test_flush_gives_up_a_backward_that_another_one_outlives() -> None:
    models = []
    for is_interrupted in (False, True):
        model = Towers()
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True)
        optimizer.open()
        if is_interrupted:
            hidden = Within.apply(model[0][:-1](torch.ones(4, 8)), lambda: (at_once(lambda: model.backward(1, 0)), interrupted()))
            with pytest.raises(KeyboardInterrupt):
                model[0][-1](hidden).sum().backward()
            optimizer.flush()
        in_turn(*(lambda tower=tower: model.backward(tower, 0) for tower in range(2)))
        optimizer.step()
        assert optimizer.flush() == 1
        optimizer.close()
        models.append(model)
    assert same_bits(*models)


def test_flush_gives_up_a_backward_whose_gradients_joined_those_of_another() -> None:
    models = []
    for is_interrupted in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True)
        optimizer.open()
        has_joined, may_end = threading.Event(), threading.Event()

        def backward(tower: int, act: Callable[[], None] = lambda: None) -> None:
            first, second = model[tower]
            second(Within.apply(first(torch.ones(2, 4)), act)).square().sum().backward()

        def joined() -> None:
            has_joined.set()
            may_end.wait()
            raise KeyboardInterrupt

        if is_interrupted:
            other = threading.Thread(target=lambda: pytest.raises(KeyboardInterrupt, backward, 1, joined))
            backward(0, lambda: (other.start(), has_joined.wait()))
            may_end.set()
            other.join()
            optimizer.flush()
        in_turn(lambda: backward(0), lambda: backward(1))
        optimizer.step()
        assert optimizer.flush() == 1
        optimizer.close()
        models.append(model)
    assert same_bits(*models)


def test_a_copy_leaves_the_current_device_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's ``set_stream`` changes the current device, and programs name devices as "cuda"."""
    other = SimpleNamespace(device=1)
    current: dict[Any, Any] = {"device": 0, 1: SimpleNamespace(device=1)}
    before = dict(current)

    def set_stream(stream: Any) -> None:
        current.update({"device": stream.device, stream.device: stream})

    calls = {
        "current_device_index": lambda: current["device"],
        "set_device_index": lambda index: current.update(device=index),
        "current_stream": current.__getitem__,
        "set_stream": set_stream,
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.accelerator, name, call)
    seen: list[Any] = []
    Accelerator().run(other, lambda: seen.append(dict(current)), [])
    with pytest.raises(KeyboardInterrupt):
        Accelerator().run(other, interrupted, [])
    assert seen == [{**before, "device": 1, 1: other}]
    assert current == before


def interrupted() -> None:
    raise KeyboardInterrupt


def test_a_model_on_several_devices_is_not_cut_into_units() -> None:
    device = Simulated(0)
    with on(device):
        model = Layers(device)
        model.layers[1].bias = nn.Parameter(torch.zeros(model.width))
        optimizer = longshore.AdamW(model.named_parameters(), streaming=True)
        with pytest.raises(longshore.errors.UsageError, match=r"layers\.1\.bias is on cpu.*as layers\.0\.weight: pass device="):
            longshore.shard(model, optimizer, "1GB")
        optimizer.close()
