"""What ranks gather and reduce on devices is right under any legal order of the devices' work, and each wait is needed for it. order_rank.py
is what a rank does."""

from typing import Any

import pytest
from accelerator import same
from conftest import several
from test_ranks import run

RANKS = 2
SEEDS = 4
SCATTER: dict[str, Any] = {"partition": "reduce-scatter"}
DELAYED: dict[str, Any] = {"delay": 1, "warmup_steps": 1}
#: By name: what ranks train, and how.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "scatter": ("towers", {**SCATTER, "streaming": True}),
    "scatter safe": ("towers", SCATTER),
    "scatter delayed": ("towers", {**SCATTER, **DELAYED, "streaming": True}),
    "scatter amended": ("towers", {**SCATTER, **DELAYED, "streaming": True, "correction": "worker-local"}),
    "reduced": ("towers", {"partition": "all-reduced"}),
    "units": ("units", {"part": 1.5}),
    "units delayed": ("units", {**DELAYED, "part": 0.9}),
    "units scatter": ("units", {**SCATTER, "part": 3.0}),
    "units scatter delayed": ("units", {**SCATTER, **DELAYED, "part": 2.5}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], list[list[Any]]]:
    """By mode and seed, what each rank found; without a seed, on the host."""
    runs: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for mode, (way, options) in MODES.items():
        runs[mode, None] = (way, options)
        for seed in range(SEEDS):
            runs[mode, seed] = (way, {**options, "seed": seed})
    with several(1, "2GiB") as servers:
        given = [(way, {**options, "servers": servers, "job": f"run-{number}"}) for number, (way, options) in enumerate(runs.values())]
        found = run(tmp_path_factory.mktemp("ranks"), given, RANKS, "order_rank.py")
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("mode", MODES)
def test_any_legal_order_gives_the_same_bits(trained: dict[tuple[Any, ...], list[list[Any]]], mode: str, seed: int) -> None:
    for found, expected in zip(trained[mode, seed], trained[mode, None], strict=True):
        assert all(result.isfinite().all() for result in expected)
        assert same(found, expected)
