"""Forbidden acts on an optimizer's parameters: clipping sent gradients, writing weights that are lost, replacing a parameter."""

import gc
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trainer as example
import transformers
from models import distance, engine_of, pair, same_bits, step, train, train_engine
from programs import arguments
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.nn.utils import prune

import longshore
import longshore.accelerate
import longshore.lightning
from longshore import errors
from longshore.optimizer import guards

Act = Callable[[nn.Module], Any]
MODES: dict[str, dict[str, Any]] = {
    "safe": {},
    "streaming": {"streaming": True},
    "at once": {"streaming": True, "layerwise": False},
    "delayed": {"delay": 1, "warmup_steps": 1},
    "bf16": {"image_dtype": "bf16"},
    "clipped": {"max_grad_norm": 1.0},
    "drop": {"written_weights": "drop"},
}
NAMED = r"^layers\.5\.weight is out of the model.*layers\.5\.weight, fp32 \[4, 32\].*build the optimizer, engine or Trainer after that"


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict(pair("mlp")[0].state_dict())


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    model.layers[0].weight.clamp_(-0.01, 0.01)


@torch.no_grad()
def one_element(model: nn.Module) -> None:
    model.layers[0].weight[3, 3] += 1.0


def other_memory(model: nn.Module) -> None:
    model.layers[0].weight.data = model.layers[0].weight.data * 0.5


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model.layers[0], "weight", 0.5)
    prune.remove(model.layers[0], "weight")
    model.layers[0].bias = model.layers[0]._parameters.pop("bias")  # after the weight, as before


def same_weights_in_other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def fused_step(model: nn.Module) -> None:
    """torch counts no version for a fused step."""
    weight = model.layers[0].weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1, fused=True).step()
    weight.grad = None


@torch.no_grad()
def swap_averages(model: nn.Module) -> None:
    """Swaps in averages for an evaluation, and puts the weights back."""
    kept = [weight.detach().clone() for weight in model.parameters()]
    for weight in model.parameters():
        weight.mul_(0.5)
    for weight, before in zip(model.parameters(), kept, strict=True):
        weight.copy_(before)


# The user imported these functions before any optimizer was built.
def clip_by_norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), max_norm=1.0)


def clip_with_norm(model: nn.Module) -> None:
    total = get_total_norm([weight.grad for weight in model.parameters() if weight.grad is not None])
    clip_grads_with_norm_(model.parameters(), 1.0, total)


def clip_by_value(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), clip_value=1.0)


def norm_alone(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), float("inf"))


WRITTEN = r"layers\.0\.weight is another in the model.*written_weights='drop'"
CLIPPED = r"clipping of layers\.0\.weight.*max_grad_norm="
#: Acts between two steps, each with the modes that refuse it and the refusal's words.
ACTS: dict[str, tuple[Act, set[str], str]] = {
    "loads": (load_state_dict, MODES.keys() - {"drop"}, WRITTEN),
    "clamps": (clamp, MODES.keys() - {"drop"}, WRITTEN),
    "writes one element": (one_element, MODES.keys() - {"drop"}, WRITTEN),
    "replaces memory": (other_memory, MODES.keys() - {"drop"}, WRITTEN),
    "prunes": (pruned, MODES.keys() - {"drop"}, WRITTEN),
    "steps another optimizer": (fused_step, MODES.keys() - {"drop"}, WRITTEN),
    "moves the same weights": (same_weights_in_other_memory, set(), ""),
    "swaps averages": (swap_averages, set(), ""),
    "clips by norm": (clip_by_norm, {"streaming", "at once", "clipped"}, CLIPPED),
    "clips with a norm": (clip_with_norm, {"streaming", "at once", "clipped"}, CLIPPED),
    "clips by value": (clip_by_value, {"streaming", "at once", "clipped"}, CLIPPED),
    "reads the norm": (norm_alone, set(), ""),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("act", ACTS)
def test_an_act_between_two_steps_is_refused_or_changes_nothing(act: str, mode: str) -> None:
    do, refused, said = ACTS[act]
    models = pair("mlp")
    made = [longshore.AdamW(model.named_parameters(), lr=1e-2, **MODES[mode]) for model in models]
    for model, optimizer in zip(models, made, strict=True):
        train(model, optimizer, range(3))
        if "delay" in MODES[mode]:
            optimizer.flush()
    if mode in refused:
        with pytest.raises(errors.UsageError, match=said):
            do(models[0])
            step(models[0], made[0], 3)
        return
    do(models[0])
    if "drop" not in refused and refused:
        models[0].zero_grad()
        models[0].load_state_dict(models[1].state_dict())  # the next gradients belong to the other model
    for model, optimizer in zip(models, made, strict=True):
        step(model, optimizer, 3)
        optimizer.flush()
    assert same_bits(*models)


def test_what_is_loaded_before_the_job_is_opened_counts() -> None:
    model, other = pair("mlp")
    nn.init.normal_(other.layers[0].weight)
    optimizer = longshore.AdamW(model.named_parameters(), lr=0.0, weight_decay=0.0)
    model.load_state_dict(other.state_dict())
    step(model, optimizer, 0)
    assert same_bits(model, other)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = list(model.named_parameters())
    return [{"params": [first], "lr": 1e-3}, {"params": rest, "lr": 1e-1}]


def swap_parameters(groups: list[dict[str, Any]]) -> None:
    first, second = groups
    first["params"], second["params"], first["lr"], second["lr"] = second["params"], first["params"], second["lr"], first["lr"]


#: Changes of param groups between two steps, each with the refusal's first words. None means that training goes on as
#: with torch.
EDITS: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str | None]] = {
    "sorted": (lambda groups: groups.sort(key=lambda group: -group["lr"]), None),
    "sorted within": (lambda groups: groups[1]["params"].reverse(), None),
    "swapped": (swap_parameters, None),
    "replaced": (lambda groups: groups[1]["params"].__setitem__(0, nn.Parameter(torch.zeros(32))), r"layers\.0\.bias is out of param_groups"),
    "moved": (lambda groups: groups[0]["params"].append(groups[1]["params"].pop()), r"layers\.5\.bias is in param_groups\[0\].*in group 1"),
    "merged": (lambda groups: groups[1]["params"].extend(groups.pop(0)["params"]), r"layers\.0\.weight is in param_groups\[0\].*in group 0"),
    "split": (lambda groups: groups.append({**groups[1], "params": [groups[1]["params"].pop()]}), r"layers\.5\.bias is in param_groups\[2\]"),
    "removed": (lambda groups: groups.pop(0), r"layers\.0\.weight is out of param_groups"),
    "added": (lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(2))), r"group0\.param1 is new in param_groups\[0\]"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_param_groups_are_honoured_or_refused_by_name(edit: str, streaming: bool) -> None:
    change, refused = EDITS[edit]
    ours, theirs = pair("mlp")
    optimizer, plain = longshore.SGD(groups_of(ours), streaming=streaming), torch.optim.SGD(groups_of(theirs))
    train(ours, optimizer, range(2))
    train(theirs, plain, range(2))
    change(optimizer.param_groups)
    if refused is not None:
        with pytest.raises(errors.UsageError, match=f"^{refused}.*close\\(\\) this optimizer"):
            step(ours, optimizer, 2)
        assert optimizer.version == 2
        return
    change(plain.param_groups)
    train(ours, optimizer, range(2, 5))
    train(theirs, plain, range(2, 5))
    assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("mode", ["safe", "streaming"])
def test_other_memory_of_another_shape_is_refused(mode: str) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = longshore.AdamW(model.named_parameters(), **MODES[mode])

    def step_with(width: int) -> None:
        model.weight.data = model.weight.data[:, :width].clone()
        optimizer.zero_grad()
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()

    step_with(64)
    with pytest.raises(errors.UsageError, match=r"weight is fp32 \[64, 8\]"):
        step_with(8)


@pytest.mark.parametrize("mode", ["streaming", "clipped"])
def test_parameters_of_an_optimizer_that_is_gone_may_be_clipped(mode: str) -> None:
    model, _ = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters(), **MODES[mode])
    step(model, optimizer, 0)
    del optimizer
    gc.collect()
    model.loss(0).backward()
    clip_by_norm(model)
    clip_by_value(model)


def replace(model: nn.Module) -> None:
    model.layers[5] = nn.Linear(32, 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("streaming", [False, True])
def test_the_trainers_callback(streaming: bool, tmp_path: pathlib.Path) -> None:
    class Resizing(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                model.resize_token_embeddings(80)

    trainer = transformers.Trainer(
        example.tiny_llama(),
        arguments(tmp_path, max_steps=4, max_grad_norm=0),
        train_dataset=example.Counting(),
        optimizer_cls_and_kwargs=(longshore.AdamW, {"lr": 1e-3, "streaming": streaming}),
        callbacks=[longshore.huggingface.Callback(), Resizing()],
    )
    with pytest.raises(errors.UsageError, match=r"^(model\.embed_tokens|lm_head)\.weight is out of the model.*fp32 \[80, 32\]"):
        trainer.train()
    assert trainer.state.global_step == trainer.optimizer.optimizer.version == 2


def test_what_moves_or_goes_is_let_be() -> None:
    """Only the replacement of a parameter by another one is an error."""
    model, _ = pair("mlp")
    model.aside = nn.Linear(3, 3)
    engine = engine_of(model)
    train_engine(engine, range(1))
    model.stack = nn.Sequential(*model.layers)  # the same modules at another place
    model.layers = model.stack
    train_engine(engine, range(1))
    nn.utils.parametrize.register_parametrization(model.layers[0], "weight", nn.Identity())
    train_engine(engine, range(1))
    del model.aside
    train_engine(engine, range(1))
    model.more = nn.Linear(3, 3)  # belongs to some other optimizer
    train_engine(engine, range(1))
    assert engine.optimizer.version == 5
    replace(model)
    with pytest.raises(errors.UsageError, match=NAMED):
        engine.backward(model.loss(5))


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"streaming": True, "accumulate": 2}, {"missing_gradients": "zeros"}])
def test_who_never_has_a_gradient_is_named_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "FIRST_STEPS", 4)
    model, _ = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters(), **options)
    model.layers[5] = nn.Linear(32, 4)
    optimizer.open()
    late = model.layers[3].bias
    said = []
    for step in range(7):
        late.requires_grad_(step == 1)
        for micro_step in range(options.get("accumulate", 1)):
            model.loss(step + micro_step).backward()
        with warnings.catch_warnings(record=True, action="always") as caught:
            optimizer.step()
        optimizer.zero_grad()
        said += [(step, str(warning.message)) for warning in caught]
    assert optimizer.version == 7
    if "missing_gradients" in options:
        assert said == [], "the option says what that means"
        return
    [(step, message)] = said
    assert step == 3
    assert message.startswith("layers.5.weight, layers.5.bias got no gradient in all of the first 4 steps")
    assert "build the optimizer after that" in message and "missing_gradients='skip'" in message
