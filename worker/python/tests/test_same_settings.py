"""Settings that decide a run's bits are the same on all ranks, and a change on a restart is named. A replaced optimizer says so."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from models import pair

import longshore
from longshore import LossScale, errors

FIRST: dict[str, Any] = {"lr": 1e-3, "max_grad_norm": 1.0, "streaming": True, "accumulate": 1}


def trained(servers: str, job: str, steps: int = 1, **options: Any) -> None:
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
    trained(servers, "changed")
    with warnings.catch_warnings(action="error"):
        trained(servers, "changed", deadline=30.0, layerwise=False)
    with pytest.warns(UserWarning, match=f"job changed was trained so far with {named}.*: its bits are those of neither"):
        trained(servers, "changed", **changed)


@pytest.mark.parametrize(("changed", "named"), [
    ({"max_grad_norm": 2.0}, r"max_grad_norm is 2\.0 on rank 1, but must be 1\.0, as on rank 0"),
    ({"lr": 2e-3}, r"lr is 0\.002 on rank 1, but must be 0\.001, as on rank 0"),
    ({"delay": 1, "warmup_steps": 3}, "warmup_steps is 3 on rank 1, but must be 2, as on rank 0"),
])
def test_a_rank_with_other_settings_ends(servers: str, changed: dict[str, Any], named: str) -> None:
    same = {"delay": 1, "warmup_steps": 2} if "delay" in changed else {}

    # Threads that seed torch's one generator at a time build different models.
    models = [pair("mlp")[0] for _ in range(2)]

    def rank(number: int) -> None:
        options = {**same, **(changed if number else {})}
        model = models[number]
        made = longshore.AdamW(
            model.named_parameters(), servers=servers, job="ranks", rank=number, world_size=2, **{**FIRST, **options}
        )
        for step in range(2 if number else 1):
            model.loss(step).backward()
            made.step()

    with ThreadPoolExecutor(2) as ranks:
        ended = [ranks.submit(rank, number) for number in range(2)]
        ended[0].result(60)
        with pytest.raises(errors.InvalidError, match=named):
            ended[1].result(60)
