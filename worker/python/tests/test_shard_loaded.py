"""Trained weights loaded between the opening of a job and ``shard`` are refused by name, unless they equal the servers'."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from units import Deep, optimizer_of, train, weight_bytes, weights

import longshore
from longshore import errors


def deep(seed: int = 0, **options: Any) -> Deep:
    torch.manual_seed(seed)
    return Deep(depth=4, **options)


def by_load_state_dict(model: nn.Module) -> None:
    """Loads other weights of one layer."""
    found = weights(model)
    model.load_state_dict({**found, "layers.1.weight": found["layers.1.weight"] + 1.0})


def refused(model: Deep, optimizer: longshore.AdamW) -> None:
    said = r"layers\.1\.weight is another in the model than on the servers.*load weights before the optimizer or engine opens its job"
    with pytest.raises(errors.UsageError, match=said):
        longshore.shard(model, optimizer, weight_bytes(model))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}])
def test_weights_that_are_loaded_into_an_open_job_are_refused(options: dict[str, Any], steps: int) -> None:
    """Steps do not hide what was loaded."""
    model = deep(**options)
    optimizer = optimizer_of(model)
    optimizer.open()
    train(model, optimizer, steps=steps)
    by_load_state_dict(model)
    refused(model, optimizer)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_are_frozen_or_loaded_before_the_job_is_opened_count(frozen: bool) -> None:
    model = deep()
    model.layers[1].requires_grad_(not frozen)
    optimizer = optimizer_of(model)
    if frozen:
        optimizer.open()
    by_load_state_dict(model)
    expected: dict[str, Tensor] = weights(model)
    longshore.shard(model, optimizer, weight_bytes(model))
    assert all(torch.equal(expected[name], value) for name, value in weights(model).items())
    train(model, optimizer, steps=1)
    assert torch.equal(weights(model)["layers.1.weight"], expected["layers.1.weight"]) is frozen


DELAYED = {"delay": 1, "warmup_steps": 0}


@pytest.mark.parametrize("options", [{}, {"image_dtype": "bf16"}, DELAYED, {**DELAYED, "correction": "look-ahead"}])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("flushes", [False, True])
def test_what_steps_and_the_servers_rounding_have_written_is_the_servers(options: dict[str, Any], steps: int, flushes: bool) -> None:
    """The process that filled a new job keeps its fp32 weights, also where other processes get them rounded."""
    model = deep(dtype=torch.float32)
    optimizer = optimizer_of(model, **options)
    optimizer.open()
    train(model, optimizer, steps=steps)
    if flushes:
        optimizer.flush()
    longshore.shard(model, optimizer, 2 * weight_bytes(model))
    train(model, optimizer, steps=1, first=steps)
