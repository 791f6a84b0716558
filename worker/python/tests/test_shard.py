"""A model in units has the bits of a whole model, and its weights and gradients stay within the budget."""

import re
import threading
from typing import Any

import pytest
import torch
from models import MODELS, Transformer, pair
from torch import nn
from units import TRANSPORTS, Deep, check_in_units, in_units, optimizer_of, same, train, weight_bytes

import longshore
from longshore import errors


@pytest.mark.parametrize(("kind", "units"), [(Deep, 32), (Transformer, 19)])
@pytest.mark.parametrize("options", [{}, {"delay": 1, "warmup_steps": 2}, {"max_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_eighth_of_the_weights_is_enough(kind: type[nn.Module], units: int, options: dict[str, Any], transport: str) -> None:
    whole, cut = pair(kind)
    sharded = check_in_units(whole, cut, **options, transport=transport)
    assert len(sharded.units) == units
    assert cut.most > weight_bytes(cut) // 16, "the budget is used"
    assert sharded.peak_weight_bytes <= cut.most
    assert whole.optimizer.flush() == cut.optimizer.flush()
    same(whole, cut)


@pytest.mark.parametrize("accumulate_on", ["servers", "worker"])
@pytest.mark.parametrize("delay", [0, 1])
def test_micro_steps_fetch_the_same_version(accumulate_on: str, delay: int) -> None:
    whole, cut = pair(Deep)
    check_in_units(whole, cut, micro_steps=3, accumulate=3, accumulate_on=accumulate_on, delay=delay, warmup_steps=1)
    assert whole.optimizer.flush() == cut.optimizer.flush()
    same(whole, cut)


def test_over_sockets_from_two_servers(two_servers: str) -> None:
    whole, cut = pair(Deep, width=80)
    train(whole, optimizer_of(whole))
    before = set(threading.enumerate())
    optimizer, _ = in_units(cut, servers=two_servers, job="units", transport="tcp")
    train(cut, optimizer)
    same(whole, cut)
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("longshore-fetch")} - before
    assert len(threads) == 1
    optimizer.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(cut(cut.inputs(0)), whole(whole.inputs(0))), "the model outlives its optimizer"


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_that_holds_one_unit_and_its_gradients(name: str) -> None:
    whole, cut = pair(name)
    with pytest.raises(errors.InvalidError, match="budget is .* bytes for units, but must be at least") as refused:
        longshore.shard(cut, optimizer_of(cut), 1)
    least = int(re.search(r"raise the budget by (\d+)", str(refused.value))[1]) + 1
    check_in_units(whole, cut, budget=least)


def test_what_the_budget_holds_stays() -> None:
    """With room for all, weights are fetched once a step, and frozen weights once."""
    _, cut = pair(Deep)
    for layer in cut.layers[:16]:
        layer.requires_grad_(False)
    trained = sum(p.numel() * p.element_size() for p in cut.parameters() if p.requires_grad)
    optimizer = optimizer_of(cut)
    sharded = longshore.shard(cut, optimizer, "1MB")
    train(cut, optimizer, steps=3)
    assert sharded.fetched_bytes == weight_bytes(cut) + 2 * trained
    assert sharded.peak_weight_bytes == weight_bytes(cut)
    sharded.release()
    assert sharded.weight_bytes == 0 and sharded.resident == []
