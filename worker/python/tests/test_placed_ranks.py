"""Four ranks whose parameters lie on meshes: HSDP, tensor parallelism, and FSDP2 with it. A rank runs rank.py."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import several
from rank import net
from safetensors.torch import load_file
from test_ranks import CLIP, RANKS, Found, Loop, are_equal, run_named

STEPS = 4
WAYS = ("hybrid", "tensor", "both")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placed")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Found:
    """Returns each rank's results in each way: in safe mode, in streaming mode of two jobs in succession, and with a delay."""
    runs: dict[str, tuple[str, dict[str, Any]]] = {}
    for way in WAYS:
        runs[way] = (way, {"keep": True, "steps": STEPS})
        parted = {"job": f"parted-{way}", "streaming": True}
        runs[f"{way} first"] = (way, {**parted, "steps": STEPS // 2})
        runs[f"{way} then"] = (way, {**parted, "steps": STEPS, "seed": 1})
        if way != "tensor":
            runs[f"{way} delayed"] = (way, {"steps": STEPS, "delay": 1, "warmup_steps": 1, "streaming": way == "both"})
    runs["both"][1]["saves"] = {"folder": str(folder), "everyone": False}
    runs["resumed"] = ("both", {"resume": "hybrid", "seed": 1, "steps": 0, "keep": True})
    with several(2, "2GiB") as servers:
        return run_named(folder, runs, servers=servers, max_grad_norm=CLIP)


@pytest.mark.parametrize("way", WAYS)
def test_a_way_equals_a_plain_loop_bit_for_bit(trained: Found, way: str) -> None:
    """The norm covers the whole gradient, with each piece once."""
    Loop(net("placed")).check(trained[way], STEPS)
    assert all(are_equal(rank["frozen"], [net("placed").up.bias]) for rank in trained[way])


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_was_left_goes_on_in_streaming_mode_bit_for_bit(trained: Found, way: str) -> None:
    for whole, first, then in zip(trained[way], trained[f"{way} first"], trained[f"{way} then"], strict=True):
        assert then["version"] == STEPS // 2
        assert first["norms"] + then["norms"] == whole["norms"]
        assert are_equal(then["own"], whole["own"])


@pytest.mark.parametrize("way", WAYS)
def test_each_piece_is_sent_once(trained: Found, way: str) -> None:
    elements = sum(param.numel() for param in net("placed").parameters() if param.requires_grad)
    for sent in zip(*([pushed for pushed, _ in rank["bytes"]] for rank in trained[way]), strict=True):
        # Each rank's part is padded to whole blocks of 64 Ki elements.
        assert 4 * elements <= sum(sent) <= 4 * (elements + RANKS * 64 * 1024)
        assert max(sent) < 0.3 * sum(sent)


@pytest.mark.parametrize("way", ["hybrid", "both"])
def test_ranks_that_hold_the_same_have_the_same_bits(trained: Found, way: str) -> None:
    """Also after delayed steps, whose weights differ from exact ones."""
    delayed = trained[f"{way} delayed"]
    assert all(are_equal(rank["weights"], delayed[0]["weights"]) for rank in delayed)
    assert not are_equal(delayed[0]["own"], trained[way][0]["own"])
    for one, other in ((0, 2), (1, 3)):
        assert are_equal(trained["hybrid"][one]["own"], trained["hybrid"][other]["own"])
        assert are_equal(trained["tensor"][one]["own"][:2], trained["tensor"][other]["own"][:2])


def test_all_state_of_one_way_fills_a_job_of_another(trained: Found) -> None:
    for one, other in zip(trained["hybrid"], trained["resumed"], strict=True):
        state, filled = one["state"]["state"], other["state"]["state"]
        assert all(torch.equal(state[number][key], filled[number][key]) for number in state for key in state[number])
        assert are_equal(one["weights"], other["weights"])


def test_files_have_what_ranks_have(trained: Found, folder: Path) -> None:
    weights = load_file(folder / "model" / "model.safetensors")
    names = [name for name, param in net("placed").named_parameters() if param.requires_grad]
    assert are_equal([weights[name] for name in names], trained["both"][0]["weights"])
    written = torch.load(folder / "adamw.pt", weights_only=True)["state"]
    state = trained["both"][0]["state"]["state"]
    assert all(torch.equal(written[number]["exp_avg"], of["exp_avg"]) for number, of in state.items())


def test_parts_are_those_that_torch_makes(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    assert run_named(tmp_path, {"fills": ("fills", {"seed": seed})})["fills"] == [""] * RANKS
