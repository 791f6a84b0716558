"""Adapters over a base on servers, where ranks reduce gradients among themselves. A rank runs frozen_rank.py."""

from typing import Any

import pytest
import torch
from conftest import several
from frozen_rank import STEPS, net
from test_ranks import CLIP, Loop, run
from torch import Tensor

WAYS = ("scatter", "fsdp", "ddp")
#: Kinds of ranks that can push gradients during backward.
STREAMING = ("scatter", "fsdp")

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Returns each rank's results: in one go, and in streaming mode, where a model of other weights continues the job."""
    with several(2, "1GiB") as servers:
        options: dict[str, Any] = {"servers": servers, "max_grad_norm": CLIP}
        runs: dict[str, tuple[str, dict[str, Any]]] = {way: (way, {**options, "job": way}) for way in WAYS}
        for way in STREAMING:
            parted = {**options, "job": f"parted-{way}", "streaming": True}
            runs[f"{way} first"] = (way, {**parted, "steps": STEPS // 2})
            runs[f"{way} then"] = (way, {**parted, "model_seed": 1})
        found = run(tmp_path_factory.mktemp("ranks"), list(runs.values()), program="frozen_rank.py")
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_adapters_equal_a_plain_loop_bit_for_bit(trained: Found, way: str) -> None:
    loop = Loop(net())
    for gradients, norm in zip(trained[way][0]["gradients"], trained[way][0]["norms"], strict=True):
        exact = torch.stack([gradient.double().norm() for gradient in gradients]).norm().item()
        assert norm == pytest.approx(exact, rel=1e-6)
        loop.step(gradients, norm)
    assert loop.steps == STEPS
    for rank in trained[way]:
        assert loop.has(rank["trained"])


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_has_the_base_of_rank_0(trained: Found, way: str) -> None:
    expected = [parameter.detach() for parameter in net().parameters() if not parameter.requires_grad]
    for rank in trained[way]:
        assert are_equal(rank["frozen"], expected)


@pytest.mark.parametrize("way", STREAMING)
def test_who_finds_the_job_gets_the_base_and_goes_on(trained: Found, way: str) -> None:
    """Streaming gives the same bits as well."""
    for whole, first, then in zip(trained[way], trained[f"{way} first"], trained[f"{way} then"], strict=True):
        assert then["version"] == STEPS // 2
        assert first["norms"] == whole["norms"][: STEPS // 2]
        assert then["norms"] == whole["norms"][STEPS // 2 :]
        assert are_equal(then["frozen"], whole["frozen"])
        assert are_equal(then["trained"], whole["trained"])


def are_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
