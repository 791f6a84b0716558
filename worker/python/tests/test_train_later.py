"""Gradual unfreezing: parameters frozen at the first step train later. A rank runs train_later_rank.py."""

import pathlib
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import running, several
from forked import Forked
from models import distance, same_bits
from test_ranks import run
from torch import Tensor, nn
from train_later_rank import LAYER, STEPS, TRAINS, Net, loss, set_trained, train

import longshore
from longshore import errors

LATER: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1, "frozen": "train-later"}
#: By name of a mode of training: the optimizer's options.
MODES: dict[str, dict[str, Any]] = {
    "safe": {},
    "streaming": {"streaming": True},
    "delayed": {"delay": 1, "warmup_steps": 3},
    "streaming delayed": {"streaming": True, "delay": 1, "warmup_steps": 3},
    "servers accumulate": {"streaming": True, "accumulate": 3},
    "worker accumulates": {"streaming": True, "accumulate": 3, "accumulate_on": "worker"},
    "bf16": {"streaming": True, "state": "bf16", "image_dtype": "bf16"},
}


def later(of: nn.Module, **options: Any) -> longshore.AdamW:
    """Returns an optimizer of a model that is frozen as in the first step."""
    set_trained(of, 0)
    optimizer = longshore.AdamW(of.named_parameters(), **{**LATER, **options})
    if "state" in options:
        optimizer.open()  # servers round the weights, and the first forward needs the rounded ones
    return optimizer


def watched(of: nn.Module, **options: Any) -> longshore.AdamW:
    """Returns an optimizer of the same job, whose parameters merely lack gradients in some steps."""
    optimizer = longshore.AdamW(of.named_parameters(), **{**LATER, "frozen": "leave", **options})
    optimizer.open()
    return optimizer


def trained(kind: Callable[..., longshore.AdamW], **options: Any) -> nn.Module:
    """Returns a model after all steps."""
    model = Net()
    optimizer = kind(model, **options)
    train(model, optimizer, range(STEPS), options.get("accumulate", 1))
    optimizer.close()
    return model


@pytest.mark.parametrize("mode", MODES)
def test_what_is_frozen_is_left_out_until_it_has_a_gradient(mode: str) -> None:
    options = MODES[mode]
    passes = options.get("accumulate", 1)
    ours = trained(later, **options)
    assert same_bits(ours, trained(watched, **options))
    if mode in ("safe", "streaming") or passes > 1:
        theirs = Net()
        train(theirs, torch.optim.AdamW(theirs.parameters(), lr=3e-4, weight_decay=0.1), range(STEPS), passes)
        assert distance(ours, theirs) < 1e-6


def test_a_gradient_leaves_in_the_backward_that_makes_it_first() -> None:
    model = Net()
    optimizer = later(model, streaming=True)
    steps = iter(range(STEPS))
    for step in steps:
        set_trained(model, step)
        loss(model, step).backward()
        # Where a layer is the first to train, no hook sees its first gradients before the step.
        left = {index for index, layer in enumerate(model.layers) if layer.weight.grad is not None}
        assert left == (TRAINS[step] if step == 4 else set()), step
        optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("streaming", [False, True])
def test_all_may_be_frozen_when_the_optimizer_is_built(streaming: bool) -> None:
    ours, theirs = Net().requires_grad_(False), Net()
    optimizer = longshore.AdamW(ours.named_parameters(), streaming=streaming, **LATER)
    optimizer.step()
    assert optimizer.version == 0
    train(ours, optimizer, range(2))
    optimizer.close()
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=3e-4, weight_decay=0.1), range(2))
    assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("delay", [0, 1])
def test_units_have_the_bits_of_the_model_in_one_piece(delay: int) -> None:
    def in_units(of: nn.Module, **options: Any) -> longshore.AdamW:
        optimizer = later(of, streaming=True, **options)
        assert len(longshore.shard(of, optimizer, budget=3 * LAYER).units) == 4
        return optimizer

    delayed = {"delay": delay, "warmup_steps": 3}
    assert same_bits(trained(in_units, **delayed), trained(later, **delayed))


def test_a_model_of_init_may_be_frozen_in_part() -> None:
    with longshore.Init(budget="100KiB"):
        model = Net()
    optimizer = later(model, streaming=True)
    longshore.shard(model, optimizer, budget=3 * LAYER)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, range(4))
    moved = {place // 2 for place, parameter in enumerate(model.parameters()) if not torch.equal(parameter, before[place])}
    assert moved == {1, 2}


KILLED = """
import os, signal, torch
torch.set_num_threads(1)
from test_train_later import *
model = Net()
optimizer = later(model, servers={servers!r}, job="killed", streaming=True)
train(model, optimizer, range(3))
set_trained(model, 3)
loss(model, 3).backward()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_finds_the_job_goes_on_to_the_bit(servers: str) -> None:
    """The set of parameters that require a gradient in the new process does not matter. The first process is killed when a step's gradients
    have left."""
    killed = Forked(KILLED.format(servers=servers))
    assert killed.wait(timeout=120) == -signal.SIGKILL
    options = {**LATER, "servers": servers, "job": "killed"}
    for first, end, as_in, streaming in ((3, 6, 9, True), (6, STEPS, 0, False)):
        model = Net(seed=first)
        set_trained(model, as_in)
        optimizer = longshore.AdamW(model.named_parameters(), streaming=streaming, **options)
        assert optimizer.version == first
        train(model, optimizer, range(first, end))
        optimizer.close()
    assert same_bits(model, trained(later))


WAYS = ("sum", "scatter", "fsdp", "ddp")
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{way} {kind}": (way, {"watched": kind == "watched"}) for way in WAYS for kind in ("later", "watched")},
    **{f"{way} streaming": (way, {"streaming": True}) for way in ("sum", "fsdp")},
    "scatter units": ("scatter", {"streaming": True, "budget": 12 * LAYER}),
    "scatter first": ("scatter", {"job": "parted", "steps": 6}),
    "scatter then": ("scatter", {"job": "parted", "first": 6, "seed": 1, "frozen as in": 0}),
    "unreduced": ("unreduced", {}),
}
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Returns each of two ranks' results."""
    with several(2, "1GiB") as servers:
        given = [(way, {"job": name.replace(" ", "-"), **options, "servers": servers}) for name, (way, options) in RUNS.items()]
        found = run(tmp_path_factory.mktemp("ranks"), given, 2, "train_later_rank.py")
    return dict(zip(RUNS, found, strict=True))


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith((" later", " streaming", " units", " then"))])
def test_ranks_train_later_in_every_way(ranks: Found, name: str) -> None:
    expected: list[Tensor] = ranks[f"{name.split()[0]} watched"][0]["weights"]
    for rank in ranks[name]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(rank["weights"], expected, strict=True))


def test_gradients_that_ranks_do_not_reduce_are_refused_where_they_begin(ranks: Found) -> None:
    for rank in ranks["unreduced"]:
        assert rank["version"] == 2
        assert "layers.1.weight.grad is another on rank 1 than on rank 0" in rank["error"]


def test_a_state_of_torch_has_none_of_what_does_not_train_yet() -> None:
    ours, theirs = Net(), Net()
    set_trained(theirs, 0)
    plain = torch.optim.AdamW(theirs.named_parameters(), lr=3e-4, weight_decay=0.1)
    train(theirs, plain, range(2))
    ours.load_state_dict(theirs.state_dict())
    set_trained(ours, 1)
    optimizer = longshore.AdamW(ours.named_parameters(), **LATER)
    optimizer.load_state_dict(plain.state_dict())
    train(ours, optimizer, range(2, STEPS))
    train(theirs, plain, range(2, STEPS))
    assert distance(ours, theirs) < 1e-6
    full, expected = optimizer.state_dict(full=True)["state"], plain.state_dict()["state"]
    assert [float(full[place]["step"]) for place in full] == [float(expected[place]["step"]) for place in full]


def test_an_engine_saves_and_goes_back_with_what_is_frozen(tmp_path: pathlib.Path) -> None:
    """Weights in a checkpoint of the servers are not written beside it. Leaving out is the default in place of DeepSpeed's zeros."""
    with running("--checkpoint-dir", str(tmp_path / "kept")) as servers:
        model, other = Net(), Net(seed=1)
        job = {"servers": servers, "job": "engine", "frozen": "train-later"}
        config = {"gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}}, "longshore": job}

        def steps(engine: longshore.Engine, numbers: range) -> None:
            for number in numbers:
                set_trained(engine.module, number)
                engine.backward(loss(engine.module, number))
                engine.step()

        set_trained(model, 0)
        engine = longshore.initialize(model=model, config=config)[0]
        steps(engine, range(6))
        engine.save_checkpoint(str(tmp_path / "saved"))
        assert torch.load(tmp_path / "saved" / "global_step6" / "engine.pt", weights_only=True)["module"] == {}
        steps(engine, range(6, 8))
        engine.optimizer.close()
        back = longshore.initialize(model=other, config=config)[0]
        with pytest.warns(UserWarning, match="goes back from version 8 to 6"):
            back.load_checkpoint(str(tmp_path / "saved"))
        steps(back, range(6, STEPS))
        back.optimizer.close()
        assert same_bits(other, trained(later))


def test_nothing_is_said_of_what_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = longshore.AdamW(model.named_parameters(), frozen="train-later")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(101):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state": "block8"}, "state is 'block8', but must be 'fp32' or 'bf16' with frozen='train-later'"),
        ({"missing_gradients": "zeros"}, "missing_gradients is 'zeros', but must be 'skip' with frozen='train-later'"),
    ],
)
def test_what_cannot_leave_parameters_out_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidError, match=said):
        later(Net(), **options)


def test_what_no_server_could_keep_is_named_while_it_is_frozen() -> None:
    odd = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
    with pytest.raises(errors.InvalidError, match=r"odd is torch\.float64"):
        longshore.AdamW([*Net().named_parameters(), ("odd", odd)], **LATER)


@pytest.mark.parametrize("frozen", ["leave", "keep"])
@pytest.mark.parametrize("streaming", [False, True])
def test_unfreezing_without_the_option_is_refused_by_name(frozen: str, streaming: bool) -> None:
    model = Net()
    optimizer = later(model, frozen=frozen, streaming=streaming)
    with pytest.raises(errors.UsageError, match=r"layers\.1\.weight is trained now.*frozen='train-later'"):
        train(model, optimizer, range(5))
    assert optimizer.version == 2


def test_a_group_that_is_added_later_is_told_of_the_option() -> None:
    model = Net()
    optimizer = later(model)
    train(model, optimizer, range(1))
    with pytest.raises(errors.UsageError, match=r"after the job was opened.*all groups when it is built.*frozen='train-later'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_a_layer_that_is_replaced_while_it_is_frozen_is_named() -> None:
    model = Net()
    optimizer = later(model)
    optimizer.watch(model)
    model.layers[0] = nn.Linear(144, 144)
    with pytest.raises(errors.UsageError, match=r"layers\.0\.weight is out of the model"):
        train(model, optimizer, range(1))
