"""A model built within Init has the weights of a model built whole, and never holds all of them at once."""

import pathlib
from collections.abc import Callable

import pytest
import torch
from models import Transformer
from torch import nn
from units import Accountant, Deep, optimizer_of, same, train, weight_bytes

import longshore
from longshore import errors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", [None, "leave", "keep"])
def test_a_model_that_is_never_whole(tmp_path: pathlib.Path, tied: bool, frozen: str | None) -> None:
    torch.manual_seed(1)
    other = Transformer(tied=tied, casts=False)
    size = weight_bytes(other)
    torch.manual_seed(1)
    with longshore.Init(budget=size // 8, folder=tmp_path) as init:
        cut = Transformer(tied=tied, casts=False)
    assert init.peak_weight_bytes <= size // 8
    assert not [*tmp_path.iterdir()], "the file goes with the weights"
    assert not any(type(parameter) is nn.Parameter for parameter in cut.parameters())
    for (name, ours), theirs in zip(cut.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for model in (cut, other):
        model.blocks[2:5].requires_grad_(frozen is None)
    train(other, optimizer_of(other))
    accountant = Accountant(cut)
    optimizer = optimizer_of(cut)
    with pytest.raises(errors.UsageError, match=r"built within longshore\.Init: call longshore\.shard"):
        cut.loss(0).backward()
        optimizer.step()
    for parameter in cut.parameters():
        parameter.grad = None
    optimizer = optimizer_of(cut, frozen=frozen or "leave")
    longshore.shard(cut, optimizer, size // 3)
    with accountant:
        train(cut, optimizer)
    accountant.check(size // 3)
    same(other, cut)


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "copied": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight * 2)) or layer,
    "taken": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight)) or layer,
    "set": lambda layer: setattr(layer.weight, "data", torch.ones(16, 16)) or layer,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("norm", NORMS)
def test_layers_that_make_parameters_of_a_weight(norm: str) -> None:
    """Wav2Vec2 and others put a weight norm around a layer while they are built."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(NORMS[norm](nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4))

    def train(model: nn.Module, optimizer: longshore.SGD) -> None:
        for number in range(3):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(number))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = build()
    with longshore.Init(budget="1100") as init:
        cut = build()
    assert nn.Parameter(torch.ones(1)).requires_grad
    for (name, theirs), (other, ours) in zip(whole.named_parameters(), cut.named_parameters(), strict=True):
        assert name == other and type(ours) is not nn.Parameter and torch.equal(theirs, ours), name
    assert init.peak_weight_bytes <= 1100
    train(whole, longshore.SGD(whole.named_parameters(), lr=0.1, streaming=True))
    optimizer = longshore.SGD(cut.named_parameters(), lr=0.1, streaming=True)
    longshore.shard(cut, optimizer, budget="1MB")
    train(cut, optimizer)
    same(whole, cut)


def test_memory_of_another_shape_is_refused_while_a_model_is_built() -> None:
    with longshore.Init(budget="1MB"):
        layer = nn.Linear(4, 4)
        with pytest.raises(errors.UsageError, match=r"Linear\.weight got memory of another shape.*assign a new nn\.Parameter"):
            layer.weight.data = torch.ones(2, 2)


def test_what_init_leaves_alone() -> None:
    with longshore.Init(budget="1MB", dtype=torch.bfloat16):
        layer = nn.Linear(4, 4)
        nn.init.constant_(layer.bias, 3.0)
        layer.weight.data.fill_(0.5)
        with torch.device("meta"):
            assert type(nn.Linear(4, 4).weight) is nn.Parameter
    assert layer.weight.dtype is torch.bfloat16 and torch.get_default_dtype() is torch.float32
    assert bool((layer.bias == 3).all()) and bool((layer.weight == 0.5).all())
    with longshore.Init(enabled=False):
        assert type(nn.Linear(4, 4).weight) is nn.Parameter
    assert type(Deep(depth=1).layers[0].weight) is nn.Parameter
