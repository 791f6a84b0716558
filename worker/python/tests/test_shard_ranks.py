"""Four ranks with gloo and a model in units: weights whole or gathered, gradients summed by servers or reduced by ranks. A rank runs
unit_rank.py."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import unit_rank
from conftest import running, several
from safetensors.torch import save_file
from test_ranks import run
from test_streaming_and_delay import Delayed
from torch import nn
from unit_rank import RANKS, STEPS

import longshore
from longshore.distributed.gathered import LEAST_SHARED

CLIP = 0.05
#: The seed of the weights in models that ranks build.
SEED = 2**40 + 7
DELAYED: dict[str, Any] = {"delay": 1, "warmup_steps": 2}
SCATTER: dict[str, Any] = {"partition": "reduce-scatter"}
#: By name: options, run with the model in one piece, and with whole and gathered weights.
MODES: dict[str, dict[str, Any]] = {
    "sum": {},
    "sum delayed": DELAYED,
    "scatter": {**SCATTER, "keep": True},
    "scatter delayed": {**SCATTER, **DELAYED},
    "scatter in micro-steps": {**SCATTER, **DELAYED, "accumulate": 3},
}
#: By name: options, run with the model in one piece and with gathered weights.
MODELS: dict[str, dict[str, Any]] = {
    "leaves out": {"model": "leaves out"},
    "leaves out scatter": {"model": "leaves out", "accumulate": 2, **SCATTER},
    "checkpoint": {"model": "checkpoint"},
    "reentrant": {"model": "reentrant", **SCATTER},
    "tied": {"model": "tied", **SCATTER, **DELAYED},
    "adapters scatter": {"model": "adapters", **SCATTER},
    "device scatter": {"late": True, **SCATTER, **DELAYED},
    # A fifth of the model is in memory while it is built.
    "built scatter": {"room": 200_000, **SCATTER, **DELAYED},
    "adapters built scatter": {"model": "adapters", "room": 400_000, "frozen": "keep", **SCATTER},
    "alone scatter": {"alone": True, **SCATTER},
}
#: By case of unit_rank.py: options, and the error on every rank.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "budget": ({"weights": "gathered"}, r"InvalidError: budget is \d+ on rank 2, but must be budget of \d+, as on rank 0"),
    "units": ({"weights": "gathered"}, r"InvalidError: unit layers is 12 weights of \d+ bytes on rank 1, but must be unit layers.0 of 2 weights of"),
    "name": ({"weights": "slices"}, r"InvalidError: weights is 'slices', but must be 'whole' or 'gathered'"),
    "fsdp": ({}, r"UsageError: layers.0.weight is sharded \(DTensor\), but must be whole with shard\(\): leave fully_shard out"),
}


def budget(model: nn.Module) -> int:
    """Returns the bytes of three layers of a deep model, and of one layer's gradients."""
    return 4 * max(sum(4 * p.numel() for p in layer.parameters()) for layer in model.layers)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Returns each rank's results, by mode and by ``weights`` option."""
    room = {"sum": budget(unit_rank.deep()), "scatter": budget(unit_rank.deep()) + 2 * buckets(unit_rank.deep())}
    runs: dict[str, tuple[str, dict[str, Any]]] = {}
    for mode, options in MODES.items():
        for way in (None, "whole", "gathered"):
            given = {**options, "weights": way, "budget": room[mode.split()[0]]} if way else options
            runs[f"{mode} {way}"] = ("train", {**given, "transport": "tcp", "max_grad_norm": CLIP})
    for mode, options in MODELS.items():
        large = 6_000_000 if "model" in options and "leaves" not in mode else room["scatter" if "partition" in options else "sum"]
        runs[f"{mode} None"] = ("train", {name: value for name, value in options.items() if name not in ("alone", "late", "room")})
        runs[f"{mode} gathered"] = ("train", {**options, "weights": "gathered", "budget": large})
    runs["lent"] = ("train", {**SCATTER, "keep": True, "weights": "default", "budget": room["scatter"], "max_grad_norm": CLIP})
    runs |= {f"!{case}": (f"!{case}", options) for case, (options, _) in REFUSED.items()}
    with several(2, "3GiB") as servers:
        given = [(what, {**options, "servers": servers, "job": re.sub(r"\W", "-", name)}) for name, (what, options) in runs.items()]
        found = run(tmp_path_factory.mktemp("ranks"), given, RANKS, "unit_rank.py")
    return dict(zip(runs, found, strict=True))


def buckets(model: nn.Module) -> int:
    """Returns slightly more than the bytes of the single bucket for the gradients of a deep model."""
    return 4 * sum(parameter.numel() + 3 * RANKS for parameter in model.parameters() if parameter.requires_grad)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Checks that both have the same losses, norms, weights and servers' state, bit for bit."""
    assert ours["losses"] == theirs["losses"]
    assert ours["norms"] == theirs["norms"]
    assert ours["hash"] == theirs["hash"]
    differ = [name for name, value in theirs["state"].items() if not torch.equal(value, ours["state"][name])]
    assert not differ and ours["state"].keys() == theirs["state"].keys(), differ


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["whole", "gathered"])
def test_units_have_the_bits_of_the_model_in_one_piece(trained: dict[str, list[dict[str, Any]]], mode: str, way: str) -> None:
    for plain, ours in zip(trained[f"{mode} None"], trained[f"{mode} {way}"], strict=True):
        assert ours["way"] == way
        same(ours, plain)


@pytest.mark.parametrize("mode", MODELS)
def test_what_a_model_does_works_with_weights_that_are_gathered(trained: dict[str, list[dict[str, Any]]], mode: str) -> None:
    for plain, ours in zip(trained[f"{mode} None"], trained[f"{mode} gathered"], strict=True):
        if "alone" in mode:  # results of evaluations are not compared
            ours = {**ours, "losses": plain["losses"]}
        same(ours, plain)
        assert ours["fetched"] > 0


def part_of(elements: int) -> int:
    """Returns the number of a weight's elements that a rank pulls. Each rank also pulls the remainder that ranks cannot share, and small
    weights whole."""
    return elements // RANKS + elements % RANKS if 4 * elements >= LEAST_SHARED else elements


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_pulls_a_quarter_of_the_bytes(trained: dict[str, list[dict[str, Any]]], mode: str) -> None:
    layer = [parameter.numel() for parameter in unit_rank.deep().layers[0].parameters()]
    least = STEPS * 4 * sum(parameter.numel() for parameter in unit_rank.deep().parameters())
    for whole, gathered in zip(trained[f"{mode} whole"], trained[f"{mode} gathered"], strict=True):
        # Both fetch the same units to the device. A fetch given up before its end is not counted there.
        assert whole["asked"] >= whole["fetched"] >= least
        layers, rest = divmod(whole["asked"], 4 * sum(layer))
        assert rest == 0 and gathered["asked"] == 4 * layers * sum(map(part_of, layer))
        if "delay" not in MODES[mode]:
            # Weights that arrive after the decision on a step are in the next step's report.
            assert gathered["pulled"] < 0.4 * whole["pulled"]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_close_gather_the_last_weights(trained: dict[str, list[dict[str, Any]]], mode: str) -> None:
    elements = [parameter.numel() for parameter in unit_rank.deep().parameters()]
    for way, each in (("whole", elements), ("gathered", list(map(part_of, elements)))):
        for ours in trained[f"{mode} {way}"]:
            assert ours["closed"] == [] and ours["closing"] == 4 * sum(each)


@pytest.mark.parametrize("way", ["whole", "gathered"])
@pytest.mark.parametrize("mode", ["sum", "scatter"])
def test_what_is_here_stays_where_a_step_reads_the_version_of_the_one_before(trained: dict[str, list[dict[str, Any]]], mode: str, way: str) -> None:
    """The first delayed step reads such a version."""
    for exact, delayed in zip(trained[f"{mode} {way}"], trained[f"{mode} delayed {way}"], strict=True):
        assert delayed["asked"] < exact["asked"]


@pytest.mark.parametrize("delayed", [{}, DELAYED], ids=["exact", "delayed"])
def test_summed_gradients_have_the_state_of_one_rank(trained: dict[str, list[dict[str, Any]]], delayed: dict[str, Any]) -> None:
    """The single rank takes the same batches as micro-steps, with its model in one piece."""
    model = unit_rank.model_of("deep")
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, accumulate=RANKS, max_grad_norm=CLIP, **delayed)
    for step in range(STEPS):
        for rank in range(RANKS):
            (model.loss(unit_rank.batch(step, 0, 1, rank)) / RANKS).backward()
        optimizer.step()
    optimizer.flush()
    assert optimizer._connection is not None
    found = optimizer._connection.job.state_hash()
    for ours in trained["sum delayed gathered" if delayed else "sum gathered"]:
        assert ours["hash"] == found


@pytest.mark.parametrize("way", ["scatter whole", "scatter gathered", "lent"])
def test_reduced_gradients_give_what_a_plain_loop_gives(trained: dict[str, list[dict[str, Any]]], way: str) -> None:
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


def test_ranks_that_reduce_gather_by_default(trained: dict[str, list[dict[str, Any]]]) -> None:
    assert [ours["way"] for ours in trained["lent"]] == ["gathered"] * RANKS


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_is_told_what_cannot_be_done(trained: dict[str, list[Any]], case: str) -> None:
    for told in trained[f"!{case}"]:
        assert re.match(REFUSED[case][1], told), told


def test_ranks_train_what_was_built_in_pieces_as_one_rank_does(tmp_path: Path) -> None:
    """All ranks build their models within longshore.Init. A single rank takes all ranks' batches as micro-steps."""
    room = budget(unit_rank.deep())
    model = unit_rank.model_of("built", made=SEED)
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, accumulate=RANKS, max_grad_norm=CLIP)
    longshore.shard(model, optimizer, room)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(STEPS):
        for rank in range(RANKS):
            (model.loss(unit_rank.batch(step, 0, 1, rank)) / RANKS).backward()
        optimizer.step()
    optimizer.flush()
    assert optimizer._connection is not None
    found = optimizer._connection.job.state_hash()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert not any(torch.equal(first[name], value) for name, value in weights.items())
    torch.save(first, tmp_path / "first.pt")
    save_file(first, tmp_path / "first.safetensors")
    given: dict[str, Any] = {"model": "built", "max_grad_norm": CLIP}
    made = {**given, "made": SEED, "budget": room}
    scattered = {**given, **SCATTER, "weights": "gathered", "budget": room + 2 * buckets(model)}
    ways = {
        "whole": {**made, "weights": "whole"},
        "gathered": {**made, "weights": "gathered"},
        "in one piece": {**given, **SCATTER, "given": str(tmp_path / "first.pt")},
        "scatter": {**scattered, "made": SEED},
        "files": {**scattered, "made": SEED + 1, "files": str(tmp_path / "first.safetensors")},
        "engine": {**scattered, "made": SEED},
    }
    with several(2, "1GiB") as servers:
        runs = [
            ("engine" if way == "engine" else "train", {**options, "servers": servers, "job": way.replace(" ", "-")})
            for way, options in ways.items()
        ]
        trained = dict(zip(ways, run(tmp_path, runs, RANKS, "unit_rank.py"), strict=True))
    for way in ("whole", "gathered"):
        for ours in trained[way]:
            assert ours["way"] == way and ours["hash"] == found
            assert all(torch.equal(ours["state"][name], value) for name, value in weights.items())
    for way in ("scatter", "files"):
        for plain, ours in zip(trained["in one piece"], trained[way], strict=True):
            same(ours, plain)
    for ours, theirs in zip(trained["engine"], trained["scatter"], strict=True):
        assert ours["in units"] and ours["losses"] == theirs["losses"]
        assert all(torch.equal(ours["state"][name], value) for name, value in theirs["state"].items())


def test_ranks_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    with running("--checkpoint-dir", str(tmp_path / "checkpoints"), memory="1GiB") as servers:
        ways: dict[str, dict[str, Any]] = {"sum": {}, "scatter": SCATTER}
        runs = [("back", {"servers": servers, "job": name, **options}) for name, options in ways.items()]
        for ranks in run(tmp_path, runs, RANKS, "unit_rank.py"):
            for rank in ranks:
                assert rank["version"] == 2 and rank["again"] == rank["first"] and rank["way"] == "gathered"


def test_a_rank_that_is_left_alone_is_told_so(tmp_path: Path) -> None:
    """The other ranks have not ended, and use no unit."""
    with several(1) as servers:
        [found] = run(tmp_path, [("left alone", {"servers": servers, "job": "alone"})], RANKS, "unit_rank.py")
    assert re.match(r"rank 0 waited at a use of unit layers.0 for the other ranks, .*weights='whole'", str(found[0])), found[0]
