"""Four ranks that amend their own partitions before they gather the others'. amended_rank.py is what a rank does."""

from typing import Any

import numpy as np
import pytest
import torch
from amended_rank import STEPS
from conftest import several
from rank import net
from test_ranks import RANKS, run
from test_worker_local import Local
from torch import Tensor

from longshore import _params
from longshore._partition import layout

WARMUP, LR = 2, 1e-3
LOCAL: dict[str, Any] = {"delay": 1, "warmup_steps": WARMUP, "correction": "worker-local"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "scatter": ("scatter", {}),
    "scatter streaming": ("scatter", {"streaming": True, "max_grad_norm": 0.5, "image_dtype": "bf16"}),
    "ddp": ("ddp", {"max_grad_norm": 0.5}),
    "fsdp": ("fsdp", {"streaming": True, "gradient_dtype": "bf16"}),
    "fp32 sums": ("scatter", {"reduce_dtype": "fp32", "gradient_dtype": "bf16"}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank found in each way: on the host, on what it takes for a device, and there in three processes' optimizers."""
    runs: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, (way, options) in WAYS.items():
        runs[f"{name} host"] = (way, {**LOCAL, **options, "on_device": False})
        runs[f"{name} device"] = (way, {**LOCAL, **options, "on_device": True})
    runs["resumed"] = ("scatter", {**LOCAL, "on_device": True, "ends": [3, 6, STEPS]})
    with several(2, "2GiB") as servers:
        given = [(way, {**options, "servers": servers, "job": name.replace(" ", "-")}) for name, (way, options) in runs.items()]
        found = run(tmp_path_factory.mktemp("amended"), given, program="amended_rank.py")
    return dict(zip(runs, found, strict=True))


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(ours, theirs) for one, other in pairs for ours, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("name", WAYS)
def test_a_device_gives_the_bits_of_the_host(trained: dict[str, list[dict[str, Any]]], name: str) -> None:
    for host, device in zip(trained[f"{name} host"], trained[f"{name} device"], strict=True):
        assert host["amended"] == 0
        assert device["amended"] > 0
        assert same(device["weights"], host["weights"])
        assert same(device["weights"], trained[f"{name} device"][0]["weights"])


def test_ranks_that_start_again_go_on(trained: dict[str, list[dict[str, Any]]]) -> None:
    for undisturbed, resumed in zip(trained["scatter host"], trained["resumed"], strict=True):
        assert same(resumed["weights"], undisturbed["weights"])


def test_partitions_equal_a_plain_loop(trained: dict[str, list[dict[str, Any]]]) -> None:
    """Each piece of a parameter is one of the job: its rates are of 64 elements of that piece."""
    found = trained["scatter host"][0]
    model = list(net().parameters())
    table = _params.table([{"params": model}])
    by_param = layout(table, RANKS).of_params()
    for index, parameter in enumerate(model):
        for piece in by_param[index]:
            part = slice(piece.start, piece.start + piece.elements)
            rule = Local(parameter.detach().numpy().ravel()[part])
            images, rates = [rule.master.copy()], [np.zeros_like(rule.master)]
            for step in range(1, STEPS + 1):
                reads = step - 1 if step <= WARMUP else step - 2
                expected = images[reads]
                if reads < step - 1 and rates[reads].any():
                    gradient = found["gradients"][step - 2][index].numpy().ravel()[part]
                    limit = np.float32(LR * (1 - rule.beta1) / np.sqrt(1 - rule.beta2))
                    expected = expected - np.clip(rates[reads] * gradient, -limit, limit)
                assert np.array_equal(found["weights"][step - 1][index].numpy().ravel()[part], expected), (step, piece.name)
                rule.step(found["gradients"][step - 1][index].numpy().ravel()[part], step, LR, ahead=False)
                look, rate = rule.look(step, LR)
                is_delayed = step + 1 > WARMUP
                images.append(look if is_delayed else rule.master.copy())
                rates.append(rate if is_delayed else np.zeros_like(rate))
