"""A model in units: the bits of a whole model within a budget, layers in tiles, and weights that were loaded before it was cut."""

import pathlib
import re
import threading
from typing import Any

import pytest
import torch
from conftest import several
from models import MODELS, Transformer, pair
from torch import Tensor, nn
from torch.nn import functional
from units import TRANSPORTS, Deep, check_in_units, in_units, optimizer_of, same, train, weight_bytes, weights

import longshore
from longshore import errors
from longshore.units.residency import Residency


@pytest.mark.parametrize(("kind", "units"), [(Deep, 32), (Transformer, 11)])
@pytest.mark.parametrize("options", [{}, {"delay": 1, "warmup_steps": 2}, {"max_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_room_for_few_units_is_enough(kind: type[nn.Module], units: int, options: dict[str, Any], transport: str) -> None:
    whole, cut = pair(kind)
    sharded = check_in_units(whole, cut, share=4 / units, **options, transport=transport)
    assert len(sharded.units) == units
    assert cut.most > weight_bytes(cut) * 2 / units, "the budget is used"
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


LAYERS = 16


def test_a_process_holds_what_is_on_its_way() -> None:
    with several(1, memory="1GiB") as servers:
        model = Deep(LAYERS, 768)
        unit = weight_bytes(model) // LAYERS
        # The budget has room for three units of weights, and for the gradients of one unit.
        budget = 4 * unit
        optimizer = optimizer_of(model, servers=servers, job="large", transport="tcp")
        sharded = longshore.shard(model, optimizer, budget)
        fetched = []
        for step in range(3):
            before = sharded.fetched_bytes
            train(model, optimizer, steps=1, first=step)
            fetched.append(sharded.fetched_bytes - before)
        # Forward fetches every unit. Backward needs no weights of the first unit, and still has those of the last
        # three.
        assert [step / unit for step in fetched] == [2 * LAYERS - 4] * 3
        assert optimizer._connection is not None
        job = optimizer._connection.job
        held = job.weights_held()
        assert unit <= held <= 3 * unit, f"{held / unit} units were held at once"
        assert optimizer.last_report is not None and optimizer.last_report.pulled_bytes == fetched[-1]
        optimizer.close()


def test_a_process_that_joins_does_not_hold_the_model_either(servers: str) -> None:
    """Weights read to open the job are dropped when the model is cut."""
    whole, cut = pair(Deep, width=96)
    options = {"servers": servers, "job": "again", "transport": "tcp"}
    first = optimizer_of(whole, **options)
    train(whole, first, steps=2)
    first.close()
    optimizer = optimizer_of(cut, **options)
    longshore.shard(cut, optimizer, budget := weight_bytes(cut) // 8)
    assert optimizer._connection is not None
    same(whole, cut)
    train(cut, optimizer, steps=2, first=2)
    held = optimizer._connection.job.weights_held()
    assert 0 < held <= budget, f"{held} bytes, budget {budget}"


def test_small_units_come_from_further_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip needs more than four small units ahead to hide. The results and the budget stay."""
    most = [0]
    ahead = Residency._fetch_ahead

    def noted(residency: Residency, *, shared: bool) -> None:
        ahead(residency, shared=shared)
        most.append(len(residency._under_way))

    monkeypatch.setattr(Residency, "_fetch_ahead", noted)
    check_in_units(*pair(Deep), share=1 / 2)
    assert max(most) > 8


class Wide(nn.Module):
    """A layer that has most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 1000)
        self.last = nn.Linear(1000, 2, bias=False)
        self.bfloat16()

    def loss(self, step: int) -> Tensor:
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        return self.last(functional.gelu(self.wide(self.first(inputs)))).float().square().mean()


def test_a_layer_larger_than_the_budget() -> None:
    plain, cut = pair(Wide)
    untiled = plain.state_dict()
    budget = weight_bytes(cut.wide) // 3
    with pytest.raises(errors.InvalidError, match=r"budget.*unit wide .*longshore\.tiled before the optimizer is built"):
        longshore.shard(cut, optimizer_of(cut), budget)
    whole, cut = (longshore.tiled(model, budget // 3) for model in pair(Wide))
    assert len(cut.wide.tiles) == 9 and cut.wide.out_features == 1000
    assert cut.state_dict().keys() == untiled.keys()
    assert all(torch.equal(value, untiled[name]) for name, value in cut.state_dict().items())
    torch.testing.assert_close(cut.loss(0), plain.loss(0))
    check_in_units(whole, cut, budget=budget)
    plain.load_state_dict(cut.state_dict())
    whole.load_state_dict(plain.state_dict())
    assert all(torch.equal(value, cut.state_dict()[name]) for name, value in whole.state_dict().items())


def test_layers_that_cannot_be_tiled() -> None:
    with pytest.raises(errors.InvalidError, match="most is 10, but must be at least 32, one row of first.weight"):
        longshore.tiled(Wide(), 10)
    tied = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(errors.UsageError, match=r"a\.weight is tied to b\.weight"):
        longshore.tiled(tied, 64)
    with pytest.raises(errors.UsageError, match=r"weight is \[2, 8\], but must be of 8 rows"):
        longshore.tiled(nn.Linear(8, 8), 64).load_state_dict({"weight": torch.zeros(2, 8), "bias": torch.zeros(8)})


def test_parameters_that_are_gathered() -> None:
    whole, cut = pair(Deep, depth=8)
    cut.layers[6].requires_grad_(False)
    optimizer, sharded = in_units(cut, 2)
    layers = cut.layers[1], cut.layers[2]
    with longshore.GatheredParameters([layers[0].weight, layers[1].weight]):
        assert type(layers[0].weight) is nn.Parameter
        for _ in range(2):
            cut(cut.inputs(0))
        assert torch.equal(layers[0].weight @ layers[1].weight, whole.layers[1].weight @ whole.layers[2].weight)
        late = (layers[0].weight @ layers[1].weight).float().sum()
        with pytest.raises(errors.ShortageError, match=r"in use by layers\..*raise the budget"):
            with longshore.GatheredParameters(cut.parameters()):
                raise AssertionError
    sharded.release()
    gradient = torch.autograd.grad(late, [layer.weight for layer in layers])[0]
    assert torch.equal(gradient[0], whole.layers[2].weight.detach().float().sum(1).bfloat16()), "what was saved comes again"
    with torch.no_grad(), longshore.GatheredParameters(cut.layers[6].weight):
        cut.layers[6].weight.fill_(2)
    with pytest.raises(errors.UsageError, match=r"layers\.3\.weight of unit layers\.3 was changed in place"):
        with torch.no_grad(), longshore.GatheredParameters(cut.layers[3].weight):
            cut.layers[3].weight.fill_(2)
    with longshore.GatheredParameters(cut.layers[0].weight, enabled=False):
        assert type(cut.layers[0].weight) is not nn.Parameter
    sharded.release()
    assert sharded.resident == []
    assert bool((cut.layers[6].weight == 2).all()) and torch.equal(cut.layers[3].weight, whole.layers[3].weight)


def test_a_layer_of_a_model_that_init_has_built(tmp_path: pathlib.Path) -> None:
    plain, other = pair(Wide)
    size = weight_bytes(other.wide)
    whole = longshore.tiled(other, size // 9)
    torch.manual_seed(0)
    with longshore.Init(budget=size * 2, folder=tmp_path, dtype=torch.bfloat16):
        cut = Wide()
    for name, parameter in cut.named_parameters():
        with torch.no_grad():
            parameter.copy_(dict(plain.named_parameters())[name])
    cut = longshore.tiled(cut, size // 9)
    assert not any(type(parameter) is nn.Parameter for parameter in cut.parameters()), "slices go where the whole was"
    same(whole, cut)
    train(whole, optimizer_of(whole))
    optimizer = optimizer_of(cut)
    longshore.shard(cut, optimizer, size // 3)
    train(cut, optimizer)
    same(whole, cut)


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
