"""Four ranks whose parameters lie on meshes: HSDP, tensor parallelism, and FSDP2 with it. A rank runs placed_rank.py."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import several
from placed_rank import STEPS, net
from safetensors.torch import load_file
from test_ranks import CLIP, RANKS, Loop, run
from torch import Tensor

WAYS = ("hybrid", "tensor", "both")
#: By case of placed_rank.py: options, and the ranks' error.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "absent": ({}, r"InvalidError: .*weight is on a mesh without rank \d, but must be on a mesh that has each rank"),
    "partial": ({}, r"InvalidError: weight is placed as \[Partial\(sum\)\], but must be placed by Shard and Replicate: redistribute"),
    "few": ({}, r"InvalidError: partition is nothing for rank 2, .*train with fewer ranks"),
    "unreduced": ({}, r"GradientError: 0\.weight\.grad is another on rank 2 than on rank 0.*call fully_shard on the whole model"),
    "written": ({}, r"UsageError: 0\.weight is another in the model than on the servers"),
}

Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placed")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Found:
    """Returns each rank's results in each way: in safe mode, in streaming mode of two jobs in succession, and with a delay."""
    with several(2, "2GiB") as servers:
        options: dict[str, Any] = {"servers": servers, "max_grad_norm": CLIP}
        runs: dict[str, tuple[str, dict[str, Any]]] = {}
        for way in WAYS:
            runs[way] = (way, {**options, "job": way, "keep": True})
            parted = {**options, "job": f"parted-{way}", "streaming": True}
            runs[f"{way} first"] = (way, {**parted, "steps": STEPS // 2})
            runs[f"{way} then"] = (way, {**parted, "seed": 1})
            if way != "tensor":
                runs[f"{way} delayed"] = (way, {**options, "job": f"delayed-{way}", "delay": 1, "warmup_steps": 1, "streaming": way == "both"})
        runs["both"][1]["folder"] = str(folder)
        runs["resumed"] = ("both", {**options, "job": "resumed", "resume": "hybrid", "seed": 1, "steps": 0, "keep": True})
        runs["fills"] = ("fills", {"seed": random.randrange(2**32)})
        print(runs["fills"])
        runs |= {f"!{case}": (f"!{case}", {"servers": servers, "job": case, **given}) for case, (given, _) in REFUSED.items()}
        found = run(folder, list(runs.values()), program="placed_rank.py")
    return dict(zip(runs, found, strict=True))


def has(loop: Loop, weights: dict[str, Tensor]) -> bool:
    """Returns whether the trained parameters' weights equal the loop's."""
    return loop.has([weight for name, weight in weights.items() if name != "up.bias"])


@pytest.mark.parametrize("way", WAYS)
def test_a_way_equals_a_plain_loop_bit_for_bit(trained: Found, way: str) -> None:
    """The norm covers the whole gradient, with each piece once."""
    loop = Loop(net())
    for gradients, norm in zip(trained[way][0]["gradients"], trained[way][0]["norms"], strict=True):
        exact = torch.stack([gradient.double().norm() for gradient in gradients]).norm().item()
        assert norm == pytest.approx(exact, rel=1e-6)
        loop.step(gradients, norm)
    assert loop.steps == STEPS
    for rank in trained[way]:
        assert rank["norms"] == trained[way][0]["norms"]
        assert has(loop, rank["weights"])
        assert torch.equal(rank["weights"]["up.bias"], net().up.bias)


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_was_left_goes_on_in_streaming_mode_bit_for_bit(trained: Found, way: str) -> None:
    for whole, first, then in zip(trained[way], trained[f"{way} first"], trained[f"{way} then"], strict=True):
        assert then["version"] == STEPS // 2
        assert first["norms"] + then["norms"] == whole["norms"]
        assert are_equal(then["own"], whole["own"])


@pytest.mark.parametrize("way", WAYS)
def test_each_piece_is_sent_once(trained: Found, way: str) -> None:
    elements = sum(param.numel() for param in net().parameters() if param.requires_grad)
    for sent in zip(*(rank["bytes"] for rank in trained[way]), strict=True):
        # Each rank's part is padded to whole blocks of 64 Ki elements.
        assert 4 * elements <= sum(sent) <= 4 * (elements + RANKS * 64 * 1024)
        assert max(sent) < 0.3 * sum(sent)


@pytest.mark.parametrize("way", ["hybrid", "both"])
def test_ranks_that_hold_the_same_have_the_same_bits(trained: Found, way: str) -> None:
    """Also after delayed steps, whose weights differ from exact ones."""
    delayed = trained[f"{way} delayed"]
    for rank in delayed:
        assert all(torch.equal(weight, rank["weights"][name]) for name, weight in delayed[0]["weights"].items())
    assert not are_equal(delayed[0]["own"], trained[way][0]["own"])
    for one, other in ((0, 2), (1, 3)):
        assert are_equal(trained["hybrid"][one]["own"], trained["hybrid"][other]["own"])
        assert are_equal(trained["tensor"][one]["own"][:2], trained["tensor"][other]["own"][:2])


def are_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_all_state_of_one_way_fills_a_job_of_another(trained: Found) -> None:
    for one, other in zip(trained["hybrid"], trained["resumed"], strict=True):
        state, filled = one["state"]["state"], other["state"]["state"]
        assert all(torch.equal(state[number][key], filled[number][key]) for number in state for key in state[number])
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items() if name != "up.bias")


def test_files_have_what_ranks_have(trained: Found, folder: Path) -> None:
    weights = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], weight) for name, weight in trained["both"][0]["weights"].items() if name in weights)
    written = torch.load(folder / "adamw.pt", weights_only=True)["state"]
    state = trained["both"][0]["state"]["state"]
    assert all(torch.equal(written[number]["exp_avg"], of["exp_avg"]) for number, of in state.items())


def test_parts_are_those_that_torch_makes(trained: Found) -> None:
    assert trained["fills"] == [""] * 4


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_is_told_what_cannot_be_done(trained: Found, case: str) -> None:
    for told in trained[f"!{case}"]:
        assert re.search(REFUSED[case][1], told), told
