"""Compares training with torch's own optimizers, with fp32 on the wire."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MODELS, RULES, distance, pair
from torch import nn

import longshore

STEPS = 200
CLOSE = 1e-6


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    *,
    scheduler: Any = None,
    clip: float | None = None,
    micro_steps: int = 1,
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for micro_step in range(micro_steps):
            (model.loss(step * micro_steps + micro_step) / micro_steps).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


class Phase(nn.Module):
    """A conjugate's imaginary part: autograd leaves its gradient lazily negated. The weight ``a`` is lazily negated itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch._neg_view(torch.tensor([-0.3])))
        self.b = nn.Parameter(torch.tensor([0.7]))

    def loss(self, step: int) -> torch.Tensor:
        return (torch.complex(self.a, self.b).conj() * torch.tensor([1 + 2j])).real.square().sum()


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"streaming": True, "accumulate": 2}])
def test_lazily_negated_gradients_and_weights(options: dict[str, Any]) -> None:
    ours, theirs = Phase(), Phase()
    micro_steps = options.get("accumulate", 1)
    train(ours, longshore.SGD(ours.named_parameters(), lr=1e-2, **options), micro_steps=micro_steps)
    train(theirs, torch.optim.SGD(theirs.named_parameters(), lr=1e-2), micro_steps=micro_steps)
    theirs.loss(0).backward()
    assert theirs.a.is_neg() and theirs.b.grad is not None and theirs.b.grad.is_neg()
    assert ours.a.item() == pytest.approx(theirs.a.item(), rel=1e-5) and ours.b.item() == pytest.approx(theirs.b.item(), rel=1e-5)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay. Other parameters do not, and learn faster."""
    named = list(model.named_parameters())
    return [
        {"params": [item for item in named if item[1].ndim > 1], "weight_decay": 0.1},
        {"params": [item for item in named if item[1].ndim <= 1], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95)},
    ]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_groups_scheduler_clipping_and_accumulation(name: str, streaming: bool) -> None:
    ours, theirs = pair(name)
    steps = 40

    def run(model: nn.Module, kind: Callable[..., torch.optim.Optimizer], clip: float | None, **options: Any) -> None:
        optimizer = kind(groups(model), lr=1e-3, **options)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-3, 4e-3], total_steps=steps)
        train(model, optimizer, steps, scheduler=scheduler, clip=clip, micro_steps=3)

    if streaming:
        run(ours, longshore.AdamW, None, streaming=True, accumulate=3, max_grad_norm=0.5)
    else:
        run(ours, longshore.AdamW, 0.5)
    run(theirs, torch.optim.AdamW, 0.5)
    assert distance(ours, theirs) < CLOSE


ALL_RULES = {
    **RULES,
    "plain": (longshore.SGD, torch.optim.SGD, {"lr": 1e-2}),
    "nesterov": (longshore.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("rule", ALL_RULES)
def test_two_hundred_steps_of_each_rule(rule: str) -> None:
    kind, reference, arguments = ALL_RULES[rule]
    ours, theirs = pair("mlp")
    train(ours, kind(ours.named_parameters(), **arguments))
    train(theirs, reference(theirs.named_parameters(), foreach=False, **arguments))
    assert distance(ours, theirs) < CLOSE


def test_lion_follows_its_paper() -> None:
    ours, theirs = pair("mlp")
    train(ours, longshore.Lion(ours.named_parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1))
    means = {parameter: torch.zeros_like(parameter) for parameter in theirs.parameters()}
    for step in range(STEPS):
        theirs.zero_grad()
        theirs.loss(step).backward()
        with torch.no_grad():
            for parameter, mean in means.items():
                parameter.mul_(1 - 1e-3 * 0.1).sub_(1e-3 * (0.9 * mean + 0.1 * parameter.grad).sign())
                mean.mul_(0.99).add_(0.01 * parameter.grad)
    assert distance(ours, theirs) < CLOSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_keep_fp32_masters(dtype: torch.dtype) -> None:
    ours, _ = pair("mlp")
    ours.to(dtype)
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in ours.parameters()]
    optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-3)
    reference = torch.optim.AdamW(masters, lr=1e-3)
    for step in range(50):
        ours.zero_grad()
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
        ours.layers(inputs).float().square().mean().backward()
        for master, parameter in zip(masters, ours.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
    rounded = [(master.to(dtype), parameter) for master, parameter in zip(masters, ours.parameters(), strict=True)]
    same = sum((a == b).sum().item() for a, b in rounded) / sum(a.numel() for a, _ in rounded)
    # fp32 master weights that differ in the last bit may round to either side.
    assert same > 0.999
    assert all(parameter.dtype is dtype for parameter in ours.parameters())
