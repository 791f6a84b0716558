"""Units under models' uses of weights: activation checkpointing, ties, frozen weights, branches, second derivatives."""

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from models import Graph, Transformer, pair
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from units import Deep, Lora, Recomputing, check_in_units, in_units, optimizer_of, same, train, weight_bytes

import longshore
from longshore.units.model import Order, Unit


class OnTheHost(torch.autograd.graph.saved_tensors_hooks):
    """Saves a model's tensors elsewhere, as ``save_on_cpu`` does for a device: unpacking returns other memory. On a CPU ``save_on_cpu``
    returns the tensor itself. Counts weights and other tensors packed, and tensors unpacked."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = self.others = self.unpacked = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            is_weight = tensor.untyped_storage().data_ptr() in {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        self.weights += is_weight
        self.others += not is_weight
        return tensor.detach().clone()

    def _unpack(self, kept: Tensor) -> Tensor:
        self.unpacked += 1
        return kept.clone()


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "reentrant, on the host", "not reentrant, on the host", "on the host"])
def test_activation_checkpointing(way: str) -> None:
    whole, cut = pair(Transformer)
    hosts = [OnTheHost(whole), OnTheHost(cut)]

    def call(host: OnTheHost, block: nn.Module, *args: Any) -> Tensor:
        with host if way.endswith("host") else contextlib.nullcontext():
            if way == "on the host":
                return block(*args)
            return checkpoint(block, *args, use_reentrant=not way.startswith("not"))

    whole.call, cut.call = (functools.partial(call, host) for host in hosts)
    check_in_units(whole, cut, share=1 / 4)
    if way.endswith("host"):
        of_whole, of_cut = hosts
        assert of_cut.weights == 0, "units come again instead"
        assert of_cut.others == of_whole.others == of_cut.unpacked > 0
        # On the host, a model in one piece does save weights, so the count of 0 proves something.
        assert (of_whole.weights > 0) is (way == "on the host")


def test_a_checkpointed_unit_takes_the_room_of_one() -> None:
    whole, cut = pair(Recomputing, depth=4)
    check_in_units(whole, cut, budget=2 * weight_bytes(cut.layers[0]))


def test_gradients_of_given_weights_take_the_room_of_a_backward() -> None:
    """Weights without a use get zeros as gradients, as in torch."""
    whole, cut = pair(Deep, depth=8)
    in_units(cut, 4)
    ways: list[Callable[[Deep], Iterable[Tensor]]] = [
        lambda model: torch.autograd.grad(model.loss(0), list(model.parameters())),
        lambda model: torch.autograd.grad(model.layers[0](model.inputs(0)).sum(), list(model.parameters()), materialize_grads=True),
        lambda model: torch.autograd.grad(model.layers[0].weight[0, 0], model.layers[0].weight),
    ]
    for gradients in ways:
        assert all(map(torch.equal, gradients(whole), gradients(cut)))
    for model in (whole, cut):
        view = model.layers[1].weight[0]
        (2 * view).sum().backward(inputs=[view])
        assert torch.equal(view.grad, torch.full_like(view, 2))
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(cut.loss(0), cut.layers[0].weight.detach())


class _Scaled(nn.Module):
    """Uses its own parameter and an inner module's within one checkpoint."""

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.scale, self.reentrant = nn.Linear(width, width), nn.Parameter(torch.ones(width)), reentrant
        self.in_features = width

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(lambda x: self.inner(x * self.scale) * self.scale, hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_a_unit_that_uses_its_parameters_directly(reentrant: bool) -> None:
    whole, cut = pair(Deep)
    for model in (whole, cut):
        torch.manual_seed(0)
        model.layers = nn.ModuleList(_Scaled(48, reentrant) for _ in range(16)).bfloat16()
        model.inputs = lambda step: Deep.inputs(whole, step).requires_grad_()
    check_in_units(whole, cut, share=1 / 4)


class Inside(nn.Module):
    """Recomputes its parts. Recomputed weights are views of memory that may be gone since, unless they are requested."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_features = width
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        for part in (self.first, self.second):
            hidden = hidden + checkpoint(lambda x, part=part: functional.gelu(part(x)), hidden, use_reentrant=False)
        return hidden


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_features = width
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.gate(hidden).softmax(-1)
        score, chosen = scores.max(-1)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(hidden[rows]) * score[rows, None])
        return out


def deep_of(layers: Iterable[nn.Module]) -> Deep:
    model = Deep()
    model.layers = nn.ModuleList(layers).to(model.dtype)
    return model


class Skipping(Deep):
    """A model that skips random layers, with the step as seed, so that steps use different units."""

    def loss(self, step: int) -> Tensor:
        hidden = self.inputs(step)
        left_out = torch.rand(len(self.layers), generator=torch.Generator().manual_seed(step)) < 0.3
        for layer, is_out in zip(self.layers, left_out.tolist(), strict=True):
            hidden = hidden if is_out else hidden + functional.gelu(layer(hidden))
        return hidden.float().square().mean()


class Reaching(Deep):
    """Layers whose weights are used elsewhere too: in a penalty on a weight's norm, and in a product of two layers' weights. A gradient from
    several modules waits for all of them, outside the memory of parameters."""

    def loss(self, step: int) -> Tensor:
        view = self.layers[7].weight.t()
        hidden = self(self.inputs(step)) @ view
        product = self.layers[3].weight @ self.layers[30].weight
        penalty = sum(layer.weight.float().square().sum() for layer in self.layers)
        return hidden.float().square().mean() + product.float().square().mean() + 1e-3 * penalty


#: For each case, a model, the fraction of its weights that is the budget, and the optimizer's options.
KINDS: dict[str, tuple[Callable[[], nn.Module], float, dict[str, Any]]] = {
    "checkpoints inside a unit": (lambda: deep_of(Inside(24) for _ in range(32)), 1 / 8, {}),
    "adapters on a frozen base": (lambda: deep_of(Lora(layer, 2) for layer in Deep().layers), 1 / 8, {}),
    "a mixture of experts": (lambda: deep_of(Experts(32) for _ in range(12)), 1 / 4, {}),
    "layers left out at random": (Skipping, 1 / 8, {}),
    "layers left out in delayed steps": (Skipping, 1 / 8, {"delay": 1, "warmup_steps": 1}),
    "forces, which are derivatives in the loss": (Graph, 0.6, {}),
    "modules that use the weights of others": (Reaching, 1 / 8, {}),
}


@pytest.mark.parametrize("name", KINDS)
def test_units_have_the_bits_of_the_model_in_one_piece(name: str) -> None:
    kind, share, options = KINDS[name]
    check_in_units(*pair(kind), share=share, **options)


def test_units_by_the_names_of_modules() -> None:
    whole, cut = pair(KINDS["a mixture of experts"][0])
    train(whole, optimizer_of(whole))
    optimizer = optimizer_of(cut)
    assert len(longshore.shard(cut, optimizer, "1MB", units=["layers.*.experts.*"]).units) == 12 * 5
    train(cut, optimizer)
    same(whole, cut)


def test_tied_weights() -> None:
    whole, cut = pair(Transformer, tied=True)
    sharded = check_in_units(whole, cut, share=1 / 3)
    assert "head" not in sharded.units, "the weight is the embedding's"
    assert cut.head.weight is cut.embed.weight


def test_an_evaluation_between_steps() -> None:
    whole, cut = pair(Transformer)
    plain, optimizer = optimizer_of(whole), optimizer_of(cut)
    longshore.shard(cut, optimizer, weight_bytes(cut) // 4)
    for step in range(4):
        train(whole, plain, steps=1, first=step)
        train(cut, optimizer, steps=1, first=step)
        written = []
        for model in (whole, cut):
            model.eval()
            tokens = torch.tensor([[1]])
            with torch.inference_mode() if step % 2 else torch.no_grad():
                for _ in range(5):
                    tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
            model.train()
            written.append(tokens)
        assert torch.equal(*written)
    same(whole, cut)


@pytest.fixture
def compiler() -> Iterator[Any]:
    """Yields torch.compile's counters, and clears them afterwards: the package checks whether torch has compiled anything."""
    torch._dynamo.reset()
    yield torch._dynamo.utils.counters
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("how", ["torch.compile", "compile, then shard", "shard, then compile"])
def test_blocks_that_are_compiled(compiler: Any, how: str) -> None:
    whole, cut = pair(Deep, depth=5)
    train(whole, optimizer_of(whole))
    optimizer = optimizer_of(cut)

    def compile_them() -> None:
        for number, layer in enumerate(cut.layers):
            if how == "torch.compile":
                cut.layers[number] = torch.compile(layer, backend="aot_eager")
            else:
                layer.compile(backend="aot_eager")

    if how != "shard, then compile":
        compile_them()
    longshore.shard(cut, optimizer, weight_bytes(cut) // 2)
    if how == "shard, then compile":
        compile_them()
    compiler.clear()
    train(cut, optimizer)
    assert not compiler["graph_break"]
    assert compiler["stats"]["unique_graphs"]
    for ours, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.detach().clone(), theirs)


def test_copies_and_files_are_whole() -> None:
    whole, cut = pair(Transformer, tied=True)
    optimizer, _ = in_units(cut, 3)
    file = io.BytesIO()
    torch.save(cut.state_dict(), file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(kept[name], value)
    copied = copy.deepcopy(cut.blocks[3])
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), whole.blocks[3].parameters(), strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
    views = [parameter.t() for parameter in cut.blocks[0].parameters()]
    cut.loss(0)
    for view, parameter in zip(views, whole.blocks[0].parameters(), strict=True):
        assert torch.equal(view.clone(), parameter.t()), "views of weights that have gone come again"


def test_a_copy_of_the_model_is_a_model_of_its_own(compiler: Any) -> None:
    whole, cut = pair(Deep, depth=4)
    _, home = in_units(cut, 2)
    copied = copy.deepcopy(cut)
    copied.layers[0].compile(backend="eager")
    assert copied.layers[0]._compiled_call_impl is not None and cut.layers[0]._compiled_call_impl is None
    fetched = home.fetched_bytes
    copied.loss(0).backward()
    assert home.fetched_bytes == fetched and all(parameter.grad is not None for parameter in copied.parameters())


def test_arrays_of_weights_have_memory_of_their_own() -> None:
    """An array of a weight, as for a logged histogram, keeps its values, and the budget holds."""
    model = Deep(depth=4, dtype=torch.float32)
    optimizer, home = in_units(model, 2)
    for step in range(2):
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        arrays = [make(parameter.detach()) for make in (Tensor.numpy, np.asarray, np.from_dlpack) for parameter in model.parameters()]
        with pytest.raises(RuntimeError, match="requires grad"):
            model.layers[0].weight.numpy()
        train(model, optimizer, steps=1, first=step)
        assert all(np.array_equal(array, weights) for array, weights in zip(arrays, 3 * expected, strict=True))
    assert home.peak_weight_bytes <= weight_bytes(model) // 2


def test_an_array_that_a_forward_makes_keeps_its_memory() -> None:
    """In a forward the weights are plain tensors, so the package cannot copy them for NumPy."""
    whole, cut = pair(Deep, depth=4)
    whole.float(), cut.float()
    whole.dtype = cut.dtype = torch.float32
    arrays = []
    cut.layers[1].register_forward_hook(lambda layer, *_: arrays.append(layer.weight.detach().numpy()))
    optimizer, _ = in_units(cut, 2)
    with pytest.warns(UserWarning, match=r"an array of NumPy has the memory of layers\.1\.weight.*\.clone\(\) before \.numpy\(\)"):
        train(cut, optimizer)
    train(whole, optimizer_of(whole))
    same(whole, cut)


def test_each_batch_of_an_evaluation_is_fetched_ahead() -> None:
    order, units = Order(), [Unit(str(index)) for index in range(5)]

    def batch() -> list[list[str]]:
        foreseen = []
        for unit in units:
            order.note(unit, counts=False)
            foreseen.append([found.name for found in order.upcoming(1)])
        return foreseen

    for unit in [*units, *reversed(units)]:
        assert order.note(unit, counts=True) or unit is units[-1]
    order.end()
    assert order.note(units[0], counts=False) and not order.note(units[0], counts=False), "two modules of one unit"
    assert [unit.name for unit in order.upcoming(2)] == ["1", "2"]
    order.end()
    first = batch()
    assert first[:4] == [["1"], ["2"], ["3"], ["4"]]
    for _ in range(3):
        # The first unit was also the last used one in backward. So its prediction differs, and only the later
        # predictions are compared.
        assert batch()[1:] == first[1:]
    order.note(units[0], counts=True)
    assert [unit.name for unit in order.upcoming(3)] == ["1", "2", "3"]
    order.note(units[1], counts=True)
    order.note(units[4], counts=False)
    order.note(units[2], counts=True)
    assert [unit.name for unit in order.upcoming(3)] == ["3", "4", "3"], "the step goes on from where it was"
