"""Unsupported uses of a model in units are refused by name, with a remedy, before anything goes wrong."""

import contextlib
import copy
import dataclasses
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked import Forked
from models import pair
from torch import Tensor, nn
from units import Deep, in_units, optimizer_of, same, train, weight_bytes

import longshore
from longshore import errors
from longshore.units import model as _model
from longshore.units.fetching import Fetcher


def deep(**options: object) -> tuple[Deep, longshore.AdamW, int]:
    torch.manual_seed(0)
    model = Deep(depth=8)
    return model, optimizer_of(model, **options), weight_bytes(model)


def cut(part: int, **options: object) -> tuple[Deep, longshore.AdamW, longshore.Sharded]:
    """Returns a model in units, with this part of its weights resident, a half for 2."""
    model, optimizer, size = deep(**options)
    return model, optimizer, longshore.shard(model, optimizer, size // part)


def test_a_model_is_in_units_once() -> None:
    model, optimizer, _ = cut(1)
    with pytest.raises(errors.UsageError, match=r"layers\.0\.weight is in unit layers\.0 already.*call shard\(\) once"):
        longshore.shard(model, optimizer, weight_bytes(model))
    with pytest.raises(errors.UsageError, match="the model is in units: build its optimizer"):
        longshore.AdamW(model.named_parameters()).open()


def test_the_optimizer_must_stream_and_be_of_this_package() -> None:
    model, _, size = deep()
    with pytest.raises(errors.UsageError, match="optimizer is AdamW.*use longshore.AdamW"):
        longshore.shard(model, torch.optim.AdamW(model.parameters()), size)
    with pytest.raises(errors.UsageError, match="streaming is False.*streaming=True"):
        longshore.shard(model, longshore.AdamW(model.named_parameters()), size)
    other, _ = pair("mlp")
    with pytest.raises(errors.UsageError, match="a parameter of the optimizer, and of no module of the model"):
        longshore.shard(model, optimizer_of(other), size)


def test_a_forked_worker_is_told_what_helps() -> None:
    """A DataLoader's worker has no connection to servers, and neither flush() nor another place of the optimizer gives it one."""
    model, optimizer, _ = cut(2)
    train(model, optimizer, 1)
    child = os.fork()
    if child == 0:
        try:
            model.loss(0)
        except errors.UsageError as error:
            os._exit(0 if "num_workers=0" in str(error) and "state_dict()" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(model, optimizer, 1, first=1)
    assert optimizer.flush() == 2


@pytest.mark.parametrize(
    ("units", "said"),
    [
        ("blocks.*", "units is 'blocks.*'.*print"),
        (nn.Conv2d, "units is Conv2d"),
        (["layers", "layers.3"], r"units is layers and layers\.3.*leave out"),
    ],
)
def test_units_that_cannot_be(units: object, said: str) -> None:
    model, optimizer, size = deep()
    with pytest.raises(errors.InvalidError, match=said):
        longshore.shard(model, optimizer, size, units=units)


@pytest.mark.parametrize(
    ("text", "found"),
    [("2TiB", 2 << 40), ("1.5 TB", 1_500_000_000_000), (".5KiB", 512), ("1.MB", 10**6), *((text, None) for text in ("1.2.3GiB", ".", "GiB", "1XB"))],
)
def test_budgets_in_words(text: str, found: int | None) -> None:
    with contextlib.nullcontext() if found else pytest.raises(errors.InvalidError, match="budget is .* write it as"):
        assert _model.budget(text) == found


def test_budgets_that_cannot_be() -> None:
    model, optimizer, size = deep()
    for budget, said in ((None, "given on a CPU"), ("8 apples", "a number of bytes"), ("-1GiB", "write it as"), ("0GiB", "above 0"), (0, "above 0")):
        with pytest.raises(errors.InvalidError, match=f"budget is .*{said}"):
            longshore.shard(model, optimizer, budget)
    with pytest.raises(errors.InvalidError, match=r"unit layers\.\d has 4704 bytes of weights, and gradients take up to 4704"):
        longshore.shard(model, optimizer, 9000)
    with pytest.raises(errors.InvalidError, match="unit layers has .*name smaller units, or raise the budget by"):
        longshore.shard(model, optimizer, size, units="layers")
    longshore.shard(model, optimizer, "9.5 kB")


def test_writes_that_would_be_lost() -> None:
    model, optimizer, _ = cut(2)
    weight = model.layers[2].weight
    with torch.no_grad(), pytest.raises(errors.UsageError, match=r"layers\.2\.weight of unit layers\.2 was changed in place"):
        weight.zero_()
    with pytest.raises(errors.UsageError, match="changed in place"):
        weight.data.normal_()
    with pytest.raises(errors.UsageError, match="changed in place"):
        nn.init.ones_(model.layers[3].bias)
    assert weight.abs().sum() > 0, "it comes again as the servers have it"
    with pytest.raises(errors.UsageError, match=r"got other memory after shard\(\)"):
        model.to(torch.float32)
    model.to("cpu")


def test_a_model_that_has_changed() -> None:
    model, optimizer, _ = cut(2)
    train(model, optimizer, steps=1)
    model.layers[5].bias = nn.Parameter(torch.zeros(48, dtype=torch.bfloat16))
    with pytest.raises(errors.LongshoreError, match=r"layers\.5\.bias is out of the model, which has another parameter in its place"):
        train(model, optimizer, steps=1, first=1)


def test_backward_after_the_step() -> None:
    model, optimizer, _ = cut(2)
    late = model.loss(5)
    train(model, optimizer, steps=1)
    with pytest.raises(errors.UsageError, match=r"backward needs layers\.\d\.weight .* before the last step.*before step\(\)"):
        late.backward()


def test_weights_of_a_delayed_step_after_its_gradients() -> None:
    """As soon as servers have a step's gradients, the next weights overwrite those of the step before last."""
    model, optimizer, _ = cut(2, delay=1, warmup_steps=0)
    train(model, optimizer, steps=2)
    model.loss(2).backward()
    with pytest.raises(errors.UsageError, match=r"is used after its gradient has left.*call step\(\) of the"), torch.no_grad():
        model.loss(3)
    optimizer.step()
    with torch.no_grad():
        model.loss(3)


def test_two_units_at_a_time_need_room_for_two() -> None:
    model, optimizer, _ = deep()
    unit = weight_bytes(model.layers[0])
    longshore.shard(model, optimizer, 2 * unit)
    with pytest.raises(errors.ShortageError, match="in use by layers.*raise the budget, or name smaller units"):
        torch.mm(model.layers[0].weight, model.layers[1].weight)
    train(model, optimizer, steps=2)


def test_a_fetch_that_fails_leaves_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a timeout or Ctrl-C during a fetch, the next use fetches the missing weights again."""
    model, optimizer, sharded = cut(2)
    before = model.layers[2].weight.tolist()
    sharded.release()
    fetched = sharded.fetched_bytes
    with monkeypatch.context() as patch:
        patch.setattr(Fetcher, "_places", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.layers[2].weight.sum()
    assert (sharded.resident, sharded.weight_bytes, sharded.fetched_bytes) == ([], 0, fetched)
    assert model.layers[2].weight.tolist() == before


def test_a_backward_that_raises_keeps_nothing_here() -> None:
    model, optimizer, sharded = cut(1)
    hidden = model.layers[0](model.inputs(0))

    def fails(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    hidden.register_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        model.layers[2](model.layers[1](hidden)).sum().backward()
    assert sharded.weight_bytes > 0
    assert not any(unit.pins for unit in sharded._home.units)
    sharded.release()
    assert (sharded.resident, sharded.weight_bytes) == ([], 0)


@pytest.mark.parametrize("transform", ["torch.func", "no hooks"])
def test_a_forward_where_torch_allows_no_hooks_keeps_nothing_here(transform: str) -> None:
    model, optimizer, sharded = cut(4)
    with pytest.raises(errors.UsageError, match=r"use torch\.autograd\.grad .*torch says: .*"):
        if transform == "torch.func":
            torch.func.grad(lambda inputs: model(inputs).sum())(model.inputs(0))
        else:
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                model.loss(0)
    assert not any(unit.pins or unit.runs for unit in sharded._home.units)
    train(model, optimizer, 1)


class Stops(nn.Module):
    """A layer that is called within its own call. On request, Ctrl-C ends it there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 48, dtype=torch.bfloat16)
        self.own = nn.Parameter(torch.ones(48, dtype=torch.bfloat16))
        self.stops = False

    def forward(self, hidden: Tensor, again: bool = True) -> Tensor:
        hidden = self(hidden, again=False) if again else self.inner(hidden)
        if self.stops:
            raise KeyboardInterrupt
        return hidden * self.own


@pytest.mark.parametrize("how", ["next call", "step", "release"])
def test_ctrl_c_in_a_forward_keeps_no_unit_here(how: str) -> None:
    """Torch calls no hook at the end of an interrupted call."""
    models = []
    for is_interrupted in (False, True):
        torch.manual_seed(0)
        model = Deep(depth=4)
        model.layers[1] = Stops()
        optimizer = optimizer_of(model)
        sharded = longshore.shard(model, optimizer, weight_bytes(model), units=Stops)
        units = sharded._home.units
        if how == "step":
            model.loss(0).backward()
        if is_interrupted:
            model.layers[1].stops = True
            with pytest.raises(KeyboardInterrupt):
                model.loss(0)
            assert any(unit.pins for unit in units)
            model.layers[1].stops = False
        if how == "release":
            sharded.release()
            assert (sharded.resident, sharded.weight_bytes) == ([], 0)
        elif how == "step":
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.layers[0](model.inputs(0))
        assert not any(unit.pins or unit.runs for unit in units)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        train(model, optimizer, 3)
        assert not any(unit.pins or unit.runs for unit in units)
        optimizer.close()
        models.append(model)
    same(*models)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


# At these uses torch would read released memory. Each case runs in a child process, so that a crash fails one test
# only.


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
    #: A list that contains itself.
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
    child = Forked(f"import conftest, test_shard_errors; test_shard_errors.{case.__name__}()", stderr=subprocess.PIPE)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
