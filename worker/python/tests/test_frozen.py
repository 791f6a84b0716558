"""Frozen parameters: adapters over a base that servers keep, and parameters that train later. A rank runs rank.py."""

import pathlib
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from conftest import running, several
from models import distance, same_bits
from rank import Later, net
from test_ranks import Found, are_equal, run_named
from torch import Tensor, nn
from units import Lora

import longshore
from longshore import errors

LATER: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1, "frozen": "train-later"}
STEPS = 12
#: The optimizer's options in each mode of training.
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
        # In step 4 all layers that train are new, so no hook sees their gradients. These stay until `step()`.
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


@pytest.mark.parametrize("frozen", ["leave", "keep"])
@pytest.mark.parametrize("streaming", [False, True])
def test_unfreezing_without_the_option_is_refused_by_name(frozen: str, streaming: bool) -> None:
    model = net("later")
    optimizer = later(model, frozen=frozen, streaming=streaming)
    with pytest.raises(errors.UsageError, match=r"layers\.1\.weight is trained now, but must be frozen, as when the job was opened.*new optimizer, with frozen='train-later'"):
        train(model, optimizer, range(5))
    assert optimizer.version == 2


WIDTH = 96


class Adapted(nn.Sequential):
    """Frozen linear layers with adapters of rank 4 beside them."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(*[Lora(nn.Linear(WIDTH, WIDTH), 4) for _ in range(3)])

    def loss(self, step: int) -> Tensor:
        given = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        return (self(given) - given.roll(1, dims=1)).square().mean()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"tier": "memory", "shard_elements": 65536}])
def test_adapters_train_as_torchs_and_the_base_stays(options: dict[str, object]) -> None:
    ours, theirs = Adapted(), Adapted()
    start = ours.weights()
    mine = longshore.AdamW(ours.named_parameters(), lr=1e-2, frozen="keep", **options)
    models.train(ours, mine, range(10))
    models.train(theirs, torch.optim.AdamW(theirs.named_parameters(), lr=1e-2), range(10))
    mine.flush()
    expected = theirs.weights()
    for name, found in ours.weights().items():
        assert torch.equal(found, start[name]) is (".base." in name), name
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-7)
    trained = [number for number, (_, parameter) in enumerate(ours.named_parameters()) if parameter.requires_grad]
    assert [*mine.state_dict(full=True)["state"]] == trained, "frozen weights have no moments"


def test_a_new_process_gets_the_base_too_also_from_a_checkpoint(tmp_path: pathlib.Path) -> None:
    with running("--checkpoint-dir", str(tmp_path / "kept")) as address:
        first, other, back = Adapted(), Adapted(seed=1), Adapted(seed=2)
        options = {"servers": address, "job": "lora", "lr": 1e-2, "frozen": "keep"}
        optimizer = longshore.AdamW(first.named_parameters(), **options)
        models.train(first, optimizer, range(3))
        optimizer.checkpoint("three")
        saved, kept = optimizer.state_dict(), first.weights()
        models.train(first, optimizer, range(3, 5))
        optimizer.close()
        longshore.AdamW(other.named_parameters(), **options).close()
        assert same_bits(other, first)
        again = longshore.AdamW(back.named_parameters(), **options)
        again.load_state_dict(saved)
        assert again.version == 3
        assert all(torch.equal(found, kept[name]) for name, found in back.weights().items())


def test_a_base_that_the_job_rounds_is_read_before_the_first_forward() -> None:
    options = {"lr": 1e-2, "frozen": "keep", "streaming": True, "image_dtype": "bf16"}
    late, early = Adapted(), Adapted()
    with pytest.raises(errors.UsageError, match=r"0\.base\.weight.*optimizer\.open\(\)"):
        models.train(late, longshore.AdamW(late.named_parameters(), **options), range(1))
    start = early.weights()
    optimizer = longshore.AdamW(early.named_parameters(), **options)
    optimizer.open()
    models.train(early, optimizer, range(3))
    optimizer.flush()
    for name, found in early.weights().items():
        assert torch.equal(found, start[name].bfloat16().float()) is (".base." in name), name
