"""Four ranks with gloo that have adapters over a base in units, kept on servers. A rank runs unit_rank.py and unit_base.py."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import unit_rank
from conftest import running, several
from test_ranks import run
from test_shard_ranks import DELAYED, SCATTER, buckets, budget, part_of, same
from unit_rank import RANKS

from longshore.distributed.gathered import LEAST_SHARED

KEEP: dict[str, Any] = {"model": "adapters", "frozen": "keep"}
#: By name: options, run with the model in one piece and with gathered weights.
MODES: dict[str, dict[str, Any]] = {
    "sum": KEEP,
    "scatter": {**KEEP, **SCATTER},
    "delayed": {**KEEP, **SCATTER, **DELAYED, "accumulate": 2},
    "checkpoint": {**KEEP, **SCATTER, "model": "adapters checkpoint"},
    "leaves out": {**KEEP, **SCATTER, "model": "adapters leaves out"},
    "written": {**KEEP, **SCATTER, "writes": True},
}
#: Modes in which no rank runs without the others.
ONCE = ["scatter", "delayed", "checkpoint"]
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Returns each rank's results, by mode and by ``weights`` option. Units are released and materialized again."""
    room = budget(unit_rank.adapted()) + 2 * buckets(unit_rank.adapted())
    runs: dict[str, tuple[str, dict[str, Any]]] = {}
    for mode, options in MODES.items():
        runs[f"{mode} None"] = ("train", options)
        runs[f"{mode} gathered"] = ("train", {**options, "weights": "gathered", "budget": room})
    with several(2, "3GiB") as servers:
        given = [(what, {**options, "servers": servers, "job": re.sub(r"\W", "-", name)}) for name, (what, options) in runs.items()]
        found = run(tmp_path_factory.mktemp("ranks"), given, RANKS, "unit_rank.py")
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_units_have_the_bits_of_the_model_in_one_piece(trained: Found, mode: str) -> None:
    for plain, ours in zip(trained[f"{mode} None"], trained[f"{mode} gathered"], strict=True):
        same(ours, plain)
        assert ours["fetched"] > 4 * sum(parameter.numel() for parameter in unit_rank.adapted().parameters())


@pytest.mark.parametrize("mode", ONCE)
def test_a_rank_pulls_its_part_of_frozen_weights_once(trained: Found, mode: str) -> None:
    """Covers the rank of a model in one piece, which gathers the weights when the job is opened."""
    frozen = [parameter.numel() for parameter in unit_rank.adapted().parameters() if not parameter.requires_grad]
    assert any(elements % RANKS for elements in frozen)
    part = sum(map(part_of, frozen))
    assert part < 0.26 * sum(frozen)
    for way in (None, "gathered"):
        for ours in trained[f"{mode} {way}"]:
            assert ours["frozen"] == 4 * part


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_close_gather_the_base_and_what_trains(trained: Found, mode: str) -> None:
    """Covers a rank that has written to a part of the base, which stays."""
    trains = [parameter.numel() for parameter in unit_rank.adapted().parameters() if parameter.requires_grad]
    small = sum(elements for elements in trains if 4 * elements < LEAST_SHARED)
    for ours in trained[f"{mode} gathered"]:
        assert ours["closed"] == [] and ours["closing frozen"] == 0
        assert 4 * small <= ours["closing"] == 4 * sum(map(part_of, trains))


@pytest.mark.parametrize("how", ["gone", "one fails", "one steps on"])
def test_no_rank_waits_for_one_that_does_not_close_with_it(how: str, tmp_path: Path) -> None:
    """A closing rank pulls the weights that it lacks. A rank whose optimizer is gone pulls the base at its use."""
    options = {"frozen": "keep", "how": how}
    with several(1, "1GiB") as servers:
        [ranks] = run(tmp_path, [("ended", {"servers": servers, "job": "ended", **options})], RANKS, "unit_base.py")
    whole = 4 * sum(parameter.numel() for parameter in unit_rank.adapted().parameters() if parameter.dim() > 1 and not parameter.requires_grad)
    for rank in ranks:
        assert rank["asked"] == (0 if how == "gone" else whole)
        assert rank["later"] == (whole if how == "gone" else 0)
    assert [rank["differ"] for rank in ranks] == [[]] * RANKS


@pytest.mark.parametrize("way", [{}, SCATTER], ids=["sum", "scatter"])
def test_ranks_generate_different_lengths_over_a_gathered_base(way: dict[str, Any], tmp_path: Path) -> None:
    """No rank waits for another, with and without eval(). A pass without gradients pulls its weights whole."""
    embeddings, layer = 4 * 256 * 128, 4 * (4 * 128 * 128 + 3 * 128 * 256)
    options = {"frozen": "keep", "budget": embeddings + 2 * layer + 2 * 4 * 2 * 128 * RANKS + 100_000, **way}
    with several(1, "1GiB") as servers:
        [ranks] = run(tmp_path, [("generates", {"servers": servers, "job": "generates", **options})], RANKS, "unit_base.py")
    for rank, found in enumerate(ranks):
        assert found["expected"].shape[1] == 3 + 2 + 5 * rank
        assert all(torch.equal(made, found["expected"]) for made in found["made"])
        assert min(found["asked"]) > layer > found["trained"]


def test_a_frozen_weight_that_one_rank_writes_to_is_pulled_whole_by_the_others(trained: Found) -> None:
    least = trained["scatter gathered"][0]["frozen"]
    found = [ours["frozen"] for ours in trained["written gathered"]]
    assert found[1] == least and all(ours > least for rank, ours in enumerate(found) if rank != 1)


def test_ranks_that_go_back_to_a_checkpoint_get_its_base(tmp_path: Path) -> None:
    """Each rank writes to its frozen weights between the checkpoint and the return to it."""
    with running("--checkpoint-dir", str(tmp_path / "checkpoints"), memory="1GiB") as servers:
        ways = {"sum": KEEP, "scatter": {**KEEP, **SCATTER}}
        runs = [("back", {"servers": servers, "job": name, **options}) for name, options in ways.items()]
        for ranks in run(tmp_path, runs, RANKS, "unit_rank.py"):
            for rank in ranks:
                assert rank["version"] == 2 and rank["again"] == rank["first"] and rank["way"] == "gathered"


#: By kind of load after the job was opened: the ranks whose model then has another base.
LOADED = {"all": range(RANKS), "one rank": [1], "element": range(RANKS), "same": []}


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> Found:
    # Units leave the device, so that an evaluation does not find the weights of the training.
    room = budget(unit_rank.adapted())
    ways: dict[str, dict[str, Any]] = {
        "sum": {"frozen": "keep", "budget": room},
        "scatter": {"frozen": "keep", **SCATTER, "budget": room + 2 * buckets(unit_rank.adapted())},
    }
    runs = {f"{way} {what}": {**ways[way], "what": what} for way in ways for what in LOADED}
    with several(2, "1GiB") as servers:
        given = [("loaded", {**options, "servers": servers, "job": re.sub(r"\W", "-", name)}) for name, options in runs.items()]
        found = run(tmp_path_factory.mktemp("ranks"), given, RANKS, "unit_base.py")
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("what", LOADED)
@pytest.mark.parametrize("way", ["sum", "scatter"])
def test_a_base_that_is_loaded_after_the_job_was_opened_is_used_by_all(reloaded: Found, way: str, what: str) -> None:
    """Covers training, evaluation and saved state. A rank finds the difference in its own part, and tells the other ranks."""
    for rank in reloaded[f"{way} {what}"]:
        expected, trained, evaluated = rank["losses"]
        assert rank["differ"] == []
        assert trained == evaluated == expected
    plain = reloaded[f"{way} same"][0]["losses"]
    assert [number for number, rank in enumerate(reloaded[f"{way} {what}"]) if rank["losses"] != plain] == list(LOADED[what])


@pytest.mark.parametrize("way", ["sum", "scatter"])
def test_a_base_that_is_loaded_again_stays_in_parts(reloaded: Found, way: str) -> None:
    """``shard`` compares each rank's part with the servers'."""
    frozen = [parameter.numel() for parameter in unit_rank.adapted().parameters() if not parameter.requires_grad]
    large = [elements for elements in frozen if 4 * elements >= LEAST_SHARED]
    for what in LOADED:
        for rank in reloaded[f"{way} {what}"]:
            assert rank["compared"] == 4 * sum(map(part_of, large))


def test_what_one_rank_loads_of_what_trains_is_refused_on_all(tmp_path: Path) -> None:
    options = {"frozen": "keep", "budget": budget(unit_rank.adapted()) + 2 * buckets(unit_rank.adapted())}
    with several(1, "1GiB") as servers:
        ways: dict[str, dict[str, Any]] = {"sum": {}, "scatter": SCATTER}
        runs = [("refused", {**options, **way, "servers": servers, "job": name}) for name, way in ways.items()]
        for ranks in run(tmp_path, runs, RANKS, "unit_base.py"):
            for rank, found in enumerate(ranks):
                assert "another in the model than on the servers" in found["said"]
                assert found["said"].startswith("rank 1 failed") is (rank != 1)
