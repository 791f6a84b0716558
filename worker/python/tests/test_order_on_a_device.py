"""Every access to a device's memory is right under any legal order of asynchronous work, and needs each of its waits."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import accelerator
import pytest
import torch
from accelerator import Immediate, Layers, Loss, Simulated, ended, same
from torch import Tensor
from units import weight_bytes

import longshore
from longshore.optimizer import step as streaming
from longshore.transfer import device as _device
from longshore.transfer import gradients, weights

STEPS = 5
#: Soak tests draw more orders.
SEEDS = 8 if os.environ.get("LONGSHORE_SOAK") else 4


@contextlib.contextmanager
def on(device: Simulated) -> Iterator[pytest.MonkeyPatch]:
    """In the block the package uses the simulated accelerator, and each gradient and each parameter's weights go alone."""
    with accelerator.on(device) as patch:
        patch.setattr(weights, "DEVICE_GROUP_BYTES", 0)
        patch.setattr(streaming, "ENOUGH_ON_DEVICE", 0)
        yield patch


def train(device: Simulated, is_held: bool = True, passes: int = 1, **options: Any) -> list[Tensor]:
    """Trains, with an evaluation before each step and no wait for it. Returns weights and evaluations."""
    model = Layers(device)
    unfreezes = options.get("frozen") == "train-later"
    matrices = [layer.weight.requires_grad_(not unfreezes) for layer in model.layers]
    given = {"missing_gradients": None if unfreezes else "zeros", **options}
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, accumulate=passes, **given)
    held = device.held if is_held else contextlib.nullcontext
    other = device.new_stream(torch.device("cpu"))
    results = []
    for step in range(STEPS):
        if step == 2:
            for weight in matrices:
                weight.requires_grad_(True)
        # Two streams read the weights. The caller orders them as torch requires: each waits for the other's writes.
        device.let_wait(other, device.record(device.main))
        with device.on(other), torch.no_grad():
            results.append(model(model.batch(step)))
        with held():
            for number in range(passes):
                model.loss(step * passes + number).backward()
            results.append(model.evaluate(step))
        device.let_wait(device.main, device.record(other))
        optimizer.step()
        optimizer.zero_grad()
    return ended(device, model, optimizer, results)


def train_in_buckets(device: Simulated, **options: Any) -> list[Tensor]:
    """Trains with gradients that leave together, two layers in a group, and weights that come together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "DEVICE_GROUP_BYTES", 1 << 20)
        patch.setattr(streaming, "ENOUGH_ON_DEVICE", 1000)
        return train(device, **options)


def train_on_two_streams(device: Simulated, is_at_once: bool = False, **options: Any) -> list[Tensor]:
    """Trains two layers, each on a stream of its own, and on a thread of its own with ``is_at_once``. Their gradients leave together. The
    caller's stream waits for the other one afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "ENOUGH_ON_DEVICE", 1 << 20)
        model = Layers(device, depth=2)
        optimizer = longshore.AdamW(model.layers.named_parameters(), lr=1e-2, streaming=True, **options)
        other = device.new_stream(torch.device("cpu"))

        def backward(layer: torch.nn.Module, stream: accelerator.Stream, step: int) -> None:
            with device.on(stream):
                Loss.apply(device, layer(model.batch(step)), model.batch(step, outputs=True)).backward()

        for step in range(STEPS):
            device.let_wait(other, device.record(device.main))
            with ThreadPoolExecutor(2) as pool:
                list((pool.map if is_at_once else map)(backward, model.layers, (device.main, other), (step, step)))
            optimizer.step()
            device.let_wait(device.main, device.record(other))
        return ended(device, model, optimizer, [])


def train_units(device: Simulated, part: float, frozen: int = 0, **options: Any) -> list[Tensor]:
    """Trains with a share of the model's bytes as budget, and with evaluations without waits: on another stream before and after forward,
    and after backward. Returns evaluations, weights, and the content of memory that units have released."""
    model = Layers(device, depth=7)
    model.layers[:frozen].requires_grad_(False)
    device.synchronize()
    optimizer = longshore.AdamW(
        model.named_parameters(), lr=1e-2, weight_decay=0.1, missing_gradients="zeros", streaming=True, **options
    )
    budget = int(part * weight_bytes(model))
    sharded = longshore.shard(model, optimizer, budget)
    other = device.new_stream(torch.device("cpu"))
    results = []
    for step in range(3):
        # The caller orders the streams as ordinary weights need it. A step writes the weights, and between two steps
        # streams only read them.
        device.let_wait(other, device.record(device.main))
        first = (device.main, other)[step % 2]
        with device.on(first):
            for _ in range(2):
                model.part(step, slice(1))  # the prefetch then under way is given up
        sharded.release()
        with device.on(first):
            results.append(device.to_device(torch.full((model.width, model.width), float(step))))
        with device.on(other):
            results.append(model.evaluate(3 + step))
        loss = model.loss(step)
        with device.on(other):
            results.append(model.part(step, slice(-2, None)))
        loss.backward()
        if "delay" not in options:  # with a delay servers have newer weights by now
            results.append(model.evaluate(step))
        device.let_wait(device.main, device.record(other))
        optimizer.step()
    assert sharded.peak_weight_bytes <= budget
    return ended(device, model, optimizer, results)


#: For each mode, the function that trains, and its options. Budgets of units have room for one, some or all units,
#: beside gradients.
MODES: dict[str, tuple[Callable[..., list[Tensor]], dict[str, Any]]] = {
    "streaming": (train, {"streaming": True}),
    "two passes": (train, {"streaming": True, "passes": 2, "is_held": False}),
    "whole": (train, {"streaming": True, "layerwise": False}),
    "unfreezing": (train, {"streaming": True, "frozen": "train-later"}),
    "safe": (train, {}),
    "delayed": (train, {"streaming": True, "delay": 1, "warmup_steps": 2}),
    "buckets": (train_in_buckets, {"streaming": True}),
    "buckets in two passes": (train_in_buckets, {"streaming": True, "passes": 2, "is_held": False}),
    "delayed buckets": (train_in_buckets, {"streaming": True, "delay": 1, "warmup_steps": 2}),
    "buckets over TCP": (train_in_buckets, {"streaming": True, "transport": "tcp"}),
    "two streams": (train_on_two_streams, {}),
    "two threads": (train_on_two_streams, {"is_at_once": True}),
    "one unit": (train_units, {"part": 0.4}),
    "some units": (train_units, {"part": 0.7}),
    "all units": (train_units, {"part": 1.3}),
    "frozen units": (train_units, {"part": 0.7, "frozen": 3}),
    "delayed units": (train_units, {"part": 0.7, "delay": 1, "warmup_steps": 1}),
    "units over TCP": (train_units, {"part": 0.7, "transport": "tcp"}),
    "delayed units over TCP": (train_units, {"part": 0.7, "frozen": 3, "transport": "tcp", "delay": 1, "warmup_steps": 1}),
}


def run(device: Simulated, mode: str, act: Callable[[pytest.MonkeyPatch], None] = lambda patch: None, **more: Any) -> list[Tensor]:
    kind, options = MODES[mode]
    with on(device) as patch:
        act(patch)
        return kind(device, **{**options, **more})


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Tensor]]:
    """Returns each mode's results without delays: in host memory, or in units on a device."""
    return {
        mode: train(Immediate(0), **{**options, "is_held": False}) if kind in (train, train_in_buckets) else run(Immediate(0), mode)
        for mode, (kind, options) in MODES.items()
    }


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("mode", MODES)
def test_any_legal_order_gives_the_same_bits(mode: str, seed: int, expected: dict[str, list[Tensor]]) -> None:
    assert all(result.isfinite().all() for result in expected[mode])
    assert same(run(Simulated(seed), mode), expected[mode]), f"seed {seed}"


class Watchful(Simulated):
    """Counts the waits of the training thread."""

    waits = 0

    def wait(self, event: Any) -> None:
        self.waits += threading.current_thread() is threading.main_thread()
        super().wait(event)


def test_backward_never_waits_for_the_device() -> None:
    device = Watchful(0)
    with on(device):
        model = Layers(device)
        optimizer = longshore.AdamW(model.named_parameters(), streaming=True, missing_gradients="zeros")
        for step in range(3):
            loss = model.loss(step)
            waits = device.waits
            with device.held():  # so that no copy ends before backward does
                loss.backward()
            assert device.waits == waits
            optimizer.step()
        assert optimizer.version == 3
        optimizer.close()


def drop_gradients(patch: pytest.MonkeyPatch) -> None:
    """A gradient goes back to its allocator during its copy."""
    begin_copies = gradients.Group.begin_copies

    def forgetful(self: Any, *given: Any) -> None:
        begin_copies(self, *given)
        self.staged.clear()

    patch.setattr(gradients.Group, "begin_copies", forgetful)


def overwrite_staging(patch: pytest.MonkeyPatch) -> None:
    """The next pass copies into memory before the last pass's push from it."""
    patch.setattr(gradients.Pusher, "wait_for", lambda self, param: None)


def pack_for_this_thread(patch: pytest.MonkeyPatch) -> None:
    """Packed gradients and weights lie in memory of this thread's stream, not of the copies'."""
    empty = Simulated.empty
    patch.setattr(Simulated, "empty", lambda self, shape, dtype, device=None, stream=None: empty(self, shape, dtype, device))


def note_first_stream_only(patch: pytest.MonkeyPatch) -> None:
    """The copies of a group wait for the stream of its first gradient alone."""
    note = gradients.Gradients.note_stream
    patch.setattr(gradients.Gradients, "note_stream", lambda self, gradient: self.group.streams or note(self, gradient))


def show_first_user_only(patch: pytest.MonkeyPatch) -> None:
    """The first stream that uses weights waits for them, and the stream that called ``step`` does not."""

    def show(self: Any, device: torch.device) -> None:
        accelerator = _device.accelerator
        accelerator.let_wait(accelerator.current_stream(device), accelerator.record(self._streams[device]))

    patch.setattr(weights.Weights, "_show", show)


#: For each wait, the call that is dropped, and a mode in which wrong results show that.
WITHOUT: dict[str, tuple[str | Callable[[pytest.MonkeyPatch], None], str]] = {
    "the copy out waits for the gradient": ("begin_copies.let_wait", "streaming"),
    "the push waits for the gradient, or for the copy out": ("push.wait", "streaming"),
    "the copy in waits for those who had its memory": ("_copy.let_wait", "some units"),
    "those who use a unit wait for the copy in": ("finish.let_wait", "some units"),
    "packed memory belongs to the copies' stream": (pack_for_this_thread, "buckets"),
    "the copy out waits for each stream of a group": (note_first_stream_only, "two streams"),
    "the push waits for the copy to where it leaves from": ("_copy.wait", "streaming"),
    "the push waits for the gradient, or for the copy out, in step": ("push.wait", "safe"),
    "the copy in waits for those who read older weights": ("_ordered.let_wait", "streaming"),
    "the end of a step waits for copies out of a server's memory": ("finish.wait", "delayed"),
    "those who read weights wait for the copy in": ("_show.let_wait", "streaming"),
    "staging memory waits for the copy in before": ("_free.wait", "streaming"),
    "the gradient is kept until it is copied": (drop_gradients, "streaming"),
    "staging memory is kept until it is pushed": (overwrite_staging, "two passes"),
    "the stream of step waits, too": (show_first_user_only, "streaming"),
    "memory of what is given up waits for its copy in": ("give_up.let_wait", "some units"),
    "a fetcher's staging memory waits for the copy in before": ("take.wait", "units over TCP"),
    "another stream that uses a unit waits for its copy in": ("use.let_wait", "all units"),
    "memory waits for other streams that use what was in it": ("leave.let_wait", "some units"),
    "the copy out of a unit's gradient waits for it": ("begin_copies.let_wait", "some units"),
    "the push waits for the copy out of a unit's gradient": ("push.wait", "some units"),
}


@pytest.mark.filterwarnings("ignore:step")  # unwritten memory makes the gradient non-finite
@pytest.mark.parametrize("left_out", [*WITHOUT] if os.environ.get("LONGSHORE_SOAK") else [*WITHOUT][:5])
def test_each_wait_is_needed(left_out: str, expected: dict[str, list[Tensor]]) -> None:
    what, mode = WITHOUT[left_out]
    # Without waits, the host can be both passes ahead of the device. A push without its wait for the gradient then
    # waits for a copy while it holds the job. The host needs the job, so such a case runs without holding the device.
    # Written weights are dropped, because the check for them would find wrong weights before their use.
    more = {"is_held": what != "push.wait", "written_weights": "drop"} if MODES[mode][0] in (train, train_in_buckets) else {}

    def is_wrong(seed: int) -> bool:
        if isinstance(what, str):
            return not same(run(Simulated(seed, ignored=what), mode, **more), expected[mode])
        return not same(run(Simulated(seed), mode, what, **more), expected[mode])

    assert any(map(is_wrong, range(16)))
