"""A model in units is right under any legal order of a device's work, and needs each of its waits."""

import gc
import os
from typing import Any

import pytest
import torch
from accelerator import same
from torch import Tensor
from units import weight_bytes
from units_on_a_device import Cut, ImmediateStorages, LateStorages, advance, ended, on

import longshore
from longshore.units import fetch

STEPS = 3
#: Soak tests draw more orders.
SEEDS = 4 if os.environ.get("LONGSHORE_SOAK") else 3
DEPTH = 7


def train(device: Any, part: float, **options: Any) -> list[Tensor]:
    """Trains with a share of the model's bytes as budget, and with evaluations without waits: on another stream before and after forward,
    and after backward. Returns evaluations, weights, and the content of memory that units have released."""
    model = Cut(device, DEPTH)
    device.synchronize()
    optimizer = longshore.AdamW(
        model.named_parameters(), lr=1e-2, weight_decay=0.1, missing_gradients="zeros", streaming=True, **options
    )
    sharded = longshore.shard(model, optimizer, int(part * weight_bytes(model)))
    other = device.new_stream(torch.device("cpu"))
    results = []
    for step in range(STEPS):
        # The caller orders the streams as plain weights require: the step writes them, and between two steps the streams only read.
        device.let_wait(other, device.record(device.main))
        first = (device.main, other)[step % 2]
        with device.on(first):
            for _ in range(2):
                model.part(step, slice(1))  # the prefetch then under way is given up
        sharded.release()
        with device.on(first):
            results.append(device.to_device(torch.full((model.width, model.width), float(step))))
        with device.on(other):
            results.append(model.evaluate(STEPS + step))
        loss = model.loss(step)
        with device.on(other):
            results.append(model.part(step, slice(-2, None)))
        loss.backward()
        if "delay" not in options:  # with a delay servers have newer weights by now
            results.append(model.evaluate(step))
        device.let_wait(device.main, device.record(other))
        optimizer.step()
    return ended(device, model, optimizer, results)


def run(device: Any, monkeypatch: pytest.MonkeyPatch, mode: str) -> list[Tensor]:
    with on(device, monkeypatch), monkeypatch.context() as patch:
        patch.setattr(fetch.Fetch, "advance", advance)
        found = train(device, **MODES[mode])
        gc.collect()
    return found


#: Budgets for one unit, for some and for all of them, beside gradients.
MODES: dict[str, dict[str, Any]] = {
    "one": {"part": 0.4},
    "some": {"part": 0.7},
    "all": {"part": 1.3},
    "delayed": {"part": 0.7, "delay": 1, "warmup_steps": 1},
    "over TCP": {"part": 0.7, "transport": "tcp"},
    "over TCP, delayed": {"part": 0.7, "transport": "tcp", "delay": 1, "warmup_steps": 1},
}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Tensor]]:
    """Returns each mode's results without delays."""
    with pytest.MonkeyPatch.context() as patch:
        return {mode: run(ImmediateStorages(0), patch, mode) for mode in MODES}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("mode", MODES)
def test_any_legal_order_gives_the_same_bits(
    mode: str, seed: int, expected: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(result.isfinite().all() for result in expected[mode])
    assert same(run(LateStorages(seed), monkeypatch, mode), expected[mode]), f"seed {seed}"


#: The dropped wait, and a mode that shows it.
WITHOUT = {
    "the copy in waits for those who had its memory": ("_copy.let_wait", "some"),
    "those who use a unit wait for the copy in": ("finish.let_wait", "some"),
    "memory of what is given up waits for its copy in": ("_end.let_wait", "some"),
    "staging memory waits for the copy in before": ("take.wait", "over TCP"),
    "another stream that uses a unit waits for its copy in": ("use.let_wait", "all"),
    "memory waits for other streams that use what was in it": ("leave.let_wait", "some"),
    "the copy out waits for the gradient": ("begin_copies.let_wait", "some"),
    "the push waits for the copy out": ("push.wait", "some"),
}


@pytest.mark.filterwarnings("ignore:step")  # unwritten memory makes the gradient non-finite
@pytest.mark.parametrize("left_out", [*WITHOUT] if os.environ.get("LONGSHORE_SOAK") else [*WITHOUT][:2])
def test_each_wait_is_needed(left_out: str, expected: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    what, mode = WITHOUT[left_out]
    seeds = range(16)
    assert any(not same(run(LateStorages(seed, ignored=what), monkeypatch, mode), expected[mode]) for seed in seeds)
