"""On a GPU, steps have the same bits under any delay, and the results equal torch's. test_order_on_a_device.py shows that each wait is needed."""

import logging
from typing import Any

import pytest
import torch
from gpu import DEVICE, LATE, Gpu, InOrder, OnGpu, needs_a_gpu, on
from models import distance, pair
from torch import Tensor

import longshore

pytestmark = needs_a_gpu
STEPS = 5
MODES: dict[str, dict[str, Any]] = {
    "streaming": {"streaming": True},
    "buckets": {"streaming": True, "group_bytes": 1 << 20},
    "buckets over TCP": {"streaming": True, "group_bytes": 1 << 20, "transport": "tcp"},
    "two passes": {"streaming": True, "accumulate": 2},
    "whole": {"streaming": True, "layerwise": False},
    "unfreezing": {"streaming": True, "frozen": "train-later"},
    "safe": {},
    "over TCP": {"streaming": True, "transport": "tcp"},
    "delayed": {"streaming": True, "delay": 1, "warmup_steps": 2},
}


def train(gpu: Gpu, group_bytes: int = 0, **options: Any) -> list[Tensor]:
    """Trains, with an evaluation before each step and no wait for it. Returns weights and evaluations."""
    with on(gpu, group_bytes):
        torch.manual_seed(0)
        model = OnGpu().to(DEVICE)
        model.gpu = gpu
        unfreezes = options.get("frozen") == "train-later"
        model.layers[:4].requires_grad_(not unfreezes)
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, **options)
        passes = options.get("accumulate", 1)
        found = []
        for step in range(STEPS):
            if step == 2:
                model.layers.requires_grad_(True)
            for number in range(passes):
                model.loss(step * passes + number).backward()
            with torch.no_grad():
                found.append(model(model.inputs(step)))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.flush()
        found = [tensor.detach().cpu() for tensor in (*found, *model.parameters())]
        optimizer.close()
        return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Tensor]]:
    """Returns each mode's results where each operation begins after all earlier ones."""
    return {mode: train(InOrder(), **options) for mode, options in MODES.items()}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_are_the_same_whatever_is_late(mode: str, late: str, expected: dict[str, list[Tensor]]) -> None:
    assert all(tensor.isfinite().all() for tensor in expected[mode])
    for seed in range(2):
        found = train(Gpu(late, seed), **MODES[mode])
        assert all(torch.equal(a, b) for a, b in zip(found, expected[mode], strict=True)), f"seed {seed}"


def test_streaming_equals_safe(expected: dict[str, list[Tensor]]) -> None:
    for other in ("whole", "safe", "over TCP", "buckets", "buckets over TCP"):
        assert all(torch.equal(a, b) for a, b in zip(expected[other], expected["streaming"], strict=True)), other


def test_the_gpu_copies_from_and_to_the_memory_that_servers_share(caplog: pytest.LogCaptureFixture) -> None:
    """The memory is registered when the first gradients and weights come, until the optimizer is closed."""
    gpu = Gpu()
    with caplog.at_level(logging.WARNING, "longshore"):
        train(gpu, streaming=True)
    assert gpu.to_be_read > 0 and gpu.to_be_written > 0 and gpu.registered == 0
    assert gpu.locked_bytes == 0, "neither goes through memory of torch's"
    assert not caplog.records


@pytest.mark.parametrize("streaming", [False, True])
def test_fp32_steps_are_those_of_torch(streaming: bool) -> None:
    ours, theirs = (model.to(DEVICE) for model in pair(OnGpu, depth=4, width=128, dtype=torch.float32))
    optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-3, weight_decay=0.1, streaming=streaming)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(200):
        for model, of in ((ours, optimizer), (theirs, reference)):
            model.loss(step).backward()
            of.step()
            of.zero_grad()
    optimizer.flush()
    assert distance(ours, theirs) < 1e-6
    optimizer.close()
