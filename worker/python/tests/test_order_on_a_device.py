"""Every access to a device's memory is right under any legal order of asynchronous work, and needs each of its waits."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerator import Immediate, Layers, Simulated, same
from torch import Tensor

import longshore
from longshore import errors
from longshore.optim import step as streaming
from longshore.transfer import device as _device
from longshore.transfer import gradients, params, weights

STEPS = 5
#: Soak tests draw more orders.
SEEDS = 8 if os.environ.get("LONGSHORE_SOAK") else 4


@contextlib.contextmanager
def on(device: Simulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the block the package uses the simulated accelerator."""
    with monkeypatch.context() as patch:
        patch.setattr(_device, "accelerator", device)
        patch.setattr(weights, "GROUP_BYTES", 0)  # each parameter alone, and each gradient
        patch.setattr(streaming, "ENOUGH", 0)
        yield
        gc.collect()


def train(device: Simulated, is_held: bool = True, passes: int = 1, **options: Any) -> list[Tensor]:
    """Trains, with an evaluation before each step and no wait for it. Returns weights and evaluations."""
    model = Layers(device)
    unfreezes = options.get("frozen") == "train-later"
    model.weights.requires_grad_(not unfreezes)
    given = {"missing_gradients": None if unfreezes else "zeros", **options}
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, accumulate=passes, **given)
    held = device.held if is_held else contextlib.nullcontext
    other = device.new_stream(torch.device("cpu"))
    results = []
    for step in range(STEPS):
        if step == 2:
            model.weights.requires_grad_(True)
        # Both streams read the weights. The caller orders them as torch requires: each waits for the other's writes.
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
    optimizer.flush()
    device.synchronize()
    results.extend(model.parameters())
    with torch.no_grad():
        found = [device.alias(result).clone() for result in results]
    optimizer.close()
    return found


MODES: dict[str, dict[str, Any]] = {
    "streaming": {"streaming": True},
    "two passes": {"streaming": True, "passes": 2, "is_held": False},
    "whole": {"streaming": True, "layerwise": False},
    "unfreezing": {"streaming": True, "frozen": "train-later"},
    "safe": {},
    "delayed": {"streaming": True, "delay": 1, "warmup_steps": 2},
}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Tensor]]:
    """Returns each mode's results in host memory without delays."""
    return {mode: train(Immediate(0), **{**options, "is_held": False}) for mode, options in MODES.items()}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("mode", MODES)
def test_any_legal_order_gives_the_same_bits(
    mode: str, seed: int, expected: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(result.isfinite().all() for result in expected[mode])
    device = Simulated(seed)
    with on(device, monkeypatch):
        assert same(train(device, **MODES[mode]), expected[mode]), f"seed {seed}"


class Watchful(Simulated):
    """Counts the waits of the training thread."""

    waits = 0

    def wait(self, event: Any) -> None:
        self.waits += threading.current_thread() is threading.main_thread()
        super().wait(event)


def test_backward_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Watchful(0)
    with on(device, monkeypatch):
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


def test_a_push_that_fails_in_the_background_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        """A job that refuses gradients."""

        def begin_step(self) -> None:
            pass

        def push(self, places: Any, scale: float) -> None:
            raise errors.GradientError("no room", field="gradient")

        def end_micro_step(self) -> None:
            raise AssertionError("it goes on after a failure")

    device = Simulated(0)
    with on(device, monkeypatch):
        gradient = device.to_device(torch.ones(4))
        param = params.table([{"params": [torch.nn.Parameter(gradient)]}])[0]
        pusher = gradients.Pusher(Refusing())
        collected = gradients.Gradients()
        collected.take(param, gradient)
        pusher.push(collected.leave())
        pusher.then(Refusing().end_micro_step)
        with pytest.raises(errors.GradientError, match="no room"):
            pusher.wait()
        done = threading.Event()
        pusher.then(done.set)
        pusher.wait()
        assert done.is_set()
        pusher.close()


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


def show_first_user_only(patch: pytest.MonkeyPatch) -> None:
    """The first stream that uses weights waits for them, and the stream that called ``step`` does not."""

    def show(self: Any, device: torch.device) -> None:
        accelerator = _device.accelerator
        accelerator.let_wait(accelerator.current_stream(device), accelerator.record(self._streams[device]))

    patch.setattr(weights.Weights, "_show", show)


#: The dropped wait, and a mode that shows it.
WITHOUT = {
    "the copy out waits for the gradient": ("begin_copies.let_wait", "streaming"),
    "the push waits for the gradient, or for the copy out": ("push.wait", "streaming"),
    "the push waits for the copy to where it leaves from": ("_copy.wait", "streaming"),
    "the push waits for the gradient, or for the copy out, in step": ("push.wait", "safe"),
    "the copy in waits for those who read older weights": ("_ordered.let_wait", "streaming"),
    "the end of a step waits for copies out of a server's memory": ("finish.wait", "delayed"),
    "those who read weights wait for the copy in": ("_show.let_wait", "streaming"),
    "staging memory waits for the copy in before": ("_free.wait", "streaming"),
    "the gradient is kept until it is copied": (drop_gradients, "streaming"),
    "staging memory is kept until it is pushed": (overwrite_staging, "two passes"),
    "the stream of step waits, too": (show_first_user_only, "streaming"),
}


@pytest.mark.filterwarnings("ignore:step")  # unwritten memory makes the gradient non-finite
@pytest.mark.parametrize("left_out", [*WITHOUT] if os.environ.get("LONGSHORE_SOAK") else [*WITHOUT][:2])
def test_each_wait_is_needed(
    left_out: str, expected: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    what, mode = WITHOUT[left_out]

    def is_wrong(seed: int) -> bool:
        device = Simulated(seed, ignored=what if isinstance(what, str) else None)
        with on(device, monkeypatch), monkeypatch.context() as patch:
            if not isinstance(what, str):
                what(patch)
            # A host without waits can be both passes ahead of the device. On a delayed device a push without its wait for the gradient
            # waits for the copy while it holds the job, which the host needs.
            is_held = what != "push.wait"
            # Wrong weights would otherwise be found before their use.
            options = {**MODES[mode], "is_held": is_held, "written_weights": "drop"}
            return not same(train(device, **options), expected[mode])

    assert any(map(is_wrong, range(8)))
