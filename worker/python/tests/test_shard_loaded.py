"""Trained weights loaded between the opening of a job and ``shard`` are refused by name, unless they equal the servers'."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from units import Deep, optimizer_of, train, weight_bytes, weights

import longshore
from longshore import errors

SAID = r"layers\.1\.weight is another in the model than on the servers.*load weights before the optimizer or engine opens its job"


def deep(seed: int = 0, **options: Any) -> Deep:
    torch.manual_seed(seed)
    return Deep(depth=4, **options)


def other(model: nn.Module) -> dict[str, Tensor]:
    """Returns other weights of one layer."""
    found = weights(model)
    return {**found, "layers.1.weight": found["layers.1.weight"] + 1.0}


def by_load_state_dict(model: Deep) -> None:
    model.load_state_dict(other(model))


def by_one_element(model: Deep) -> None:
    with torch.no_grad():
        model.layers[1].weight[-1, -1] += 1.0


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}])
@pytest.mark.parametrize("load", [by_load_state_dict, by_one_element])
def test_weights_that_are_loaded_into_an_open_job_are_refused(load: Callable[[Deep], None], options: dict[str, Any]) -> None:
    model = deep(**options)
    optimizer = optimizer_of(model)
    optimizer.open()
    load(model)
    with pytest.raises(errors.UsageError, match=SAID):
        longshore.shard(model, optimizer, weight_bytes(model))


def test_a_job_that_the_servers_have_is_open_once_the_optimizer_is_built(servers: str) -> None:
    first, second = deep(), deep(seed=1)
    options = {"servers": servers, "job": "found"}
    optimizer = optimizer_of(first, **options)
    train(first, optimizer, steps=2)
    optimizer.close()
    again = optimizer_of(second, **options)
    by_load_state_dict(second)
    with pytest.raises(errors.UsageError, match=SAID):
        longshore.shard(second, again, weight_bytes(second))
    second.load_state_dict(weights(first))  # the servers' weights, as a trainer that continues loads them
    longshore.shard(second, again, weight_bytes(second))
    train(second, again, steps=1, first=2)


def test_weights_that_are_loaded_before_the_job_is_opened_count() -> None:
    model = deep()
    optimizer = optimizer_of(model)
    by_load_state_dict(model)
    expected = weights(model)
    longshore.shard(model, optimizer, weight_bytes(model))
    assert all(torch.equal(expected[name], value) for name, value in weights(model).items())


DELAYED = {"delay": 1, "warmup_steps": 0}


def test_weights_whose_elements_lie_apart_are_compared_too() -> None:
    model = deep(dtype=torch.float32)
    with torch.no_grad():
        bias = model.layers[2].bias
        bias.data = torch.stack([bias, bias], 1)[:, 0]
    optimizer = optimizer_of(model)
    optimizer.open()
    by_load_state_dict(model)
    with pytest.raises(errors.UsageError, match=SAID):
        longshore.shard(model, optimizer, weight_bytes(model))
    with torch.no_grad():
        model.layers[1].weight.copy_(deep(dtype=torch.float32).layers[1].weight)
    longshore.shard(model, optimizer, 2 * weight_bytes(model))


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


def test_steps_do_not_hide_what_was_loaded() -> None:
    model = deep()
    optimizer = optimizer_of(model)
    train(model, optimizer, steps=2)
    by_one_element(model)
    with pytest.raises(errors.UsageError, match=SAID):
        longshore.shard(model, optimizer, weight_bytes(model))


def test_frozen_weights_may_be_loaded() -> None:
    model = deep()
    model.layers[1].requires_grad_(False)
    optimizer = optimizer_of(model)
    optimizer.open()
    by_load_state_dict(model)
    expected = weights(model)["layers.1.weight"]
    longshore.shard(model, optimizer, weight_bytes(model))
    train(model, optimizer, steps=1)
    assert torch.equal(weights(model)["layers.1.weight"], expected)
