"""``load_state_dict`` with torch's own semantics: hooks, refusals, and torch's distributed state dicts."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import running
from models import pair, same_bits, train
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import longshore
from longshore import errors


def trained(kind: Any, model: nn.Module, steps: int = 2, **options: Any) -> Any:
    optimizer = kind(model.named_parameters(), lr=1e-2, **options)
    train(model, optimizer, range(steps))
    return optimizer


@pytest.mark.parametrize("full", [False, True])
def test_hooks_get_what_torch_gives_them(full: bool) -> None:
    """Each hook is called once, with the whole state in its own dict, and may return another state."""
    ours, theirs = pair("mlp")
    optimizer, plain = trained(longshore.AdamW, ours), trained(torch.optim.AdamW, theirs)
    states = (optimizer.state_dict(full=full), plain.state_dict())
    seen: list[list[Any]] = [[], []]
    for given, state, calls in zip((optimizer, plain), states, seen, strict=True):
        expected = given

        def before(optimizer: Any, state: dict[str, Any], expected: Any = expected, calls: list[Any] = calls) -> dict[str, Any]:
            calls.append(("before", optimizer is expected, optimizer.param_groups[0]["lr"], sorted(state["state"]), set(state["state"][0])))
            groups = [{**group, "lr": 0.5} for group in state.pop("param_groups")]
            return {**state, "param_groups": groups}

        def after(optimizer: Any, expected: Any = expected, calls: list[Any] = calls) -> None:
            calls.append(("after", optimizer is expected, optimizer.param_groups[0]["lr"]))

        handles = [given.register_load_state_dict_pre_hook(before), given.register_load_state_dict_post_hook(after)]
        given.load_state_dict(state)
        assert state["param_groups"][0]["lr"] == 1e-2, "what the caller has stays"
        for handle in handles:
            handle.remove()
        given.load_state_dict(state)
        assert given.param_groups[0]["lr"] == 1e-2
    before_ours, before_theirs = seen[0][0], seen[1][0]
    assert before_ours[:4] == before_theirs[:4]
    assert before_ours[4] == (before_theirs[4] | {"master"} if full else {"step"})
    assert seen[0][1:] == seen[1][1:] == [("after", True, 0.5)]


def one_more(state: dict[str, Any]) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": []})


def one_less(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


@pytest.mark.parametrize("change", [one_more, one_less])
@pytest.mark.parametrize("of", ["handle", "torch"])
def test_other_groups_are_refused_in_torchs_words(change: Any, of: str) -> None:
    ours, theirs = pair("mlp")
    plain = trained(torch.optim.AdamW, theirs)
    state = copy.deepcopy(plain.state_dict())
    change(state)
    with pytest.raises(ValueError, match="loaded state dict") as refused:
        plain.load_state_dict(state)
    if of == "handle":
        optimizer = trained(longshore.AdamW, ours)
        state = optimizer.state_dict()
        change(state)
    else:
        optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-2)
    before = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 1.0
    with pytest.raises(ValueError, match=re.escape(str(refused.value))) as raised:
        optimizer.load_state_dict(state)
    assert isinstance(raised.value, errors.StateError) and raised.value.field is not None
    assert optimizer.state_dict() == before, "nothing has changed"


@pytest.mark.usefixtures("alone")
def test_a_handle_stays_whole_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    """No step is needed to fill a state, and another process continues from the files."""
    ours, undisturbed = pair("mlp")
    trained(longshore.AdamW, undisturbed, steps=8)
    with running("--checkpoint-dir", str(tmp_path / "checkpoints")) as servers:
        options = {"servers": servers, "job": "distributed"}
        first = trained(longshore.AdamW, ours, steps=4, **options)
        first.checkpoint("four")
        save({"optimizer": get_optimizer_state_dict(ours, first)}, checkpoint_id=tmp_path / "saved")
        assert first.version == 4
        train(ours, first, range(4, 6))
        first.close()
        again, _ = pair("mlp")
        second = longshore.AdamW(again.named_parameters(), lr=1.0, **options)
        found = {"optimizer": get_optimizer_state_dict(again, second)}
        assert second.version == 6
        load(found, checkpoint_id=tmp_path / "saved")
        set_optimizer_state_dict(again, second, found["optimizer"])
        assert (second.version, second.param_groups[0]["lr"]) == (4, 1e-2)
        assert all("longshore" not in group for group in second.param_groups)
        train(again, second, range(4, 8))
        assert same_bits(again, undisturbed)
        stranger, _ = pair("mlp")
        other = longshore.AdamW(stranger.named_parameters())
        with pytest.raises(errors.StateError, match="build the optimizer with job='distributed'"):
            set_optimizer_state_dict(stranger, other, found["optimizer"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_delayed_job_goes_back_to_the_version_that_its_parameters_have(tmp_path: Path, streaming: bool) -> None:
    """The job made a step after the version of its parameters."""
    ours, undisturbed = pair("mlp")
    options: dict[str, Any] = {"delay": 1, "warmup_steps": 1, "streaming": streaming}
    with longshore.Server(checkpoint_dir=tmp_path) as server:
        for model, goes_back in ((ours, True), (undisturbed, False)):
            optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, servers=server, job=f"back-{goes_back}", **options)
            train(model, optimizer, range(3))
            optimizer.flush()
            flushed = optimizer.state_dict()
            train(model, optimizer, range(99, 100))
            if goes_back:
                optimizer.load_state_dict(optimizer.state_dict())
                assert optimizer.version == 3
                with pytest.raises(errors.StateError, match=r"version'\] is 3, but must be 4, which the servers have"):
                    optimizer.load_state_dict(flushed)
                optimizer.checkpoint("four")
                flushed = optimizer.state_dict()
                train(model, optimizer, range(98, 99))
                with pytest.warns(UserWarning, match="goes back from version 5 to 4"):
                    optimizer.load_state_dict(flushed)
            else:
                optimizer.flush()
            train(model, optimizer, range(3, 6))
            assert optimizer.flush() == 7
            optimizer.close()
    assert same_bits(ours, undisturbed)


def test_a_handle_of_steps_that_were_given_up_is_no_handle_of_later_steps(tmp_path: Path) -> None:
    """Steps after a return have the numbers of those that it gave up."""
    weight = torch.nn.Parameter(torch.zeros(4))

    def step(gradient: float) -> dict[str, Any]:
        weight.grad = torch.full((4,), -gradient)
        optimizer.step()
        return copy.deepcopy(optimizer.state_dict())

    with longshore.Server(checkpoint_dir=tmp_path) as server:
        optimizer = longshore.SGD([weight], lr=1.0, servers=server, job="given-up")
        step(1.0)
        optimizer.checkpoint("one")
        one, unwritten = copy.deepcopy(optimizer.state_dict()), step(10.0)
        three = step(100.0)
        optimizer.checkpoint("three")
        step(1000.0)
        optimizer.load_state_dict(one)
        mine = step(2.0)
        optimizer.load_state_dict(mine)
        with pytest.raises(errors.StateError, match=r"version'\] is 2, but must be of steps that no return has given up"):
            optimizer.load_state_dict(unwritten)
        assert (optimizer.version, weight[0]) == (2, 3.0)
        step(20.0)
        with pytest.warns(UserWarning, match="goes back from version 3 to 3"):
            optimizer.load_state_dict(three)
        assert (optimizer.version, weight[0]) == (3, 111.0)
        optimizer.close()


def test_a_handle_that_has_lost_its_job_is_refused() -> None:
    """A flattened state has the fields of torch's own optimizers alone. A new job would take this for a state before the first step."""
    ours, other = pair("mlp")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(ours, trained(longshore.AdamW, ours), options=flat)
    fresh = longshore.AdamW(other.named_parameters(), lr=1.0)
    with pytest.raises(errors.StateError, match=r"of 2 steps without moments and without a job.*flatten_optimizer_state_dict"):
        set_optimizer_state_dict(other, fresh, state, options=flat)
    assert fresh.param_groups[0]["lr"] == 1.0
