"""Weights that a worker amends on its device have the bits of those that it amends on its host."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerator import Immediate, Layers, Linear, Loss, Simulated
from test_order_on_a_device import on, same
from torch import Tensor

import longshore
from longshore import _amend, _amending
from longshore._coming import Coming

STEPS = 10
#: The steps whose gradient is not finite.
SKIPPED = (3, 4, 6, 7)
LOCAL: dict[str, Any] = {"delay": 1, "warmup_steps": 2, "correction": "worker-local", "missing_gradients": "zeros"}


class Skipping(Layers):
    """Layers whose gradient overflows in some steps, and the head has one in every other step alone."""

    def loss(self, step: int) -> Tensor:
        hidden = self(self.batch(step))
        if step % 2:
            hidden = Linear.apply(self.device, hidden, self.head, self.head_bias)
        return Loss.apply(self.device, hidden, self.batch(step, outputs=True))

    def batch(self, step: int, outputs: bool = False) -> Tensor:
        made = super().batch(step, outputs)
        if outputs and step in SKIPPED:
            out = self.device.alias(made)
            self.device.give(self.device.main, lambda: out.fill_(float("inf")))
        return made


def groups(model: Layers) -> list[dict[str, Any]]:
    """Two, whose limits and rates differ."""
    named = list(model.named_parameters())
    return [
        {"params": [item for item in named if "weights" in item[0]], "lr": 3e-2, "betas": (0.8, 0.99)},
        {"params": [item for item in named if "weights" not in item[0]], "lr": 1e-2, "weight_decay": 0.2},
    ]


def train(device: Simulated, dtype: torch.dtype, flushed: tuple[int, ...] = (), **options: Any) -> list[Tensor]:
    """The weights that each step computes with, and the last ones."""
    model = Skipping(device, dtype=dtype)
    optimizer = longshore.AdamW(groups(model), **{**LOCAL, **options})
    results = []
    for step in range(STEPS):
        model.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in flushed:
            optimizer.flush()
        for parameter in [*model.weights, *model.biases]:  # nobody looks at the head
            copied = device.empty(parameter.shape, parameter.dtype)
            device.copy(copied, parameter.detach(), device.current_stream(parameter.device))
            results.append(copied)
    optimizer.flush()
    results.extend(model.parameters())
    device.synchronize()
    with torch.no_grad():
        found = [device.alias(result).clone() for result in results]
    optimizer.close()
    return found


KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"streaming": True}),
    "bf16, clipped": (torch.bfloat16, {"streaming": True, "max_grad_norm": 0.05}),
    "bf16, safe": (torch.bfloat16, {"correction": "worker-local=1.5"}),
    "fp16, scaled": (torch.float16, {"streaming": True, "loss_scale": longshore.LossScale(initial=1024.0, hysteresis=1)}),
    "16 bits of fp32": (torch.float32, {"streaming": True, "image_dtype": "bf16", "gradient_dtype": "fp16"}),
    "32 bits of bf16": (torch.bfloat16, {"image_dtype": "fp32", "gradient_dtype": "fp32", "max_grad_norm": 0.1}),
    "drained": (torch.bfloat16, {"streaming": True, "flushed": (2, 5)}),
}


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_gives_the_bits_of_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, options = KINDS[kind]
    amended = []

    def amend(*given: Any, **named: Any) -> None:
        amended.append(named["step"])
        whole(*given, **named)

    whole = _amend.amend
    monkeypatch.setattr(_amend, "amend", amend)
    expected = train(Immediate(0), dtype, **options)
    assert all(result.isfinite().all() for result in expected)
    assert not amended
    for seed in range(4):
        device = Simulated(seed)
        with on(device, monkeypatch):
            assert same(train(device, dtype, **options), expected), f"seed {seed}"
    assert any(amended)


@pytest.mark.parametrize("streaming", [False, True])
def test_images_come_to_the_device_before_the_decision(streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decision = _amending.Amending._decision
    come = []

    def decide(weights: Any) -> Any:
        """It comes once all copies have been given to the device."""
        coming = weights._coming
        if not weights._decided:
            with coming._changed:
                assert coming._changed.wait_for(lambda: len(coming._copied) == len(coming._groups), timeout=60)
            come.append(coming.version)
        return decision(weights)

    device = Simulated(0)
    with on(device, monkeypatch), monkeypatch.context() as patch:
        patch.setattr(_amending.Amending, "_decision", decide)
        model = Layers(device)
        optimizer = longshore.AdamW(model.named_parameters(), **{**LOCAL, "streaming": streaming})
        for step in range(6):
            loss = model.loss(step)
            assert step == 0 or not optimizer._connection._held.last, "gradients go once they have been used"
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    assert come == [1, 2, 3, 4, 5]


def test_it_goes_on_in_another_process(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that joins reads what a server has amended, and has no gradient."""

    def run(device: Simulated, ends: tuple[int, ...], **options: Any) -> list[Tensor]:
        model = Layers(device, dtype=torch.bfloat16)
        made = 0
        for end in ends:
            optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, **LOCAL, streaming=True, **options)
            for step in range(made, end):
                model.loss(step).backward()
                optimizer.step()
            made = end
            if end == ends[-1]:
                optimizer.flush()
                device.synchronize()
                results = [device.alias(parameter).clone() for parameter in model.parameters()]
            optimizer.close()
        return results

    expected = run(Immediate(0), (12,))
    for seed in range(4):
        device = Simulated(seed)
        with on(device, monkeypatch):
            found = run(device, (6, 9, 12), servers=servers, job=f"again-{seed}")
        assert same(found, expected), f"seed {seed}"


@pytest.mark.parametrize("what", ["amend", "copy"])
def test_what_fails_is_done_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a device has no memory left: an image that was amended in part comes again from the host."""
    calls = []

    def fails(*given: Any, **named: Any) -> Any:
        result = acts(*given, **named)
        if what == "amend" or given[1][0].name == "weights.1":
            calls.append(what)
            if len(calls) % 2:  # the second attempt succeeds
                raise RuntimeError("out of memory")
        return result

    where, name = (_amend, "amend") if what == "amend" else (_amending.Amending, "_give")
    acts, starts, retries = getattr(where, name), _amending.Amending._start, []

    def run(device: Simulated) -> tuple[list[Tensor], int]:
        model, failed = Layers(device), 0
        other = device.new_stream(torch.device("cpu"))
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, **LOCAL)
        for step in range(STEPS):
            while True:
                with contextlib.suppress(RuntimeError), device.on(other) if what == "copy" else contextlib.nullcontext():
                    loss = model.loss(step)
                    break
                failed += 1
            loss.backward()
            optimizer.step()
        optimizer.flush()
        results = [device.alias(parameter).clone() for parameter in model.parameters()]
        optimizer.close()
        return results, failed

    def start(weights: Any, *given: Any, **named: Any) -> bool:
        asked = dict(weights._before)
        started: bool = starts(weights, *given, **named)
        if named:
            retries.append(all(weights._before[device][0] is stream for device, (stream, _) in asked.items()))
        return started

    expected, _ = run(Immediate(0))
    device = Immediate(0)
    with on(device, monkeypatch), monkeypatch.context() as patch:
        patch.setattr(where, name, fails)
        patch.setattr(_amending.Amending, "_start", start)
        found, failed = run(device)
    assert len(calls) > 4 and (failed > 2 or what == "copy"), "a copy that failed may be given again before anybody waits for it"
    assert same(found, expected)
    assert all(retries) and (retries or what == "amend"), "the stream that asked for the weights stays that"


class Fetched:
    """An image that comes at once, on the thread of the images, where something is done then."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.read, self.cancelled = act, threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def test_garbage_collection_on_the_thread_of_the_images_waits_for_nothing() -> None:
    """It may end an optimizer there, and while another thread has the lock and waits for that one."""
    ended, has_lock = threading.Event(), threading.Event()
    weights = object.__new__(_amending.Amending)
    weights._lock = threading.RLock()

    def collect() -> None:
        assert has_lock.wait(60)
        weights.abandon()
        weights._coming.give_up()
        ended.set()

    fetched = Fetched(collect)
    with weights._lock:
        weights._coming = Coming(1, [(fetched, [])], lambda _: {})
        has_lock.set()
        assert ended.wait(60), "it waits for a lock or for itself"
    weights._coming.give_up()
    assert fetched.cancelled.is_set() and weights._coming.failure is None

    # Another thread may have the lock, too.
    taken, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        with weights._lock:
            taken.set()
            assert goes_on.wait(60)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert taken.wait(60)
    other = Fetched(lambda: None)
    weights._coming = Coming(2, [(other, [])], lambda _: {})
    abandoning = threading.Thread(target=weights.abandon, daemon=True)
    abandoning.start()
    abandoning.join(60)
    is_stuck = abandoning.is_alive()
    goes_on.set()
    holder.join(60)
    assert not is_stuck and other.cancelled.is_set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_any_layout_and_any_tile_gives_the_same(dtype: torch.dtype, is_contiguous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    image, gradient = made(7 * 5 * 3 * 3), made(7, 5, 3, 3)
    image[:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    gradient.view(-1)[2:5] = torch.tensor([0.0, float("inf"), float("nan")])
    rates = torch.rand(_amend.rates_of(len(image)), generator=generator)
    sent, step = _amend.Sent(torch.bfloat16, 0.25), _amend.Step(1.5, 0.375)
    multiplied = (gradient.float() * 0.25).bfloat16().float() * 1.5
    moved = rates.repeat_interleave(64)[: len(image)] * multiplied.view(-1)
    expected = (image.float() - moved.clamp(-0.375, 0.375)).to(dtype)
    target = torch.empty(7, 5, 3, 3, dtype=dtype)
    if not is_contiguous:
        target, gradient = (tensor.to(memory_format=torch.channels_last) for tensor in (target, gradient))
    monkeypatch.setattr(_amend, "TILE", 128)
    _amend.amend(target, image, rates, gradient, sent, step)
    assert torch.equal(target.reshape(-1).nan_to_num(7.0), expected.nan_to_num(7.0))
    if is_contiguous:
        _amend.amend(image, image, rates, gradient, sent, step)
        assert torch.equal(image.nan_to_num(7.0), expected.nan_to_num(7.0))
    nothing = torch.ones(70, dtype=dtype)
    _amend.amend(target := torch.empty(70, dtype=dtype), nothing, torch.ones(2), None, sent, step)
    assert torch.equal(target, nothing)
    _amend.amend(target := torch.empty(70, dtype=dtype), nothing, torch.ones(2), torch.ones(70), sent, None)
    assert torch.equal(target, nothing)
