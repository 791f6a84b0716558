"""Trained weights that somebody writes between steps: refused where the next step would lose them, and let be where they are put back."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerator import Immediate, Layers
from models import pair, same_bits
from test_order_on_a_device import on
from torch import nn

import longshore
from longshore import errors

MODES: dict[str, dict[str, Any]] = {
    "safe": {},
    "streaming": {"streaming": True},
    "at once": {"streaming": True, "layerwise": False},
    "delayed": {"delay": 1, "warmup_steps": 1},
    "bf16": {"image_dtype": "bf16"},
}


def step(model: nn.Module, optimizer: longshore.AdamW, number: int) -> None:
    optimizer.zero_grad()
    model.loss(number).backward()
    optimizer.step()


def load(model: nn.Module) -> None:
    model.load_state_dict(pair("mlp")[0].state_dict())


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    model.layers[0].weight.clamp_(-0.01, 0.01)


@torch.no_grad()
def one_element(model: nn.Module) -> None:
    model.layers[0].weight[3, 3] += 1.0


@pytest.mark.parametrize("write", [load, clamp, one_element])
@pytest.mark.parametrize("mode", MODES)
def test_a_write_that_the_next_step_would_lose_is_refused(mode: str, write: Callable[[nn.Module], None]) -> None:
    model, _ = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, **MODES[mode])
    for number in range(3):
        step(model, optimizer, number)
    write(model)
    with pytest.raises(errors.UsageError, match=r"layers\.0\.weight is another in the model.*written_weights='drop'"):
        step(model, optimizer, 3)


def clamp_past_the_count(model: nn.Module) -> None:
    """As Wasserstein GANs do after each step."""
    for weight in model.parameters():
        weight.data.clamp_(-0.01, 0.01)


def average_past_the_count(model: nn.Module) -> None:
    """As who puts other tensors in the place of the weights."""
    for weight in model.parameters():
        weight.data = weight.data * 0.5


@pytest.mark.parametrize("write", [clamp_past_the_count, average_past_the_count])
@pytest.mark.parametrize("mode", MODES)
def test_writes_that_torch_does_not_count_are_found_after_some_steps(mode: str, write: Callable[[nn.Module], None]) -> None:
    model, _ = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, **MODES[mode])
    for number in range(3):
        step(model, optimizer, number)
    with pytest.raises(errors.UsageError, match="is another in the model than on the servers"):
        for number in range(3, 3 + len(list(model.parameters()))):
            write(model)
            step(model, optimizer, number)


@pytest.mark.parametrize("mode", ["safe", "streaming"])
def test_other_memory_of_another_shape_is_refused_before_it_is_compared(mode: str) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = longshore.AdamW(model.named_parameters(), **MODES[mode])

    def step_with(width: int) -> None:
        model.weight.data = model.weight.data[:, :width].clone()
        optimizer.zero_grad()
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()

    step_with(64)
    with pytest.raises(errors.UsageError, match=r"weight is fp32 \[64, 8\]"):
        step_with(8)


@pytest.mark.parametrize("mode", ["safe", "streaming"])
def test_writes_to_a_device_that_torch_does_not_count_are_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Immediate(0)
    with on(device, monkeypatch):
        model = Layers(device)
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, **MODES[mode])
        step(model, optimizer, 0)
        with pytest.raises(errors.UsageError, match="is another in the model than on the servers"):
            for number in range(1, 1 + len(list(model.parameters()))):
                for weight in model.parameters():
                    device.alias(weight).mul_(0.5)
                step(model, optimizer, number)
        optimizer.close()


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_put_back_are_no_business_of_anybody(mode: str) -> None:
    """As an evaluation with averages does, before every step but the first."""
    found = []
    for averages in (False, True):
        model, _ = pair("mlp")
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, **MODES[mode])
        for number in range(6):
            if averages:
                optimizer.flush()
                kept = [weight.detach().clone() for weight in model.parameters()]
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(0.5)
                    for weight, before in zip(model.parameters(), kept, strict=True):
                        weight.copy_(before)
                for weight, before in zip(model.parameters(), kept, strict=True):
                    weight.data = torch.zeros_like(before)
                    weight.data = before
            elif "delay" in MODES[mode]:
                optimizer.flush()
            step(model, optimizer, number)
        optimizer.flush()
        found.append(model)
    assert same_bits(*found)


def test_whoever_says_so_loses_what_is_written() -> None:
    models = pair("mlp")
    optimizers = [longshore.AdamW(model.named_parameters(), lr=1e-2, written_weights="drop") for model in models]
    for optimizer in optimizers:
        optimizer.open()
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model.loss(number).backward()
            if model is models[1]:
                clamp(model)
            optimizer.step()
        assert same_bits(*models)
    with pytest.raises(errors.InvalidError, match="written_weights is 'keep', but must be one of error, drop"):
        longshore.AdamW(models[0].parameters(), written_weights="keep")


def test_who_writes_what_is_there_in_each_step_hears_of_it_once() -> None:
    model, _ = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(25):
            with torch.no_grad():
                model.layers[0].weight.mul_(1.0)
            step(model, optimizer, number)
    assert ["before each of 10 steps" in str(warning.message) for warning in caught] == [True]


@pytest.mark.parametrize("stage", [0, 2])
def test_an_engine_refuses_weights_that_come_after_it(stage: int) -> None:
    model, other = pair("mlp")
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    engine = longshore.initialize(model=model, config=config)[0]
    nn.init.normal_(other.layers[3].weight)
    engine.module.load_state_dict(other.state_dict())
    with pytest.raises(errors.UsageError, match=r"layers\.3\.weight is another in the model.*before the optimizer or engine opens its job"):
        engine.backward(model.loss(0))


def test_what_is_loaded_before_the_job_is_opened_counts() -> None:
    model, other = pair("mlp")
    nn.init.normal_(other.layers[0].weight)
    optimizer = longshore.AdamW(model.named_parameters(), lr=0.0, weight_decay=0.0)
    model.load_state_dict(other.state_dict())
    step(model, optimizer, 0)
    assert same_bits(model, other)
