"""Parameters with a gradient now and then: other steps leave them out, as torch does."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from models import RULES, distance, pair, same_bits, train
from torch import Tensor, nn
from torch.nn import functional

import longshore

CLOSE = 1e-6
STEPS = 60


class Experts(nn.Module):
    """Each batch goes through some of the experts, or through none. The bias of the last expert never gets a gradient."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.head = nn.Linear(width, 4)

    def loss(self, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        hidden = torch.randn(8, self.width, generator=generator)
        inputs = hidden
        for expert in self.experts[:-1]:
            if torch.rand((), generator=generator) < 0.3:
                hidden = hidden + functional.gelu(expert(hidden))
        if batch % 7 == 0:
            hidden = hidden + functional.linear(hidden, self.experts[-1].weight)
        return functional.cross_entropy(self.head(hidden), inputs[:, :4].argmax(1))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_parameter_without_a_gradient_is_left_out(streaming: bool) -> None:
    """Other rules are in the table of step counts below."""
    kind, reference, arguments = RULES["sgd"]
    ours, theirs = pair(Experts)
    never = ours.experts[-1].bias.detach().clone()
    train(ours, kind(ours.named_parameters(), streaming=streaming, **arguments), range(STEPS))
    train(theirs, reference(theirs.parameters(), **arguments), range(STEPS))
    assert distance(ours, theirs) < CLOSE
    assert torch.equal(ours.experts[-1].bias, never), "it does not even decay"


@pytest.mark.parametrize("where", ["servers", "worker"])
def test_a_gradient_of_any_backward_pass_counts(where: str) -> None:
    ours, theirs = pair(Experts)
    optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-3, streaming=True, accumulate=3, accumulate_on=where)
    train(ours, optimizer, range(STEPS), passes=3)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3), range(STEPS), passes=3)
    assert distance(ours, theirs) < CLOSE


def test_safe_and_streaming_mode_have_the_same_bits_also_with_a_delay() -> None:
    models = pair(Experts)
    for model, streaming in zip(models, (False, True), strict=True):
        options = {"streaming": streaming, "delay": 1, "warmup_steps": 10, "max_grad_norm": 0.5}
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-3, **options)
        train(model, optimizer, range(60))
        optimizer.flush()
    assert same_bits(*models)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_refused_step_can_be_given_up_or_completed(delay: int, accumulate: int) -> None:
    """In streaming mode the existing gradients have left when the step finds others missing."""
    models, options = [], {"lr": 1e-2, "missing_gradients": "error", "streaming": True, "delay": delay, "warmup_steps": 1}
    for is_refused in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = longshore.AdamW(model.named_parameters(), accumulate=accumulate, **options)

        def backward(batch: int, model: nn.Module = model) -> None:
            for micro_step in range(accumulate):
                inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * batch + micro_step))
                (model(inputs).square().mean() / accumulate).backward()

        for batch in range(6):
            if batch == 3:
                optimizer.flush()
                if is_refused:
                    for _ in range(2):
                        model[1](torch.ones(4, 8)).sum().backward()
                        with pytest.raises(longshore.errors.MissingGradientError, match=r"0\.weight.*flush\(\) to give this step up"):
                            optimizer.step()
                        assert optimizer.flush() == 3
            backward(batch)
            optimizer.step()
        # After the refusal, the parameter may still get a gradient.
        if is_refused:
            model[1](torch.ones(4, 8)).sum().backward()
            with pytest.raises(longshore.errors.MissingGradientError, match=r"call backward for what lacks one and step\(\) again"):
                optimizer.step()
            model[0](torch.ones(4, 8)).sum().backward()
        else:
            (model[0](torch.ones(4, 8)).sum() + model[1](torch.ones(4, 8)).sum()).backward()
        optimizer.step()
        optimizer.flush()
        assert optimizer.version == 7
        models.append(model)
    assert same_bits(*models)


@pytest.mark.parametrize("streaming", [False, True])
def test_two_ranks_leave_out_what_neither_has(two_servers: str, streaming: bool) -> None:
    ranks = pair(Experts, width=128)  # an expert lies on both servers
    options = {"lr": 1e-3, "servers": two_servers, "job": "union", "streaming": streaming, "world_size": 2}
    optimizers = [longshore.AdamW(model.named_parameters(), rank=rank, **options) for rank, model in enumerate(ranks)]
    for optimizer in optimizers:
        optimizer.open()

    def act(rank: int) -> None:
        for step in range(STEPS):
            optimizers[rank].zero_grad()
            if (step + rank) % 5:  # now and then a rank has no gradient at all
                ranks[rank].loss(2 * step + rank).backward()
            optimizers[rank].step()
        optimizers[rank].flush()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(act, (0, 1)))
    assert same_bits(*ranks)
    reference, _ = pair(Experts, width=128)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in (0, 1):
            if (step + rank) % 5:
                # In the mean, a rank without a gradient counts as zeros.
                (reference.loss(2 * step + rank) / 2).backward()
        optimizer.step()
    assert distance(ranks[0], reference) < CLOSE


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "sgd"])
def test_step_counts_of_torch_come_and_go_by_parameter(rule: str, streaming: bool) -> None:
    """A run that moves to Longshore and back equals the run that stays with torch."""
    kind, reference, arguments = RULES[rule]
    ours, theirs = pair(Experts)
    if rule != "adagrad":
        for model in (ours, theirs):
            model.experts[-1].bias.requires_grad_(False)  # torch has no state for a parameter that never got a gradient
    plain = reference(theirs.named_parameters(), **arguments)
    train(theirs, plain, range(40))
    ours.load_state_dict(theirs.state_dict())
    optimizer = kind(ours.named_parameters(), streaming=streaming, **arguments)
    optimizer.load_state_dict(plain.state_dict())

    def check(compare: Callable[[Tensor, Tensor], bool]) -> dict[str, Any]:
        full = optimizer.state_dict(full=True)
        counts = set()
        for number, state in plain.state_dict()["state"].items():
            counts.add(float(state["step"]))
            assert float(full["state"][number]["step"]) == float(state["step"]), number
            for name, value in state.items():
                assert compare(full["state"][number][name], value), (number, name)
        assert len(counts) > 3
        return full

    check(torch.equal)
    train(ours, optimizer, range(40, 120))
    train(theirs, plain, range(40, 120))
    assert distance(ours, theirs) < CLOSE
    full = check(lambda one, other: torch.allclose(one, other, rtol=1e-3, atol=CLOSE))
    back = reference(ours.named_parameters(), **arguments)
    back.load_state_dict({"state": full["state"], "param_groups": plain.state_dict()["param_groups"]})
    optimizer.close()
    train(ours, back, range(120, 160))
    train(theirs, plain, range(120, 160))
    assert distance(ours, theirs) < CLOSE


class Half(nn.Module):
    """The second layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def loss(self) -> Tensor:
        return self.used(torch.ones(2, 8)).sum()


def test_a_checkpoint_after_a_backward_that_left_parameters_out_is_written(tmp_path: Path) -> None:
    model = Half()
    with (
        longshore.Server(memory=256 << 20, checkpoint_dir=tmp_path) as server,
        longshore.AdamW(model.named_parameters(), lr=0.1, streaming=True, servers=server, job="half") as optimizer,
    ):
        model.loss().backward()
        optimizer.step()
        model.loss().backward()
        assert optimizer.checkpoint("between") == "between"
        optimizer.step()
        assert optimizer.version == 2


def test_a_whole_backward_outlives_a_flush() -> None:
    """Lightning validates, and so flushes, between two backward passes of a step."""
    flushed, plain = Half(), Half()
    plain.load_state_dict(flushed.state_dict())
    for model in (flushed, plain):
        with longshore.AdamW(model.named_parameters(), lr=0.1, streaming=True, accumulate=2) as optimizer:
            model.loss().backward()
            if model is flushed:
                optimizer.flush()
            (2 * model.loss()).backward()
            optimizer.step()
            assert optimizer.version == 1
    assert same_bits(flushed, plain)
