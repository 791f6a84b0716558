"""Frameworks' uses of a torch optimizer other than steps, and optimizers over the parameters of another optimizer."""

import contextlib
import copy
import gc
import io
import pathlib
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import distance, pair, same_bits, step, train
from torch import nn

import longshore
from longshore import checkpoint, errors


def test_hooks_groups_and_profiler_range() -> None:
    model, _ = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["param_names"][0] == "layers.0.weight"
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with torch.profiler.profile() as profile:
        step(model, optimizer)
    assert seen == ["before", "after"]
    assert "Optimizer.step#AdamW.step" in {event.name for event in profile.events()}
    assert "lr: 0.01" in repr(optimizer)


def test_groups_may_be_added_before_the_first_step_and_not_after_it() -> None:
    ours, theirs = pair("mlp")

    def build(model: nn.Module, kind: Any) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        optimizer = kind(named[:2], lr=1e-2)
        optimizer.add_param_group({"params": named[2:], "lr": 1e-3})
        step(model, optimizer)
        return optimizer

    optimizer = build(ours, longshore.AdamW)
    build(theirs, torch.optim.AdamW)
    assert distance(ours, theirs) < 1e-6
    with pytest.raises(errors.UsageError, match="after the job was opened.*all groups when it is built.*frozen='train-later'.*new optimizer"):
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(3)))]})


def test_the_largest_norm_may_be_set_until_the_job_is_opened_and_is_no_setting_of_a_group() -> None:
    ours, theirs = pair("mlp")
    optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-2)
    optimizer.max_grad_norm = 0.1
    with pytest.raises(errors.InvalidError, match=r"max_grad_norm is -1\.0, but must be finite and above 0"):
        optimizer.max_grad_norm = -1.0
    step(ours, optimizer)
    step(theirs, longshore.AdamW(theirs.named_parameters(), lr=1e-2, max_grad_norm=0.1))
    assert same_bits(ours, theirs) and optimizer.last_report.clip_coefficient < 1.0
    with pytest.raises(errors.UsageError, match=r"clipping of layers\.0\.weight"):
        nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
    optimizer.max_grad_norm = 0.1
    with pytest.raises(errors.UsageError, match=r"max_grad_norm is 0\.5, but must be 0\.1, as when the job was opened: .*close\(\)"):
        optimizer.max_grad_norm = 0.5
    optimizer.param_groups[0]["max_grad_norm"] = 0.5
    with pytest.raises(errors.UsageError, match=r"param_groups\['max_grad_norm'\] is 0\.5, but must be absent"):
        step(ours, optimizer)
    model = pair("mlp")[0]
    clipped_outside = longshore.AdamW(model.named_parameters(), max_grad_norm=1.0)
    clipped_outside.max_grad_norm = None
    model.loss(0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def test_no_gradient_at_all_is_no_step() -> None:
    model, before = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters())
    optimizer.step()
    assert optimizer.version == 0
    assert same_bits(model, before)
    step(model, optimizer)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.version == 1


def test_a_grad_scaler_leaves_unscaling_to_it() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, own_unscale: bool) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for number in range(6):
            optimizer.zero_grad()
            scaler.scale(model.loss(number)).backward()
            if number == 2:
                model.layers[0].weight.grad[0, 0] = float("inf")
            if own_unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    for own_unscale in (False, True):
        ours, theirs = pair("mlp")
        optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-2)
        scales = {run(ours, optimizer, own_unscale), run(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), own_unscale)}
        assert len(scales) == 1
        assert optimizer.version == 5
        assert distance(ours, theirs) < 1e-6


def test_state_is_a_small_handle_of_plain_things() -> None:
    model, _ = pair("llama")
    optimizer = longshore.AdamW(model.named_parameters())
    assert all(optimizer.state[parameter] for parameter in model.parameters()), "nobody must step to fill it"
    step(model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert len(file.getvalue()) < 64 * 1024
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["longshore"]["job"] == optimizer.job
    assert loaded["longshore"]["version"] == 1
    assert loaded["state"][0]["step"] == 1
    assert loaded["param_groups"][0]["params"] == list(range(len(list(model.parameters()))))
    step(model, optimizer)
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_a_checkpoint_that_ends_with_the_process_says_so_once(tmp_path: pathlib.Path) -> None:
    for servers in (None, longshore.Server(checkpoint_dir=tmp_path)):
        model, _ = pair("mlp")
        optimizer = longshore.AdamW(model.named_parameters(), servers=servers, job="kept")
        train(model, optimizer, range(1))
        with warnings.catch_warnings(record=True, action="always") as caught:
            assert [optimizer.checkpoint(name) for name in ("one", "two")] == ["one", "two"]
        said = [str(warning.message) for warning in caught]
        assert len(said) == (servers is None)
        assert all("deleted when this process ends" in text and "Server(checkpoint_dir=...)" in text for text in said)


@pytest.mark.parametrize("full", [False, True])
def test_hooks_of_state_dict_see_and_change_what_is_returned(full: bool) -> None:
    model, other = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters())
    step(model, optimizer)

    def halve(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        assert state["longshore"]["version"] == 1
        for of in state["state"].values():
            if isinstance(of, dict):
                of.update({key: value.bfloat16() for key, value in of.items() if key != "step"})
        return {**state, "note": 1}

    optimizer.register_state_dict_pre_hook(lambda optimizer: optimizer.state.__setitem__("mine", 1))
    optimizer.register_state_dict_post_hook(halve)
    state = optimizer.state_dict(full=full)
    assert (state["state"]["mine"], state["note"]) == (1, 1)
    if not full:
        optimizer.load_state_dict(state)
        return
    assert {state["state"][0][key].dtype for key in ("exp_avg", "exp_avg_sq", "master")} == {torch.bfloat16}
    other.load_state_dict(model.state_dict())
    with warnings.catch_warnings(action="error"):
        taken = longshore.AdamW(other.named_parameters())
        taken.load_state_dict(state)
        taken.open()
    assert taken.state["mine"] == 1 and same_bits(model, other)


AMBIENT: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "dtype": lambda: default_dtype(torch.bfloat16),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ambient", AMBIENT)
def test_nothing_depends_on_torchs_defaults(ambient: str, streaming: bool, tmp_path: pathlib.Path) -> None:
    model, other = pair("mlp")
    with AMBIENT[ambient]():
        optimizer = longshore.AdamW(model.named_parameters(), streaming=streaming)
    step(model, optimizer)
    optimizer._applied.fill_(256)
    step(model, optimizer)
    with AMBIENT[ambient]():
        optimizer.flush()
        full, handle = optimizer.state_dict(full=True), optimizer.state_dict(full=False)
        checkpoint.save_safetensors(optimizer, tmp_path / "model", dtype="fp32")
        checkpoint.save_torch(optimizer, tmp_path / "adamw.pt")
        universal = tmp_path / checkpoint.save_deepspeed(optimizer, tmp_path)
    assert handle["state"][0]["step"] == 257 and handle["state"][0]["step"].dtype is torch.float32
    for of in full["state"].values():
        for value in of.values():
            assert value.dtype is torch.float32 and value.device.type == "cpu" and not value.is_inference()
    assert torch.equal(torch.load(tmp_path / "adamw.pt")["state"][3]["exp_avg"], full["state"][3]["exp_avg"])
    for load in (
        lambda: checkpoint.load_safetensors(taken, tmp_path / "model"),
        lambda: checkpoint.load_deepspeed(taken, universal),
        lambda: taken.load_state_dict(full),
    ):
        with AMBIENT[ambient]():
            taken = longshore.AdamW(other.named_parameters(), streaming=streaming)
            load()
        step(other, taken)
        taken.close()
        other.load_state_dict(model.state_dict())


def test_a_compiled_step_is_quiet() -> None:
    model, other = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters())
    compiled = torch.compile(optimizer.step)
    with warnings.catch_warnings(action="error"):
        for number in range(3):
            model.loss(number).backward()
            compiled()
            model.zero_grad()
    torch._dynamo.utils.counters.clear()  # later tests have compiled nothing
    train(other, longshore.AdamW(other.named_parameters()), range(3))
    assert same_bits(model, other)


def test_it_is_not_copied_or_pickled() -> None:
    model, _ = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters())
    for act in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled.*state_dict"):
            act(optimizer)


def test_weights_are_in_the_tensors_own_memory_and_autograd_knows() -> None:
    model, _ = pair("mlp")
    weight = model.layers[0].weight
    address, version = weight.data_ptr(), weight._version
    optimizer = longshore.AdamW(model.named_parameters())
    stale = model.loss(0)
    step(model, optimizer)
    assert weight.data_ptr() == address
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_it_ends_with_its_last_name() -> None:
    model, _ = pair("mlp")
    for streaming in (False, True):
        optimizer = longshore.AdamW(model.named_parameters(), streaming=streaming)
        step(model, optimizer)
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
    again = longshore.AdamW(model.named_parameters())
    step(model, again)
    assert again.version == 1


def test_a_script_that_goes_on_without_asking_is_warned(servers: str) -> None:
    def run(ask: bool) -> list[str]:
        model, _ = pair("mlp")
        optimizer = longshore.AdamW(model.named_parameters(), servers=servers, job="goes-on")
        if ask:
            assert (optimizer.version, optimizer.resumed) == (4, b"epoch 3")
        # Adapters of frameworks call both before the first step.
        optimizer.flush()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.resume_data = lambda: b"epoch 3"
        with warnings.catch_warnings(record=True, action="always") as caught:
            for _ in range(2):
                model.loss(0).backward()
                optimizer.step()
        optimizer.close()
        return [str(warning.message) for warning in caught if warning.filename == __file__]

    assert run(ask=False) == []  # a new job
    (warning,) = run(ask=False)
    assert "goes on from version 2" in warning and "optimizer.global_step" in warning
    assert run(ask=True) == []


MODES: dict[str, dict[str, Any]] = {"safe": {}, "streaming": {"streaming": True}, "delayed": {"delay": 1, "warmup_steps": 1}}


@pytest.mark.parametrize("after", ["safe", "streaming"])
@pytest.mark.parametrize("before", MODES)
def test_the_newer_one_goes_on_from_the_last_weights(before: str, after: str) -> None:
    ours, theirs = pair("mlp")
    first = longshore.AdamW(ours.named_parameters(), lr=1e-2, **MODES[before])
    train(ours, first, range(3))
    first.flush()
    theirs.load_state_dict(ours.state_dict())
    second = longshore.SGD(ours.named_parameters(), lr=0.1, momentum=0.9, **MODES[after])
    train(ours, second, range(3, 6))
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), range(3, 6))
    second.flush()
    assert distance(ours, theirs) < 1e-6
    assert first.is_closed
    with pytest.raises(errors.UsageError, match="another one took its parameters over"):
        first.step()


def test_one_that_has_made_no_step_takes_no_gradients() -> None:
    """The unused optimizer's hooks would be the first that backward calls."""
    ours, theirs = pair("mlp")
    first = longshore.AdamW(ours.named_parameters(), streaming=True)
    train(ours, longshore.AdamW(ours.named_parameters(), lr=1e-2), range(2))
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), range(2))
    assert distance(ours, theirs) < 1e-6
    with pytest.raises(errors.UsageError, match="another one took its parameters over"):
        first.step()


def test_a_job_of_a_server_goes_on_in_the_newer_one(servers: str) -> None:
    model, _ = pair("mlp")
    kept = []
    for cell in range(3):
        kept.append(longshore.AdamW(model.named_parameters(), servers=servers, job="cell"))
        train(model, kept[-1], range(2 * cell, 2 * cell + 2))
    assert [optimizer.version for optimizer in kept] == [2, 4, 6]
