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


def test_a_delayed_run_that_is_flushed_goes_on() -> None:
    """flush returns master weights, and the steps after it compute with images again."""
    whole, cut = pair(Deep)
    options = {"delay": 1, "warmup_steps": 1}
    plain, optimizer = optimizer_of(whole, **options), optimizer_of(cut, **options)
    longshore.shard(cut, optimizer, weight_bytes(cut) // 8)
    for model, its in ((whole, plain), (cut, optimizer)):
        train(model, its, steps=4)
        assert its.flush() == 4
    same(whole, cut)
    for model, its in ((whole, plain), (cut, optimizer)):
        train(model, its, steps=4, first=4)
        assert its.flush() == 8
    same(whole, cut)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_refused_step_that_is_given_up(delay: int) -> None:
    """The job is joined again, and weights come from it again."""
    whole, cut = pair(Deep)
    cut.layers[3].requires_grad_(False)
    whole.layers[3].requires_grad_(False)
    options = {"missing_gradients": "error", "delay": delay, "warmup_steps": 1}
    plain, optimizer = optimizer_of(whole, **options), optimizer_of(cut, **options)
    sharded = longshore.shard(cut, optimizer, budget := weight_bytes(cut) // 8)
    for model, its in ((whole, plain), (cut, optimizer)):
        train(model, its, steps=3)
        its.flush()
        for _ in range(2):
            model.layers[1](torch.ones(4, 48, dtype=torch.bfloat16)).sum().backward()
            with pytest.raises(errors.MissingGradientError, match=r"flush\(\) to give this step up"):
                its.step()
            assert its.flush() == 3
    fetched = sharded.fetched_bytes
    same(whole, cut)
    for model, its in ((whole, plain), (cut, optimizer)):
        train(model, its, steps=3, first=3)
        assert its.flush() == 6
    same(whole, cut)
    assert sharded.fetched_bytes > fetched and sharded.peak_weight_bytes <= budget


def test_a_version_that_no_checkpoint_has() -> None:
    """The load is refused, and the current job continues."""
    whole, cut = pair(Deep)
    plain, optimizer = optimizer_of(whole), optimizer_of(cut)
    longshore.shard(cut, optimizer, weight_bytes(cut) // 8)
    for model, its in ((whole, plain), (cut, optimizer)):
        train(model, its, steps=2)
        state = its.state_dict()
        train(model, its, steps=2, first=2)
        with pytest.raises(errors.StateError):
            its.load_state_dict(state)
        train(model, its, steps=2, first=4)
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
