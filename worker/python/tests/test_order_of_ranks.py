"""Gathering and reducing on devices is right under any legal order of the devices' work, and needs each of its waits. A rank runs
order_rank.py."""

import os
from typing import Any

import pytest
from accelerator import same
from conftest import several
from test_ranks import run

RANKS = 2
#: Soak tests draw more orders.
SEEDS = range(4 if os.environ.get("LONGSHORE_SOAK") else 3)
#: Seeds that act alike at each wait. Seed 0 does only the needed operations, and seed 1 all others first.
PLAIN = (0, 1)
SCATTER: dict[str, Any] = {"partition": "reduce-scatter"}
DELAYED: dict[str, Any] = {"delay": 1, "warmup_steps": 1}
#: The ranks' model and options in each mode.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "scatter": ("towers", {**SCATTER, "streaming": True}),
    "scatter safe": ("towers", SCATTER),
    "reduced": ("towers", {"partition": "all-reduced"}),
    "units": ("units", {"part": 1.5}),
    "units scatter": ("units", {**SCATTER, "part": 3.0}),
    "units scatter delayed": ("units", {**SCATTER, **DELAYED, "part": 2.5}),
}
#: For each wait, the call that is dropped, and a mode in which wrong results show that.
WITHOUT = {
    "a bucket is written behind its zeros": ("_filled.let_wait", "scatter"),
    "a bucket is reduced behind all streams that write there": ("_reduce.let_wait", "scatter"),
    "what is reduced is sent behind that": ("_push_reduced.collective", "scatter safe"),
    "a collective's memory is kept": ("tensors", "scatter safe"),
    "ranks know of each other's gradients behind their count": ("ranks_with.collective", "scatter"),
    "a gradient is kept until it is in its bucket": ("_send.keep_for", "scatter"),
    "weights are spread behind what ranks gather": ("_spread.collective", "reduced"),
    "a unit is used behind what ranks gather": ("gather.collective", "units"),
    "another stream that uses a unit waits for that, too": ("_wait_for_gathered.let_wait", "units"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], list[list[Any]]]:
    """Returns each rank's results by mode and seed; without a seed, on the host."""
    runs: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for mode, (way, options) in MODES.items():
        runs[mode, None] = (way, options)
        for seed in SEEDS:
            runs[mode, seed] = (way, {**options, "seed": seed})
    for what, mode in WITHOUT.values():
        for seed in PLAIN:
            runs[what, seed] = (MODES[mode][0], {**MODES[mode][1], "seed": seed, "without": what})
    with several(1, "3GiB") as servers:
        given = [(way, {**options, "servers": servers, "job": f"run-{number}"}) for number, (way, options) in enumerate(runs.values())]
        found = run(tmp_path_factory.mktemp("ranks"), given, RANKS, "order_rank.py")
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_any_legal_order_gives_the_same_bits(trained: dict[tuple[Any, ...], list[list[Any]]], mode: str, seed: int) -> None:
    for found, expected in zip(trained[mode, seed], trained[mode, None], strict=True):
        assert all(result.isfinite().all() for result in expected)
        assert same(found, expected)


@pytest.mark.parametrize("left_out", WITHOUT)
def test_each_wait_is_needed(trained: dict[tuple[Any, ...], list[list[Any]]], left_out: str) -> None:
    what, mode = WITHOUT[left_out]
    wrong = [seed for seed in PLAIN if not all(map(same, trained[what, seed], trained[mode, None]))]
    print(f"without {left_out}: seeds {wrong} are wrong")
    assert wrong
