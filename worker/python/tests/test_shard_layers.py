"""Layers larger than the budget, in tiles, and gathered parameters."""

import pathlib

from models import pair
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from units import Deep, check_in_units, in_units, optimizer_of, same, train, weight_bytes

import longshore
from longshore import errors


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
