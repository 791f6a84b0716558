"""On a GPU, steps have the same bits under any delay, each wait is needed, and the results equal torch's."""

import logging
from collections.abc import Iterator
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
    "two passes": {"streaming": True, "accumulate": 2},
    "whole": {"streaming": True, "layerwise": False},
    "unfreezing": {"streaming": True, "frozen": "train-later"},
    "safe": {},
    "over TCP": {"streaming": True, "transport": "tcp"},
    "delayed": {"streaming": True, "delay": 1, "warmup_steps": 2},
    "reduced": {"streaming": True, "partition": "reduce-scatter"},
}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of NCCL with this process alone. Its collectives run on their own stream."""
    torch.cuda.set_device(DEVICE)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def train(gpu: Gpu, **options: Any) -> list[Tensor]:
    """Trains, with an evaluation before each step and no wait for it. Returns weights and evaluations."""
    with on(gpu):
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
def expected(one_rank: None) -> dict[str, list[Tensor]]:
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
    for other in ("whole", "safe", "over TCP", "reduced"):
        assert all(torch.equal(a, b) for a, b in zip(expected[other], expected["streaming"], strict=True)), other


#: The dropped wait, a mode that shows it, and the delay.
WITHOUT = {
    "the copy out waits for the gradient": ("begin_copies.let_wait", "over TCP", "computing"),
    "the push waits for the copy out": ("push.wait", "over TCP", "copies"),
    "the copy to where it leaves from waits for the gradient": ("push.wait", "streaming", "computing"),
    "the push waits for the copy to where it leaves from": ("_copy.wait", "streaming", "copies"),
    "the copy in waits for those who read older weights": ("_ordered.let_wait", "streaming", "computing"),
    "those who read weights wait for the copy in": ("_show.let_wait", "streaming", "copies"),
}


@pytest.mark.filterwarnings("ignore:step")  # unwritten memory makes the gradient non-finite
@pytest.mark.parametrize("left_out", WITHOUT)
def test_each_wait_is_needed(left_out: str, expected: dict[str, list[Tensor]]) -> None:
    ignored, mode, late = WITHOUT[left_out]
    # Wrong weights would otherwise be found before their use. With a delay of 0.5 ms the reader was done before a copy on an H200 began.
    found = train(Gpu(late, ignored=ignored, cycles=20_000_000), **MODES[mode], written_weights="drop")
    assert not all(torch.equal(a, b) for a, b in zip(found, expected[mode], strict=True))


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


def test_a_grad_scaler_of_torch() -> None:
    """fp16 gradients with torch's scaler, and one step that overflows."""
    ours, theirs = (model.to(DEVICE) for model in pair(OnGpu, depth=4, width=128, dtype=torch.float32))
    optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-3)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    scales = []
    for model, of in ((ours, optimizer), (theirs, reference)):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20)
        for step in range(30):
            with torch.autocast("cuda", torch.float16):
                loss = model.loss(step) * (1e6 if step == 20 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(of)
            scaler.update()
            of.zero_grad()
        scales.append(scaler.get_scale())
    optimizer.flush()
    assert scales[0] == scales[1] < 2.0**20
    # Weights that differ in their last bit may round to different 16-bit numbers in forward.
    assert distance(ours, theirs) < 1e-4
    optimizer.close()
