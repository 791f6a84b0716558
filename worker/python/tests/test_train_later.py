"""Gradual unfreezing: parameters frozen at the first step train later. A rank runs rank.py."""

import pathlib
import signal
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from conftest import running, several
from forked import Forked
from models import distance, same_bits
from rank import Later, net
from test_ranks import Found, are_equal, run_named
from torch import nn

import longshore
from longshore import errors

LATER: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1, "frozen": "train-later"}
STEPS = 12
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


def train(model: Later, optimizer: torch.optim.Optimizer, steps: range, passes: int = 1) -> None:
    for step in steps:
        model.set_trained(step)
        models.train(model, optimizer, range(step, step + 1), passes)


def later(of: Later, **options: Any) -> longshore.AdamW:
    """Returns an optimizer of a model that is frozen as in the first step."""
    of.set_trained(0)
    optimizer = longshore.AdamW(of.named_parameters(), **{**LATER, **options})
    if "state" in options:
        optimizer.open()  # servers round the weights, and the first forward needs the rounded ones
    return optimizer


def watched(of: Later, **options: Any) -> longshore.AdamW:
    """Returns an optimizer of the same job, whose parameters merely lack gradients in some steps."""
    optimizer = longshore.AdamW(of.named_parameters(), **{**LATER, "frozen": "leave", **options})
    optimizer.open()
    return optimizer


def trained(kind: Callable[..., longshore.AdamW], **options: Any) -> nn.Module:
    """Returns a model after all steps."""
    model = net("later")
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
        theirs = net("later")
        train(theirs, torch.optim.AdamW(theirs.parameters(), lr=3e-4, weight_decay=0.1), range(STEPS), passes)
        assert distance(ours, theirs) < 1e-6


def test_a_gradient_leaves_in_the_backward_that_makes_it_first() -> None:
    model = net("later")
    optimizer = later(model, streaming=True)
    steps = iter(range(STEPS))
    for step in steps:
        model.set_trained(step)
        model.loss(step).backward()
        # Where a layer is the first to train, no hook sees its first gradients before the step.
        left = {index for index, layer in enumerate(model.layers) if layer.weight.grad is not None}
        assert left == (model.trains[step] if step == 4 else set()), step
        optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("streaming", [False, True])
def test_all_may_be_frozen_when_the_optimizer_is_built(streaming: bool) -> None:
    ours, theirs = net("later").requires_grad_(False), net("later")
    optimizer = longshore.AdamW(ours.named_parameters(), streaming=streaming, **LATER)
    optimizer.step()
    assert optimizer.version == 0
    train(ours, optimizer, range(2))
    optimizer.close()
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=3e-4, weight_decay=0.1), range(2))
    assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("delay", [0, 1])
def test_units_have_the_bits_of_the_model_in_one_piece(delay: int) -> None:
    def in_units(of: Later, **options: Any) -> longshore.AdamW:
        optimizer = later(of, streaming=True, **options)
        assert len(longshore.shard(of, optimizer, budget=3 * Later.layer).units) == 4
        return optimizer

    delayed = {"delay": delay, "warmup_steps": 3}
    assert same_bits(trained(in_units, **delayed), trained(later, **delayed))


def test_a_model_of_init_may_be_frozen_in_part() -> None:
    with longshore.Init(budget="100KiB"):
        model = net("later")
    optimizer = later(model, streaming=True)
    longshore.shard(model, optimizer, budget=3 * Later.layer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, range(4))
    moved = {place // 2 for place, parameter in enumerate(model.parameters()) if not torch.equal(parameter, before[place])}
    assert moved == {1, 2}


KILLED = """
import os, signal, torch
torch.set_num_threads(1)
from test_train_later import *
model = net("later")
optimizer = later(model, servers={servers!r}, job="killed", streaming=True)
train(model, optimizer, range(3))
model.set_trained(3)
model.loss(3).backward()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_finds_the_job_goes_on_to_the_bit(servers: str) -> None:
    """The set of parameters that require a gradient in the new process does not matter. The first process is killed when a step's gradients
    have left."""
    killed = Forked(KILLED.format(servers=servers))
    assert killed.wait(timeout=120) == -signal.SIGKILL
    options = {**LATER, "servers": servers, "job": "killed"}
    for first, end, as_in, streaming in ((3, 6, 9, True), (6, STEPS, 0, False)):
        model = net("later", seed=first)
        model.set_trained(as_in)
        optimizer = longshore.AdamW(model.named_parameters(), streaming=streaming, **options)
        assert optimizer.version == first
        train(model, optimizer, range(first, end))
        optimizer.close()
    assert same_bits(model, trained(later))


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{way} later": (way, {}) for way in ("sum", "scatter", "fsdp", "ddp")},
    **{f"{way} watched": (way, {"frozen": "leave"}) for way in ("sum", "scatter", "fsdp", "ddp")},
    **{f"{way} streaming": (way, {"streaming": True}) for way in ("sum", "fsdp")},
    "scatter units": ("scatter", {"streaming": True, "budget": 12 * Later.layer}),
    "scatter first": ("scatter", {"job": "parted", "steps": 6}),
    "scatter then": ("scatter", {"job": "parted", "seed": 1}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Returns each of two ranks' results."""
    runs = {name: (way, {"steps": STEPS, "frozen": "train-later", **options}) for name, (way, options) in RUNS.items()}
    with several(2, "1GiB") as servers:
        return run_named(tmp_path_factory.mktemp("ranks"), runs, world_size=2, servers=servers, model="later")


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith((" later", " streaming", " units", " then"))])
def test_ranks_train_later_in_every_way(ranks: Found, name: str) -> None:
    expected = ranks[f"{name.split()[0]} watched"][0]["weights"]
    assert all(are_equal(rank["weights"], expected) for rank in ranks[name])


def test_a_state_of_torch_has_none_of_what_does_not_train_yet() -> None:
    ours, theirs = net("later"), net("later")
    theirs.set_trained(0)
    plain = torch.optim.AdamW(theirs.named_parameters(), lr=3e-4, weight_decay=0.1)
    train(theirs, plain, range(2))
    ours.load_state_dict(theirs.state_dict())
    ours.set_trained(1)
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
        model, other = net("later"), net("later", seed=1)
        job = {"servers": servers, "job": "engine", "frozen": "train-later"}
        config = {"gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}}, "longshore": job}

        def steps(engine: longshore.Engine, numbers: range) -> None:
            for number in numbers:
                engine.module.set_trained(number)
                engine.backward(engine.module.loss(number))
                engine.step()

        model.set_trained(0)
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
    with warnings.catch_warnings(action="error"):
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
        later(net("later"), **options)


def test_what_no_server_could_keep_is_named_while_it_is_frozen() -> None:
    odd = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
    with pytest.raises(errors.InvalidError, match=r"odd is torch\.float64"):
        longshore.AdamW([*net("later").named_parameters(), ("odd", odd)], **LATER)


@pytest.mark.parametrize("frozen", ["leave", "keep"])
@pytest.mark.parametrize("streaming", [False, True])
def test_unfreezing_without_the_option_is_refused_by_name(frozen: str, streaming: bool) -> None:
    model = net("later")
    optimizer = later(model, frozen=frozen, streaming=streaming)
    with pytest.raises(errors.UsageError, match=r"layers\.1\.weight is trained now, but must be frozen, as when the job was opened.*new optimizer, with frozen='train-later'"):
        train(model, optimizer, range(5))
    assert optimizer.version == 2


def test_a_layer_that_is_replaced_while_it_is_frozen_is_named() -> None:
    model = net("later")
    optimizer = later(model)
    optimizer.watch(model)
    model.layers[0] = nn.Linear(144, 144)
    with pytest.raises(errors.UsageError, match=r"layers\.0\.weight is out of the model"):
        train(model, optimizer, range(1))
