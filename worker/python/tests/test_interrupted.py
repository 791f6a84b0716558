"""An exception interrupts a step in streaming mode, after some of its gradients have left for the servers."""

import contextlib
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from models import engine_of, same_bits, train_engine
from torch import nn

import longshore
from longshore import errors
from longshore.optimizer.connection import Connection
from longshore.optimizer.step import Stepping
from longshore.transfer.weights import Weights


#: Folder of the package's sources.
PACKAGE = str(Path(longshore.__file__).parent)


class Interrupted(torch.autograd.Function):
    """Interrupts a backward pass, as Ctrl-C does."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, _: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


class Net(nn.Sequential):
    """Two layers. Another library's hook, before the optimizer's, may raise once the last layer's gradients have left."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))
        self.raises = False
        self[0].bias.register_post_accumulate_grad_hook(self._hook)

    def loss(self, batch: int) -> torch.Tensor:
        return self(inputs(batch)).square().mean()

    def _hook(self, _: torch.Tensor) -> None:
        if self.raises:
            raise KeyboardInterrupt


def inputs(batch: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(batch))


Disturb = Callable[[Net, Any], None]


def in_backward(model: Net, optimizer: Any) -> None:
    """The last layer's gradients have left, and the first layer's are never made."""
    with pytest.raises(KeyboardInterrupt):
        model[1](Interrupted.apply(model[0](inputs(99)))).sum().backward()


def after_backward(model: Net, optimizer: Any) -> None:
    model(inputs(99)).sum().backward()


def in_a_hook(model: Net, optimizer: Any) -> None:
    model.raises = True
    with pytest.raises(KeyboardInterrupt):
        model.loss(99).backward()
    model.raises = False


def before_the_commit(model: Net, optimizer: Any) -> None:
    """A wrong rate is refused before anything leaves. An exception of the caller's own function comes between the gradients and their
    commit."""
    group = optimizer.param_groups[0]
    model.loss(3).backward()
    for name in ("lr", "weight_decay", "dampening"):
        right, group[name] = group[name], float("inf")
        with pytest.raises(errors.InvalidError, match=name.split("_")[0]):
            optimizer.step()
        group[name] = right
    optimizer.resume_data = interrupted
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.resume_data = None


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def zero_grad(optimizer: longshore.AdamW) -> None:
    optimizer.zero_grad()


def flush(optimizer: longshore.AdamW) -> None:
    assert optimizer.flush() == 3


def trained(disturb: Disturb, kind: Any = longshore.AdamW, **options: Any) -> Net:
    """Returns a model after six steps, disturbed after three."""
    model = Net()
    optimizer = kind(model.named_parameters(), **{"lr": 1e-2, "streaming": True, "warmup_steps": 1, **options})
    for batch in range(6):
        if batch == 3:
            optimizer.flush()
            disturb(model, optimizer)
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
    assert optimizer.flush() == 6
    return model


def check(disturb: Disturb, **options: Any) -> None:
    assert same_bits(trained(lambda *_: None, **options), trained(disturb, **options))


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("interrupt", "give_up"), [(in_backward, zero_grad), (in_backward, flush), (after_backward, zero_grad), (in_a_hook, flush)]
)
def test_an_interrupted_step_is_given_up(interrupt: Disturb, give_up: Callable[[longshore.AdamW], None], delay: int) -> None:
    check(lambda *given: (interrupt(*given), give_up(given[1])), delay=delay)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_step_that_was_not_committed_is_given_up(delay: int, streaming: bool) -> None:
    options = {"kind": longshore.SGD, "momentum": 0.9, "streaming": streaming, "delay": delay}
    check(lambda *given: (before_the_commit(*given), flush(given[1])), **options)


@pytest.mark.parametrize("give_up", [zero_grad, flush])
@pytest.mark.parametrize(("of", "name"), [(Weights, "give_up"), (Connection, "start"), (Connection, "read"), (Stepping, "_stream_anew")])
def test_giving_up_may_be_interrupted(
    of: type, name: str, give_up: Callable[[longshore.AdamW], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturb(model: Net, optimizer: longshore.AdamW) -> None:
        in_backward(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(of, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.zero_grad()
        for act in (lambda: model(inputs(3)).sum().backward(), optimizer.step):
            with pytest.raises(errors.UsageError, match=r"joining its job again was interrupted: call zero_grad\(\) or flush\(\)"):
                act()
        give_up(optimizer)

    check(disturb)


class AtLine:
    """Interrupts the package's Python code once it has run so many lines, as a signal's handler may at each of them. CPython runs no handler
    between a block and the ``__exit__`` of its ``with``, whose line comes again there."""

    def __init__(self, lines: int) -> None:
        self.left = lines

    def __enter__(self) -> "AtLine":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("options", [{"streaming": False}, {"layerwise": True}, {"layerwise": False}, {"accumulate": 2}], ids=str)
def test_a_step_may_be_interrupted_at_any_line(options: dict[str, Any]) -> None:
    """A decided step counts once, and another one is made again from its first gradient."""

    def step(model: Net, optimizer: longshore.AdamW) -> None:
        optimizer.zero_grad()
        for part in range(passes):
            model.loss(passes * optimizer.version + part).backward()
        optimizer.step()
        optimizer.flush()

    passes = options.get("accumulate", 1)
    whole, model = Net(), Net()
    ours, undisturbed = (longshore.AdamW(net.named_parameters(), lr=1e-2, **{"streaming": True, **options}) for net in (model, whole))
    step(model, ours)
    line, is_interrupted = 0, True
    while is_interrupted:
        line += 3
        try:
            with AtLine(line):
                step(model, ours)
            is_interrupted = False
        except KeyboardInterrupt:
            ours.flush()
            ours.zero_grad()
    assert line > 100
    for _ in range(ours.flush()):
        step(whole, undisturbed)
    assert same_bits(whole, model)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"delay": 1, "warmup_steps": 2}], ids=str)
def test_a_clients_step_may_be_interrupted_at_any_line(options: dict[str, Any]) -> None:
    """Giving a step up may be interrupted, too."""

    def step(client: longshore.Client) -> None:
        weights = client.pull()
        for part in range(options.get("accumulate", 1)):
            for name, weight in weights.items():
                client.push({name: weight + client.step + part})
        client.commit()

    first = {name: np.ones(4, np.float32) for name in "ab"}
    disturbed, whole = (longshore.Client(first, longshore.Hyper(lr=1e-2), **options) for _ in range(2))
    line, is_interrupted = 0, True
    while is_interrupted:
        line += 1
        try:
            with AtLine(line):
                step(disturbed)
                is_interrupted = False
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt), AtLine(line % 20 + 1):
                disturbed.zero_grad()
            disturbed.zero_grad()
    assert line > 60
    for _ in range(disturbed.step):
        step(whole)
    assert disturbed.state_hash() == whole.state_hash()
    disturbed.flush()
    whole.flush()
    assert all(map(np.array_equal, disturbed.pull().values(), whole.pull().values()))


def test_a_client_of_several_ranks_gives_no_step_up(servers: str) -> None:
    gradient = np.ones(4, np.float32)
    with longshore.Client({"a": gradient}, longshore.Hyper(lr=1e-3), servers=servers, job="two", rank=0, world_size=2) as client:
        client.zero_grad()  # nothing has left
        client.push({"a": gradient})
        with pytest.raises(errors.UsageError, match="end all ranks and start them again"):
            client.zero_grad()


def test_a_push_that_an_interrupt_hid_says_how_to_go_on() -> None:
    gradient = torch.ones(4).numpy()
    with longshore.Client({"a": gradient, "b": gradient}, hyper=longshore.Hyper(lr=1e-3)) as client:
        client.push({"a": gradient})
        client._pushed.clear()  # as if Ctrl-C had come between the push and its note
        with pytest.raises(errors.UsageError, match=r"interrupted.*flush\(\) and zero_grad\(\), and compute it again"):
            client.push({"a": gradient})
        client.zero_grad()
        client.push({"a": gradient})
        assert client.commit() == 1


@pytest.mark.parametrize("is_in_units", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"layerwise": False}, {"accumulate": 2}, {"image_dtype": "bf16"}, {"delay": 1, "warmup_steps": 1}], ids=str
)
def test_a_step_is_given_up_between_forward_and_backward(options: dict[str, Any], is_in_units: bool) -> None:
    """In PyTorch's tutorials zero_grad() comes after forward, which has used the weights. The other linear layer is not used each time."""
    models = []
    for is_left_out in (False, True):
        model = nn.ModuleList([Net(), nn.Linear(8, 8)])
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, **options)
        if is_in_units:
            longshore.shard(model, optimizer, "1MB")
        for batch in range(6):
            if batch in (2, 4) and is_left_out:
                model[0](inputs(99)).sum().backward()
            loss = model[0].loss(batch) + (model[1](inputs(batch)).sum() if batch % 2 else 0.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert optimizer.flush() == 6
        models.append(model)
    assert same_bits(*models)


def test_a_flush_between_forward_and_backward_leaves_used_weights() -> None:
    model = nn.ModuleList([Net(), nn.Linear(8, 40_000)])  # the second is in a chunk of its own, and still awaited
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True)
    for batch in range(4):
        loss = model[0].loss(batch)
        assert optimizer.flush() == batch
        loss.backward()
        optimizer.step()


def test_flush_leaves_a_whole_backward_pass_to_its_step() -> None:
    model = Net()
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True)
    model.loss(0).backward()
    optimizer.flush()
    optimizer.step()
    assert optimizer.flush() == 1


def engines(accumulate: int) -> list[longshore.Engine]:
    return [engine_of(Net(), gradient_accumulation_steps=accumulate, gradient_clipping=1.0) for _ in range(2)]


def counts(engine: longshore.Engine) -> tuple[int, int]:
    return engine.global_steps, engine.micro_steps


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize(("accumulate", "before"), [(1, 2), (2, 4), (2, 5)])
def test_an_engine_gives_an_interrupted_step_up(accumulate: int, before: int, scales: bool) -> None:
    """The loop continues with that step's passes, as if nothing had happened."""
    engine, undisturbed = engines(accumulate)
    train_engine(engine, range(before))
    loss = engine.module[1](Interrupted.apply(engine.module[0](inputs(99)))).sum()
    with pytest.raises(KeyboardInterrupt):
        engine.scale(loss).backward() if scales else engine.backward(loss)
    # The engine does not see a backward pass that the loop calls itself, until there are too many passes.
    if not scales or accumulate == 1:
        with pytest.raises(errors.UsageError, match=r"interrupted.*zero_grad\(\)|zero_grad\(\) where one was interrupted"):
            engine.backward(engine(inputs(0)).sum())
    if not scales:
        with pytest.raises(errors.UsageError, match=r"interrupted.*engine\.zero_grad\(\)"):
            engine.step()
    engine.zero_grad()
    train_engine(engine, range(before - before % accumulate, 8))
    train_engine(undisturbed, range(8))
    for one in (engine, undisturbed):
        assert counts(one) == (8 // accumulate, 8)
        one.optimizer.flush()
    assert same_bits(engine.module, undisturbed.module)


@pytest.mark.parametrize("by_the_optimizer", [False, True])
def test_an_engine_warns_where_whole_passes_are_given_up(by_the_optimizer: bool) -> None:
    engine, other = engines(2)
    train_engine(engine, range(1))
    with pytest.warns(UserWarning, match="gives up 1 of the 2 backward passes"):
        # An interrupted step that the optimizer's zero_grad() gave up is noticed by the engine in the next pass.
        (engine.optimizer if by_the_optimizer else engine).zero_grad()
        train_engine(engine, range(2))
    assert counts(engine) == (1, 2)
    train_engine(other, range(2))
    assert same_bits(engine.module, other.module)
