"""Jobs of two ranks in this process: their first weights, and settings that decide a run's bits. A change on a restart is named."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import pair, same_bits
from torch import nn

import longshore
from longshore import LossScale, errors

ROUNDS = [{"image_dtype": "bf16"}, {"master": "bf16"}]


class Rank:
    """A rank of two with a built optimizer, whose job is not open yet."""

    def __init__(self, rank: int, servers: str, job: str, **options: Any) -> None:
        self.rank, self.model = rank, pair("mlp")[0]
        given = {"lr": 1e-2, "world_size": 2, "deadline": 20.0, **options}
        self.optimizer = longshore.AdamW(self.model.named_parameters(), servers=servers, job=job, rank=rank, **given)

    def train(self, steps: int = 3, factor: float = 1.0) -> None:
        for step in range(steps):
            (self.model.loss(2 * step + self.rank) * factor).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def both(ranks: list[Rank], act: Callable[[Rank], None]) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(act, ranks))


def trained(servers: str, job: str, *, opens: bool, **options: Any) -> list[nn.Module]:
    ranks = [Rank(rank, servers, job, **options) for rank in range(2)]
    for rank in ranks if opens else ():
        rank.optimizer.open()
    both(ranks, Rank.train)
    for rank in ranks:
        rank.optimizer.close()
    return [rank.model for rank in ranks]


@pytest.mark.parametrize("options", [{}, {"streaming": True}, *({"streaming": True, **rounds} for rounds in ROUNDS)], ids=str)
def test_models_that_are_equal_need_no_open(servers: str, options: dict[str, Any]) -> None:
    """The second rank reads the first weights, as servers round them, in its first backward or behind it."""
    first, second = trained(servers, "gradients", opens=False, **options)
    assert same_bits(first, second)
    if len(options) < 2:
        assert same_bits(first, trained(servers, "before", opens=True)[0])


@pytest.mark.parametrize("streaming", [False, True])
def test_gradients_of_other_first_weights_are_refused(servers: str, streaming: bool) -> None:
    first, second = (Rank(rank, servers, "others", streaming=streaming) for rank in range(2))
    with torch.no_grad():
        second.model.layers[3].weight.add_(1.0)
    first.optimizer.open()
    with pytest.raises(errors.UsageError, match=r"layers\.3\.weight is another in this rank's model than on the servers.*call open\(\)"):
        second.train(steps=1)


@pytest.mark.parametrize("rounds", ROUNDS, ids=str)
def test_open_gives_all_ranks_the_weights_as_servers_round_them(servers: str, rounds: dict[str, str]) -> None:
    ranks = [Rank(rank, servers, "opened", **rounds) for rank in range(2)]
    for rank in ranks:
        rank.optimizer.open()
    assert same_bits(ranks[0].model, ranks[1].model)
    assert not same_bits(ranks[0].model, pair("mlp")[0])


FIRST: dict[str, Any] = {"lr": 1e-3, "max_grad_norm": 1.0, "streaming": True, "accumulate": 1}


def train_alone(servers: str, job: str, steps: int = 1, **options: Any) -> None:
    model, _ = pair("mlp")
    with longshore.AdamW(model.named_parameters(), servers=servers, job=job, **{**FIRST, **options}) as optimizer:
        for number in range(optimizer.version, optimizer.version + steps):
            (model.loss(number) * optimizer.loss_scale).backward()
            optimizer.step()


@pytest.mark.parametrize(("changed", "named"), [
    ({"max_grad_norm": None}, r"max_grad_norm=1\.0, and now max_grad_norm=None"),
    ({"lr": 1e-2, "weight_decay": 0.5}, r"lr=0\.001, and now lr=0\.01, weight_decay=0\.01, and now weight_decay=0\.5"),
    ({"loss_scale": LossScale(initial=4.0, dynamic=False)}, "loss_scale=None, and now"),
])
def test_a_restart_names_settings_that_change_bits(servers: str, changed: dict[str, Any], named: str) -> None:
    train_alone(servers, "changed")
    with warnings.catch_warnings(action="error"):
        train_alone(servers, "changed", deadline=30.0, layerwise=False)
    with pytest.warns(UserWarning, match=f"job changed was trained so far with {named}.*: its bits are those of neither"):
        train_alone(servers, "changed", **changed)


def test_a_restart_that_loads_a_handle_trains_with_its_hyperparameters(servers: str) -> None:
    """The handle's rate replaces the constructor's before the first step. A scheduler's rates cause no warning of other settings."""

    def steps(lr: float, handle: Any = None, now: float | None = None) -> Any:
        model, _ = pair("mlp")
        with longshore.AdamW(model.named_parameters(), servers=servers, job="loaded", lr=lr) as optimizer:
            if handle is not None:
                assert optimizer.version
                optimizer.load_state_dict(handle)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5, last_epoch=-1 if handle is None else 0)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] if now is None else now
                group["initial_lr"] = group["initial_lr"] if now is None else now
            for number in range(2):
                optimizer.zero_grad()
                model.loss(number).backward()
                optimizer.step()
                schedule.step()
            optimizer.flush()
            return optimizer.state_dict()

    with warnings.catch_warnings(action="error"):
        handle = steps(1e-2)
        handle = steps(5.0, handle)
        handle = steps(1e-2, handle)
    with pytest.warns(UserWarning, match=r"so far with lr=0\.01, and now lr=0\.02: "):
        steps(5.0, handle, 2e-2)


@pytest.mark.parametrize(("changed", "named"), [
    ({"max_grad_norm": 2.0}, r"max_grad_norm is 2\.0 on rank 1, but must be 1\.0, as on rank 0"),
    ({"lr": 2e-3}, r"lr is 0\.002 on rank 1, but must be 0\.001, as on rank 0"),
    ({"delay": 1, "warmup_steps": 3}, "warmup_steps is 3 on rank 1, but must be 2, as on rank 0"),
])
def test_a_rank_with_other_settings_ends(servers: str, changed: dict[str, Any], named: str) -> None:
    same = {"delay": 1, "warmup_steps": 2} if "delay" in changed else {}
    ranks = [Rank(number, servers, "ranks", **{**FIRST, **same, **(changed if number else {})}) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(rank.train, 1 + rank.rank) for rank in ranks]
        ended[0].result(60)
        with pytest.raises(errors.InvalidError, match=named):
            ended[1].result(60)
