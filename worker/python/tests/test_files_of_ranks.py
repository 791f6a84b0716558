"""Jobs of partitions are saved to other programs' files by one rank, or by a call of all ranks, with equal contents to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import several
from rank import STEPS, net
from safetensors.torch import load_file
from test_checkpoints_of_others import read_universal
from test_ranks import run

WAYS = ("scatter", "fsdp", "sum")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], tuple[Path, list[dict[str, Any]]]]:
    """By way, and whether all ranks called: the folder, and each rank's results."""
    folders = {(way, everyone): tmp_path_factory.mktemp(way) for way in WAYS for everyone in (False, True)}
    with several(2, "1GiB") as servers:
        runs = [
            (way, {"servers": servers, "job": folder.name, "keep": True, "saves": {"folder": str(folder), "everyone": everyone}})
            for (way, everyone), folder in folders.items()
        ]
        found = run(tmp_path_factory.mktemp("ranks"), runs, world_size=2)
    return {key: (folder, ranks) for (key, folder), ranks in zip(folders.items(), found, strict=True)}


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_rank_0_writes_what_all_ranks_have(saved: dict[tuple[str, bool], Any], way: str, everyone: bool) -> None:
    folder, ranks = saved[way, everyone]
    state, weights = ranks[0]["state"]["state"], ranks[0]["weights"]
    as_torch = torch.load(folder / "adamw.pt", weights_only=True)
    universal = read_universal(folder / "universal" / (folder / "universal" / "latest_universal").read_text())
    model = load_file(folder / "model" / "model.safetensors")
    names = [name for name, _ in net().named_parameters()]
    assert set(universal) == set(model) == set(names)
    for number, name in enumerate(names):
        assert torch.equal(model[name], weights[number]), name
        assert torch.equal(universal[name]["fp32"], state[number]["master"]), name
        assert as_torch["state"][number]["step"] == universal[name]["step"] == STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(as_torch["state"][number][key], state[number][key]), (name, key)
            assert torch.equal(universal[name][key], state[number][key]), (name, key)
