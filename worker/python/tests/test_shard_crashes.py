"""Uses of a model in units at which torch would read released memory. Each case runs in a child, so that a crash is one failed test."""

import copy
import dataclasses
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked import Forked
from torch import Tensor, nn
from units import Deep, in_units, optimizer_of, same, train, weight_bytes

import longshore
from longshore import errors


def twins(**options: Any) -> tuple[Deep, longshore.AdamW, Deep, longshore.AdamW]:
    """Returns a whole model and its copy in units, with a quarter of the weights resident."""
    torch.manual_seed(0)
    whole = Deep(depth=8)
    cut = copy.deepcopy(whole)
    return whole, optimizer_of(whole, **options), cut, in_units(cut, 4, **options)[0]


def new_weights_while_units_are_gathered() -> None:
    whole, plain, cut, optimizer = twins()
    train(whole, plain, 2)
    for act in (optimizer.step, optimizer.zero_grad):
        cut.loss(0).backward()
        with longshore.GatheredParameters(cut.layers[0].weight):
            with pytest.raises(errors.UsageError, match=r"unit layers\.0 is in use.*call step\(\).* after"):
                act()
            assert cut.layers[0].weight.isfinite().all()
        optimizer.zero_grad()
    train(cut, optimizer, 2)
    same(whole, cut)


class Looping(nn.Module):
    """A module that makes a step within its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, inputs: Tensor, step: Callable[[], object] | None = None) -> Tensor:
        if step is not None:
            (inputs @ self.weight).sum().backward()
            step()
        return inputs @ self.weight


def a_step_within_the_forward_of_a_unit() -> None:
    model = Looping()
    optimizer = optimizer_of(model)
    longshore.shard(model, optimizer, 2 * weight_bytes(model))
    with pytest.raises(errors.UsageError, match="in use"):
        model(torch.ones(2, 8), optimizer.step)
    optimizer.step()
    assert optimizer.version == 1 and model(torch.ones(2, 8)).isfinite().all()


@dataclasses.dataclass
class Output:
    hidden: Tensor
    #: A container that contains itself.
    views: list[Any]


class Showing(nn.Module):
    """Returns views of its weights, in a container."""

    def __init__(self, contain: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.contain = nn.Linear(8, 8), contain

    def forward(self, hidden: Tensor) -> Any:
        return self.contain(self.inner(hidden), self.inner.weight.t())


def _looped(hidden: Tensor, view: Tensor) -> Output:
    views: list[Any] = [{"view": view}]
    views.append(views)
    return Output(hidden, views)


def views_in_containers() -> None:
    ways: list[tuple[Callable[..., Any], Callable[[Any], Tensor]]] = [
        (lambda hidden, view: {"hidden": hidden, "view": view}, lambda output: output["view"]),
        (lambda hidden, view: (hidden, ([view],)), lambda output: output[1][0][0]),
        (_looped, lambda output: output.views[0]["view"]),
    ]
    for contain, view_of in ways:
        whole = nn.ModuleList(Showing(contain) for _ in range(8))
        cut = copy.deepcopy(whole)
        in_units(cut, 4)
        views, expected = ([view_of(block(torch.ones(2, 8))) for block in model] for model in (cut, whole))
        assert all(map(torch.equal, views, expected))


def weights_in_hooks_of_a_backward_for_given_weights() -> None:
    """``torch.autograd.grad`` and ``backward(inputs=)`` run whole passes, of which hooks are a part."""
    whole, plain, cut, optimizer = twins()
    for model, used in ((whole, plain), (cut, optimizer)):
        for step in range(2):
            hidden = model(model.inputs(step).requires_grad_())
            hidden.register_hook(lambda gradient, model=model: gradient * model.layers[1].weight.sum())
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(hidden.float().square().mean(), parameters, retain_graph=True)
            (hidden.float().mean() + sum(gradient.sum() for gradient in gradients)).backward(inputs=parameters)
            used.step()
            used.zero_grad()
    same(whole, cut)


def memory_that_leaves_unseen() -> None:
    *_, cut, _ = twins()

    class Other(Tensor):
        pass

    weight = cut.layers[0].weight
    with pytest.raises(errors.UsageError, match=r"layers\.0\.weight is of Other.*a plain Tensor.*\.clone\(\)"):
        weight.as_subclass(Other)
    with pytest.raises(errors.UsageError, match=r"layers\.0\.weight is given shared memory.*state_dict\(\)"):
        cut.share_memory()
    alias = weight.as_subclass(Tensor)
    cut.loss(0)
    assert torch.equal(alias, weight) and weight.clone().as_subclass(Other).isfinite().all()


def two_threads() -> None:
    whole, plain, cut, optimizer = twins()
    train(whole, plain, 2)
    in_forward, refused = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        in_forward.set()
        refused.wait(60)

    cut.layers[3].register_forward_hook(wait)

    def evaluate() -> None:
        in_forward.wait(60)
        with torch.no_grad(), pytest.raises(errors.UsageError, match=r"another thread uses it now.*join\(\)"):
            cut.loss(5)
        with pytest.raises(errors.UsageError, match="another thread uses it now"):
            cut.layers[0].weight.sum()
        with pytest.raises(errors.UsageError, match="another thread uses it now"):
            optimizer.step()
        refused.set()

    beside = threading.Thread(target=evaluate)
    beside.start()
    train(cut, optimizer, 2)
    assert refused.is_set()
    beside.join()
    after = threading.Thread(target=lambda: train(cut, optimizer, 1, first=2))
    after.start()
    after.join()
    train(whole, plain, 1, first=2)
    same(whole, cut)


CASES = [
    new_weights_while_units_are_gathered,
    a_step_within_the_forward_of_a_unit,
    views_in_containers,
    weights_in_hooks_of_a_backward_for_given_weights,
    memory_that_leaves_unseen,
    two_threads,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_released_memory_is_not_read(case: Callable[[], None]) -> None:
    child = Forked(f"import conftest, test_shard_crashes; test_shard_crashes.{case.__name__}()", stderr=subprocess.PIPE)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
