"""Four ranks with gloo and a model in units: weights whole or gathered, gradients summed by servers or reduced by ranks, and adapters over a
base in units that servers keep. A rank runs unit_rank.py."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import unit_rank
from conftest import running, several
from test_ranks import Found, run_named
from test_streaming_and_delay import Delayed
from torch import nn
from unit_rank import RANKS, STEPS

import longshore
from longshore.transfer.partitions import LEAST_SHARED

CLIP = 0.05
DELAYED: dict[str, Any] = {"delay": 1, "warmup_steps": 2}
SCATTER: dict[str, Any] = {"partition": "reduce-scatter"}
KEEP: dict[str, Any] = {"model": "adapters", "frozen": "keep"}
#: Modes with their options. Each runs with the model in one piece, with whole weights, and with gathered weights.
MODES: dict[str, dict[str, Any]] = {
    "sum": {},
    "sum delayed": DELAYED,
    "scatter": {**SCATTER, "keep": True},
    "scatter delayed": {**SCATTER, **DELAYED},
    "scatter in micro-steps": {**SCATTER, **DELAYED, "accumulate": 3},
}
#: Options of runs over a base that servers keep. Each runs with the model in one piece and with gathered weights.
BASES: dict[str, dict[str, Any]] = {
    "base sum": KEEP,
    "base scatter": {**KEEP, **SCATTER},
    "base delayed": {**KEEP, **SCATTER, **DELAYED, "accumulate": 2},
    "base checkpoint": {**KEEP, **SCATTER, "model": "adapters checkpoint"},
    "base leaves out": {**KEEP, **SCATTER, "model": "adapters leaves out"},
    "base written": {**KEEP, **SCATTER, "writes": True},
}
#: Modes that make sense only with all ranks together.
ONCE = ["base scatter", "base delayed", "base checkpoint"]
#: Options of further models. Each runs with the model in one piece and with gathered weights.
MODELS: dict[str, dict[str, Any]] = {
    "leaves out": {"model": "leaves out"},
    "leaves out scatter": {"model": "leaves out", "accumulate": 2, **SCATTER},
    "checkpoint": {"model": "checkpoint"},
    "reentrant": {"model": "reentrant", **SCATTER},
    "tied": {"model": "tied", **SCATTER, **DELAYED},
    "adapters scatter": {"model": "adapters", **SCATTER},
    # While the model is built, a fifth of it fits into memory.
    "built scatter": {"room": 200_000, **SCATTER, **DELAYED},
    "adapters built scatter": {"room": 400_000, **KEEP, **SCATTER},
    # A rank generates text alone. Its passes without gradients pull whole weights, and no other rank waits.
    "alone": {"alone": True},
    "alone base scatter": {"alone": True, **KEEP, **SCATTER},
    **BASES,
}
#: For each refused case of unit_rank.py, the options, and the error that every rank raises.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "budget": ({"weights": "gathered"}, r"InvalidError: budget is \d+ on rank 2, but must be budget of \d+, as on rank 0"),
    "units": ({"weights": "gathered"}, r"InvalidError: unit layers is 12 weights of \d+ bytes on rank 1, but must be unit layers.0 of 2 weights of"),
    "name": ({"weights": "slices"}, r"InvalidError: weights is 'slices', but must be 'whole' or 'gathered'"),
    "fsdp": ({}, r"UsageError: layers.0.weight is sharded \(DTensor\), but must be whole with shard\(\): leave fully_shard out"),
    "loaded": ({"weights": "gathered", "frozen": "keep"}, r"UsageError: (rank 1 failed, .*)?layers\.\S* is another in the model than on the servers"),
}
REFUSED["loaded scatter"] = ({**REFUSED["loaded"][0], **SCATTER}, REFUSED["loaded"][1])


def budget(model: nn.Module, scatters: bool = False) -> int:
    """Returns a budget for three layers of a deep model and one layer's gradients. Where ranks reduce, it also has room for two buckets,
    each slightly larger than all gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bucket = 4 * sum(parameter.numel() + 3 * RANKS for parameter in trained)
    return 4 * max(sum(4 * p.numel() for p in layer.parameters()) for layer in model.layers) + 2 * bucket * scatters


def room(options: dict[str, Any]) -> int:
    name = options.get("model", "deep")
    return 6_000_000 if name in ("checkpoint", "reentrant", "tied") else budget(unit_rank.MODELS[name](), "partition" in options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Returns each rank's results, by mode and by ``weights`` option."""
    runs: dict[str, tuple[str, dict[str, Any]]] = {}
    references: dict[str, str] = {}
    for mode, options in (MODES | MODELS).items():
        in_one_piece = {name: value for name, value in options.items() if name not in ("alone", "room")}
        reference = ("train", {**in_one_piece, "max_grad_norm": CLIP, "transport": "tcp"})
        references[f"{mode} None"] = next((name for name, there in runs.items() if there == reference), f"{mode} None")
        runs[references[f"{mode} None"]] = reference
        for way in ("whole", "gathered") if mode in MODES else ("gathered",):
            transport = "tcp" if mode in MODES else "auto"
            given = {**options, "max_grad_norm": CLIP, "transport": transport, "weights": way, "budget": room(options)}
            runs[f"{mode} {way}"] = ("train", given)
    runs["lent"] = ("train", {**SCATTER, "keep": True, "weights": "default", "budget": room(SCATTER), "max_grad_norm": CLIP})
    # The budget makes units leave the device. An evaluation must then fetch them, instead of finding the weights of the
    # training.
    runs["loaded"] = ("loaded", {"frozen": "keep", **SCATTER, "budget": room({**SCATTER, "model": "adapters"})})
    runs |= {f"!{case}": (f"!{case.split()[0]}", options) for case, (options, _) in REFUSED.items()}
    with several(2, "4GiB") as servers:
        found = run_named(tmp_path_factory.mktemp("ranks"), runs, "unit_rank.py", servers=servers)
    return {**found, **{name: found[reference] for name, reference in references.items()}}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Checks that both have the same losses, norms, weights and servers' state, bit for bit."""
    assert ours["losses"] == theirs["losses"]
    assert ours["norms"] == theirs["norms"]
    assert ours["hash"] == theirs["hash"]
    same_weights(ours, theirs)


def same_weights(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    differ = [name for name, value in theirs["state"].items() if not torch.equal(value, ours["state"][name])]
    assert not differ and ours["state"].keys() == theirs["state"].keys(), differ


@pytest.mark.parametrize(("mode", "way"), [*((mode, way) for mode in MODES for way in ("whole", "gathered")), *((mode, "gathered") for mode in MODELS)])
def test_units_have_the_bits_of_the_model_in_one_piece(trained: Found, mode: str, way: str) -> None:
    for plain, ours in zip(trained[f"{mode} None"], trained[f"{mode} {way}"], strict=True):
        assert ours["way"] == way and ours["fetched"] > 0
        same(ours, plain)


def part_of(elements: int) -> int:
    """Returns the number of a weight's elements that a rank pulls. Each rank also pulls the remainder that ranks cannot share, and small
    weights whole."""
    return elements // RANKS + elements % RANKS if 4 * elements >= LEAST_SHARED else elements


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_pulls_a_quarter_of_the_bytes(trained: Found, mode: str) -> None:
    layer = [parameter.numel() for parameter in unit_rank.deep().layers[0].parameters()]
    least = STEPS * 4 * sum(parameter.numel() for parameter in unit_rank.deep().parameters())
    for whole, gathered in zip(trained[f"{mode} whole"], trained[f"{mode} gathered"], strict=True):
        # Both runs fetch the same units to the device. `fetched` does not count a fetch that was given up.
        assert whole["asked"] >= whole["fetched"] >= least
        layers, rest = divmod(whole["asked"], 4 * sum(layer))
        assert rest == 0 and gathered["asked"] == 4 * layers * sum(map(part_of, layer))
        if "delay" not in MODES[mode]:
            # Weights that arrive after the decision on a step count in the next step's report.
            assert gathered["pulled"] < 0.4 * whole["pulled"]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_close_gather_the_last_weights(trained: Found, mode: str) -> None:
    elements = [parameter.numel() for parameter in unit_rank.deep().parameters()]
    for way, each in (("whole", elements), ("gathered", list(map(part_of, elements)))):
        for ours in trained[f"{mode} {way}"]:
            assert ours["closed"] == [] and ours["closing"] == 4 * sum(each)


def elements_of_the_base(*, trains: bool = False) -> list[int]:
    return [parameter.numel() for parameter in unit_rank.adapted().parameters() if parameter.requires_grad is trains]


@pytest.mark.parametrize("mode", BASES)
def test_ranks_that_close_gather_the_base_and_what_trains(trained: Found, mode: str) -> None:
    """Covers a rank that has written to a part of the base, which stays."""
    trains = elements_of_the_base(trains=True)
    small = sum(elements for elements in trains if 4 * elements < LEAST_SHARED)
    for ours in trained[f"{mode} gathered"]:
        assert ours["closed"] == [] and ours["closing frozen"] == 0
        assert 4 * small <= ours["closing"] == 4 * sum(map(part_of, trains))


@pytest.mark.parametrize("mode", ONCE)
def test_a_rank_pulls_its_part_of_frozen_weights_once(trained: Found, mode: str) -> None:
    """Covers the rank of a model in one piece, which gathers the weights when the job is opened."""
    frozen = elements_of_the_base()
    assert any(elements % RANKS for elements in frozen)
    part = sum(map(part_of, frozen))
    assert part < 0.26 * sum(frozen)
    for way in (None, "gathered"):
        assert [ours["frozen"] for ours in trained[f"{mode} {way}"]] == [4 * part] * RANKS


def test_a_pass_without_gradients_pulls_its_weights_whole(trained: Found) -> None:
    whole = 4 * sum(elements_of_the_base())
    ranks = zip(trained["alone base scatter gathered"], trained["base scatter gathered"], strict=True)
    assert all(alone["frozen"] > whole > ours["frozen"] for alone, ours in ranks)


def test_a_frozen_weight_that_one_rank_writes_to_is_pulled_whole_by_the_others(trained: Found) -> None:
    least = trained["base scatter gathered"][0]["frozen"]
    found = [ours["frozen"] for ours in trained["base written gathered"]]
    assert found[1] == least and all(ours > least for rank, ours in enumerate(found) if rank != 1)


def test_a_base_that_one_rank_loads_after_the_job_was_opened_is_used_by_all(trained: Found) -> None:
    """A rank finds the difference in its own part, and tells the other ranks."""
    for rank in trained["loaded"]:
        expected, training, evaluated = rank["losses"]
        assert training == evaluated == expected and rank["differ"] == []
    assert trained["loaded"][1]["losses"] != trained["loaded"][0]["losses"]


@pytest.mark.parametrize("way", ["whole", "gathered"])
@pytest.mark.parametrize("mode", ["sum", "scatter"])
def test_what_is_here_stays_where_a_step_reads_the_version_of_the_one_before(trained: Found, mode: str, way: str) -> None:
    """The first delayed step reads such a version."""
    for exact, delayed in zip(trained[f"{mode} {way}"], trained[f"{mode} delayed {way}"], strict=True):
        assert delayed["asked"] < exact["asked"]


def state_of_one_rank(model: nn.Module, optimizer: longshore.AdamW) -> Any:
    """Trains on all ranks' batches as micro-steps. Returns the hash of the servers' state."""
    for step in range(STEPS):
        for rank in range(RANKS):
            (model.loss(unit_rank.batch(step, 0, 1, rank)) / RANKS).backward()
        optimizer.step()
    optimizer.flush()
    return unit_rank.job_of(optimizer).state_hash()


@pytest.mark.parametrize("mode", ["sum", "sum delayed"])
def test_summed_gradients_have_the_state_of_one_rank(trained: Found, mode: str) -> None:
    model = unit_rank.model_of("deep")
    found = state_of_one_rank(model, unit_rank.optimizer_of(model, {**MODES[mode], "accumulate": RANKS, "max_grad_norm": CLIP}))
    assert [ours["hash"] for ours in trained[f"{mode} gathered"]] == [found] * RANKS


@pytest.mark.parametrize("way", ["scatter whole", "scatter gathered", "lent"])
def test_reduced_gradients_give_what_a_plain_loop_gives(trained: Found, way: str) -> None:
    for ours in trained[way]:
        model = unit_rank.model_of("deep")
        loops = {name: Delayed(parameter.detach().numpy()) for name, parameter in model.named_parameters()}
        for step, (gradients, norm) in enumerate(zip(ours["gradients"], ours["norms"], strict=False), 1):
            scale = torch.tensor(min(1.0, CLIP / (norm + 1e-6)), dtype=torch.float32).numpy()
            for loop, gradient in zip(loops.values(), gradients, strict=True):
                loop.step(gradient.numpy() * scale, step, 1e-2, ahead=False)
        assert norm > CLIP, "it clips"
        for name, loop in loops.items():
            assert torch.equal(ours["state"][name], torch.from_numpy(loop.master)), name


def test_ranks_that_reduce_gather_by_default(trained: Found) -> None:
    assert [ours["way"] for ours in trained["lent"]] == ["gathered"] * RANKS


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_is_told_what_cannot_be_done(trained: Found, case: str) -> None:
    for told in trained[f"!{case}"]:
        assert re.match(REFUSED[case][1], told), told


def test_ranks_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    """Ranks get a base from the checkpoint that they have written to since."""
    ways = {"sum": {}, "scatter": SCATTER, "base sum": KEEP, "base scatter": {**KEEP, **SCATTER}}
    with running("--checkpoint-dir", str(tmp_path / "checkpoints"), memory="2GiB") as servers:
        found = run_named(tmp_path, {name: ("back", options) for name, options in ways.items()}, "unit_rank.py", servers=servers)
    for rank in (rank for ranks in found.values() for rank in ranks):
        assert rank["version"] == 2 and rank["again"] == rank["first"] and rank["way"] == "gathered"


def test_a_rank_that_is_left_alone_is_told_so(tmp_path: Path) -> None:
    """The other ranks have not ended, and use no unit."""
    with several(1) as servers:
        [found] = run_named(tmp_path, {"alone": ("left alone", {})}, "unit_rank.py", servers=servers).values()
    assert re.match(r"rank 0 waited at a use of unit layers.0 for the other ranks, .*weights='whole'", str(found[0])), found[0]


def test_no_rank_waits_for_one_that_does_not_close_with_it(tmp_path: Path) -> None:
    """A closing rank pulls the weights that it lacks."""
    with several(1, "1GiB") as servers:
        [ranks] = run_named(tmp_path, {"ended": ("ended", {"frozen": "keep"})}, "unit_rank.py", servers=servers).values()
    whole = 4 * sum(parameter.numel() for parameter in unit_rank.adapted().parameters() if parameter.dim() > 1 and not parameter.requires_grad)
    for rank in ranks:
        assert (rank["asked"], rank["later"], rank["differ"]) == (whole, 0, [])
