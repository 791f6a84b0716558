"""A job's first weights, on two ranks of this process: jobs opened by the first gradients, and jobs opened before."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import pair, same_bits
from torch import nn

import longshore
from longshore import errors

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
