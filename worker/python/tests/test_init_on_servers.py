"""A model that is built within Init(on_servers=True): servers make its weights, which are those that docs/protocol.md says."""

import copy
import pathlib
from collections.abc import Callable

import made
import numpy as np
import pytest
import torch
from conftest import several
from safetensors.torch import save_file
from torch import Tensor, nn
from units import optimizer_of, same, train, weight_bytes

import longshore
from longshore import checkpoint, errors

SEED = 2**40 + 7
WIDTH = 96


class Layer(nn.Module):
    """Its functions of initialisation are many."""

    def __init__(self) -> None:
        super().__init__()
        self.default = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.full((WIDTH,), 0.25))
        self.steps = nn.Parameter(torch.arange(WIDTH) / WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            self.plain.weight.data.normal_(mean=0.5, std=0.02)
            self.plain.bias.fill_(-1.0)
            nn.init.trunc_normal_(self.gate, std=0.02, a=-0.04, b=0.03)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * self.plain(self.norm(self.default(hidden))) + self.steps


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        nn.init.xavier_uniform_(self.head.weight)
        if tied:
            self.head.weight = self.embed.weight

    def loss(self, step: int) -> Tensor:
        tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(step))
        hidden = self.embed(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def expected(name: str, index: int, shape: torch.Size) -> np.ndarray:
    """What the protocol says of a parameter of Net."""
    place = SEED, index, shape.numel()
    bound = WIDTH**-0.5
    if name == "embed.weight":
        return made.normal(0.0, 1.0, *place)
    if name == "head.weight":
        bound = (6 / (32 + WIDTH)) ** 0.5
    if name == "head.weight" or ".default." in name:
        return made.uniform(-bound, bound, *place)
    if name.endswith("plain.weight"):
        return made.normal(0.5, 0.02, *place)
    if name.endswith("gate"):
        return made.trunc_normal(0.0, 0.02, -0.04, 0.03, *place)
    if name.endswith("steps"):
        return (torch.arange(WIDTH) / WIDTH).numpy()
    constant = {"plain.bias": -1.0, "norm.weight": 1.0, "norm.bias": 0.0}[".".join(name.split(".")[-2:])]
    return made.constant(constant, *place)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_made_by_servers_and_train(servers: int, tied: bool) -> None:
    with longshore.Init(on_servers=True, seed=SEED) as init:
        cut = Net(tied)
    other = Net(tied)
    assert init.peak_weight_bytes < weight_bytes(other) // 8
    with torch._C.DisableTorchFunctionSubclass():
        assert all(parameter.untyped_storage().nbytes() == 0 for parameter in cut.parameters())
    with torch.no_grad():
        for index, (name, parameter) in enumerate(other.named_parameters()):
            parameter.copy_(torch.from_numpy(expected(name, index, parameter.shape)).view_as(parameter))
    with several(servers) as addresses:
        optimizer = optimizer_of(cut, servers=addresses, job="made", shard_elements=65536)
        longshore.shard(cut, optimizer, weight_bytes(other) // 2)
        same(other, cut)
        train(other, optimizer_of(other))
        train(cut, optimizer)
        same(other, cut)
        optimizer.close()
        # A process that finds the job builds its model so as well, and gets what was trained.
        with longshore.Init(on_servers=True, seed=1):
            again = Net(tied)
        optimizer = optimizer_of(again, servers=addresses, job="made", shard_elements=65536)
        longshore.shard(again, optimizer, weight_bytes(other) // 2)
        same(other, again)


def test_a_llama_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    with longshore.Init(on_servers=True, seed=SEED, dtype=torch.bfloat16):
        model = transformers.LlamaForCausalLM(config)
    optimizer = optimizer_of(model)
    longshore.shard(model, optimizer, "1MB")
    state = model.state_dict()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        place = SEED, index, parameter.numel()
        wanted = made.constant(1.0, *place) if "norm" in name else made.normal(0.0, 0.02, *place)
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(state[name], torch.from_numpy(wanted).view_as(state[name]).bfloat16()), name
    losses = []
    tokens = torch.arange(16)[None] * 5
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


class Two(nn.Module):
    def __init__(self, act: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(400, 400)
        act(self)


def read(model: nn.Module) -> None:
    copy.deepcopy(model)


def add(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.randn(400, 400))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda model: nn.init.orthogonal_(model.layer.weight), ["Linear.weight", "torch.nn.init.orthogonal_"]),
        (lambda model: nn.init.eye_(model.layer.weight), ["Linear.weight", "torch.nn.init.eye_"]),
        (lambda model: nn.init.zeros_(model.layer.weight[3]), ["Linear.weight", "torch.Tensor.__getitem__"]),
        (lambda model: model.layer.weight.data.mul_(2.0), ["Linear.weight", "torch.Tensor.mul_"]),
        (lambda model: nn.init.normal_(model.layer.bias, generator=torch.Generator()), ["Linear.bias", "generator=", "seed="]),
        (lambda model: model.bfloat16(), ["Linear.weight", "torch.Tensor.bfloat16"]),
        (read, ["Linear.weight", "is read", "longshore.shard"]),
        (add, ["Two.extra", "filled with other values"]),
    ],
)
def test_what_servers_cannot_make_is_refused_by_name(act: Callable[[nn.Module], object], words: list[str]) -> None:
    with pytest.raises(errors.UsageError) as refused, longshore.Init(on_servers=True):
        model = Two(act)
        assert model is not None, "it must live until Init looks at its parameters"
    for word in [*words, "without on_servers=True"] if "seed=" not in words else words:
        assert word in str(refused.value)
    assert nn.init.trunc_normal_(torch.zeros(4)).any(), "torch's functions are its own again"


def test_other_uses_are_refused() -> None:
    with pytest.raises(errors.InvalidError, match=r"seed is -1, but must be in 0\.\."):
        longshore.Init(on_servers=True, seed=-1)
    models = []
    for seed in (1, 2):
        with longshore.Init(on_servers=True, seed=seed):
            models.append(nn.Linear(8, 8))
    both = nn.ModuleList(models)
    with pytest.raises(errors.UsageError, match=r"0\.weight is built in another one, but must be built in the same longshore\.Init"):
        longshore.shard(both, optimizer_of(both), "1MB")
    with pytest.raises(errors.UsageError, match=r"Linear\.weight is read"), longshore.GatheredParameters(models[0].weight):
        pass
    models[0].weight.requires_grad_(False)
    with pytest.raises(errors.UsageError, match=r"Linear\.weight is frozen"):
        longshore.shard(models[0], optimizer_of(models[0]), "1MB")
    with pytest.raises(errors.UsageError, match=r"longshore\.shard"):
        models[1](torch.zeros(1, 8))


def test_a_frozen_base_beside_a_head_that_servers_make() -> None:
    torch.manual_seed(0)
    base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    with longshore.Init(on_servers=True, seed=SEED):
        head = nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleDict({"base": base, "head": head})
    frozen = base.weight.clone()
    optimizer = optimizer_of(model, frozen="keep")
    longshore.shard(model, optimizer, "1MB")
    bound = WIDTH**-0.5
    wanted = torch.from_numpy(made.uniform(-bound, bound, SEED, 0, WIDTH * WIDTH)).view(WIDTH, WIDTH)
    assert torch.equal(model.state_dict()["head.weight"], wanted)
    assert torch.equal(model.state_dict()["base.weight"], frozen)


def test_files_fill_a_model_whose_weights_are_nowhere(tmp_path: pathlib.Path) -> None:
    source = Net()
    for number, parameter in enumerate(source.parameters()):
        nn.init.normal_(parameter, std=0.02 * (1 + number % 3))
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    with longshore.Init(on_servers=True, seed=SEED):
        model = Net()
    optimizer = optimizer_of(model)
    checkpoint.load_safetensors(optimizer, tmp_path, strict=True)
    longshore.shard(model, optimizer, weight_bytes(source) // 3)
    same(source, model)
    train(source, optimizer_of(source))
    train(model, optimizer)
    same(source, model)
