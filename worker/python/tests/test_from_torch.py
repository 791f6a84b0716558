"""A job continues from a torch optimizer, and a torch optimizer from a job, with equal state to the bit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Server
from models import RULES, distance, pair, same_bits, step, train
from torch import nn

import longshore
from longshore import checkpoint, errors
from longshore.transfer.filling import Filling


def trained(kind: Callable[..., torch.optim.Optimizer], width: int = 300, **arguments: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Returns a model after 5 steps of torch, another model with its weights, and the optimizer."""
    ours, theirs = pair("mlp", width=width)
    optimizer = kind(theirs.named_parameters(), **arguments)
    train(theirs, optimizer, range(5))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, optimizer


def both(ours: nn.Module, optimizer: torch.optim.Optimizer, theirs: nn.Module, plain: torch.optim.Optimizer, steps: range) -> None:
    train(ours, optimizer, steps)
    train(theirs, plain, steps)


def check_same_state(full: dict[str, Any], expected: dict[str, Any]) -> None:
    for number, state in expected["state"].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(full["state"][number][name], value), (number, name)


@pytest.mark.parametrize("rule", RULES)
def test_torchs_state_comes_and_goes_to_the_bit(rule: str, tmp_path: Path) -> None:
    """The state comes from a file that is mapped."""
    kind, reference, arguments = RULES[rule]
    ours, theirs, plain = trained(reference, **arguments)
    optimizer = kind(ours.named_parameters(), lr=1.0)
    torch.save(plain.state_dict(), tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, mmap=True))
    check_same_state(optimizer.state_dict(full=True), plain.state_dict())
    both(ours, optimizer, theirs, plain, range(5, 40))
    assert distance(ours, theirs) < 1e-6
    full = optimizer.state_dict(full=True)
    moved = reference(ours.named_parameters(), lr=1.0)
    moved.load_state_dict({"state": full["state"], "param_groups": plain.state_dict()["param_groups"]})
    check_same_state(full, moved.state_dict())
    optimizer.close()
    both(ours, moved, theirs, plain, range(40, 50))
    assert distance(ours, theirs) < 1e-6


def test_a_product_of_other_momenta_is_refused() -> None:
    ours, _, plain = trained(torch.optim.NAdam)
    state = plain.state_dict()
    state["param_groups"][0]["betas"] = (0.5, 0.999)
    with pytest.raises(errors.StateError, match=r"mu_product is 0\.0.*, but must be 0\.0.*start from the weights"):
        longshore.NAdam(ours.named_parameters()).load_state_dict(state)


def test_all_state_moves_to_another_job_with_its_master_weights() -> None:
    ours, other = pair("mlp", width=300)
    for model in (ours, other):
        model.to(torch.bfloat16)

    def advance(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).bfloat16()
        nn.functional.mse_loss(model.layers(inputs).float(), torch.ones(8, 4)).backward()
        optimizer.step()

    first = longshore.AdamW(ours.named_parameters(), lr=1e-3)
    for number in range(5):
        advance(ours, first, number)
    full = first.state_dict(full=True)
    assert any((state["master"].bfloat16().float() != state["master"]).any() for state in full["state"].values())
    second = longshore.AdamW(other.named_parameters(), lr=1.0)
    second.load_state_dict(full)
    other.load_state_dict(ours.state_dict())
    for number in range(5, 10):
        advance(ours, first, number)
        advance(other, second, number)
    assert same_bits(ours, other)
    check_same_state(second.state_dict(full=True), first.state_dict(full=True))


@pytest.mark.filterwarnings("ignore:step 1 was skipped")
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("kind", [longshore.AdamW, longshore.SGD])
def test_a_state_from_before_the_first_update_has_the_master_weights(kind: Any, skipped: bool) -> None:
    """The state has no moments that count, and the model that takes it has rounded weights."""
    first, second = pair("mlp")
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.copy_(parameter.bfloat16())
    optimizer = kind(first.named_parameters(), lr=1e-2)
    optimizer.open()
    if skipped:
        (first.loss(0) * float("nan")).backward()
        optimizer.step()
        optimizer.zero_grad()
    other = kind(second.named_parameters(), lr=1e-2)
    other.load_state_dict(optimizer.state_dict(full=True))
    both(first, optimizer, second, other, range(2))
    assert same_bits(first, second)
    assert [one.state_dict(full=True)["state"][0]["step"].item() for one in (optimizer, other)] == [2, 2]


def write(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        model.layers[0].weight.fill_(value)


@pytest.mark.parametrize("comes", ["before the optimizer", "before the state", "after the state"])
@pytest.mark.parametrize("source", ["full", "deepspeed", "safetensors"])
def test_weights_that_the_model_was_given_count(source: str, comes: str, tmp_path: Path) -> None:
    """A state goes on with its master weights only where the model has their rounding."""
    first, ours = pair("mlp")
    old = longshore.AdamW(first.named_parameters(), lr=0.0, weight_decay=0.0)
    step(first, old)
    if comes == "before the optimizer":
        write(ours, 0.5)
    optimizer = longshore.AdamW(ours.named_parameters(), lr=0.0, weight_decay=0.0)
    if comes == "before the state":
        write(ours, 0.5)
    if source == "full":
        optimizer.load_state_dict(old.state_dict(full=True))
    elif source == "deepspeed":
        checkpoint.load_deepspeed(optimizer, tmp_path / checkpoint.save_deepspeed(old, tmp_path))
    else:
        checkpoint.save_safetensors(old, tmp_path / "model", dtype="fp32")
        checkpoint.load_safetensors(optimizer, tmp_path / "model")
    if comes == "after the state":
        write(ours, 0.5)
    elif source != "full":
        step(ours, optimizer, 1)
        assert distance(ours, first) == 0, "a file's weights are loaded by the call"
        return
    with pytest.warns(UserWarning, match=r"weights of layers\.0\.weight are not those of the loaded state.*The model's count"):
        step(ours, optimizer, 1)
    assert bool((ours.layers[0].weight == 0.5).all())
    assert torch.equal(ours.layers[3].weight, first.layers[3].weight)
    full = optimizer.state_dict(full=True)["state"]
    assert bool((full[0]["master"] == 0.5).all()) and full[0]["step"] == (1 if source == "safetensors" else 2)


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_a_parameter_without_state_begins_with_zeros(rule: str) -> None:
    """An expert that no step has used has no state in torch's file."""
    kind, reference, arguments = RULES[rule]
    ours, theirs = pair("mlp")
    plain = reference(theirs.named_parameters(), **arguments)
    theirs.layers[5].requires_grad_(False)
    step(theirs, plain)
    theirs.layers[5].requires_grad_(True)
    ours.load_state_dict(theirs.state_dict())
    optimizer = kind(ours.named_parameters(), **arguments)
    optimizer.load_state_dict(plain.state_dict())
    both(ours, optimizer, theirs, plain, range(1, 5))
    assert distance(ours, theirs) < 1e-6


def test_a_server_that_is_killed_in_the_middle_of_filling_is_filled_again(servers: str, server: Server) -> None:
    ours, theirs, plain = trained(torch.optim.AdamW, width=300)
    kills: list[int] = []
    optimizer = longshore.AdamW(ours.named_parameters(), servers=f"{servers},{server.address}", job="again", shard_elements=65536)
    optimizer.load_state_dict(plain.state_dict())
    whole = optimizer._filling
    assert whole is not None

    def read(array: int, param: Any) -> torch.Tensor:
        if (array, param.index) == (2, 4) and not kills:
            kills.append(array)
            server.start_again()
        return whole.read(array, param)

    optimizer._filling = Filling(whole.applied, read, whole.check)
    optimizer.open()
    assert kills
    check_same_state(optimizer.state_dict(full=True), plain.state_dict())
    both(ours, optimizer, theirs, plain, range(5, 10))
    assert distance(ours, theirs) < 1e-6


SPOILED = {
    "missing moment": (lambda s: s["state"][2].pop("exp_avg_sq"), r"layers\.2\.weight\.exp_avg_sq is absent, but must be a tensor"),
    "extra": (lambda s: s["state"][0].update(max_exp_avg_sq=torch.zeros(3)), r"layers\.0\.weight\.max_exp_avg_sq.*amsgrad"),
    "shape": (lambda s: s["state"][1].update(exp_avg=torch.zeros(7)), r"layers\.0\.bias\.exp_avg is of \[7\], but must be of \[300\]"),
    "type": (
        lambda s: s["state"][1].update(exp_avg=s["state"][1]["exp_avg"].long()),
        r"layers\.0\.bias\.exp_avg is torch\.int64.*float",
    ),
    "no tensor": (lambda s: s["state"][1].update(exp_avg=[1.0]), r"layers\.0\.bias\.exp_avg is list, but must be a tensor"),
    "meta": (lambda s: s["state"][1].update(exp_avg=torch.zeros(300, device="meta")), r"layers\.0\.bias\.exp_avg.*meta"),
    "half a step": (lambda s: s["state"][1].update(step=2.5), r"layers\.0\.bias\.step is 2\.5, but must be a whole number"),
    "names": (
        lambda s: s["param_groups"][0]["param_names"].__setitem__(1, "elsewhere"),
        r"param_groups\[0\] is elsewhere, but must be layers\.0\.bias",
    ),
    "rule": (
        lambda s: s["param_groups"][0].update(decoupled_weight_decay=False),
        r"decoupled_weight_decay.*use longshore\.Adam",
    ),
    "hyperparameter": (lambda s: s["param_groups"][0].update(amsgrad=True), r"amsgrad is True"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(what: str) -> None:
    ours, _, plain = trained(torch.optim.AdamW)
    optimizer = longshore.AdamW(ours.named_parameters(), lr=0.5)
    before = [parameter.clone() for parameter in ours.parameters()]
    state = copy.deepcopy(plain.state_dict())
    change, message = SPOILED[what]
    change(state)
    with pytest.raises(errors.LongshoreError, match=message) as raised:
        optimizer.load_state_dict(state)
    assert raised.value.remedy
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer._filling is None
    assert all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))
    optimizer.load_state_dict(plain.state_dict())
    check_same_state(optimizer.state_dict(full=True), plain.state_dict())


def test_frozen_parameters_have_no_state() -> None:
    ours, theirs = pair("mlp")
    for model in (ours, theirs):
        model.layers[0].requires_grad_(False)
    plain = torch.optim.AdamW(theirs.named_parameters(), lr=1e-2)
    optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-2)
    step(theirs, plain)
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    both(ours, optimizer, theirs, plain, range(1, 5))
    assert distance(ours, theirs) < 1e-6
    ours.layers[2].requires_grad_(False)
    other = longshore.AdamW(ours.named_parameters(), lr=1e-2)
    with pytest.raises(errors.StateError, match=r"layers\.2\.weight\.exp_avg.*frozen"):
        other.load_state_dict(plain.state_dict())
