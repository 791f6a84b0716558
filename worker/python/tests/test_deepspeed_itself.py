"""Checkpoints to and from DeepSpeed itself, which runs in deepspeed_rank.py.

tests/run installs DeepSpeed beside the other packages, into a folder that TEST_DEEPSPEED names.
"""

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_rank import LATER, RATES, STEPS, Net, config, net
from test_ranks import run

import longshore
from longshore import checkpoint

FOLDER = os.environ.get("TEST_DEEPSPEED")
IS_HERE = bool(FOLDER) or importlib.util.find_spec("deepspeed") is not None
pytestmark = pytest.mark.skipif(
    not IS_HERE, reason=os.environ.get("TEST_DEEPSPEED_ABSENT") or "DeepSpeed is not installed: tests/run installs it"
)
#: DeepSpeed's settings, by the case's name.
WAYS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, "dtype": "fp32"},
    "stage 2": {"stage": 2, "dtype": "bf16"},
    "stage 3": {"stage": 3, "dtype": "fp32"},
}
Found = dict[str, list[dict[str, Any]]]
RANKS = 2


def with_deepspeed() -> str:
    """Returns the module path on which a process finds DeepSpeed."""
    return os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))


def deepspeed(out: Path, runs: dict[str, tuple[str, dict[str, Any]]]) -> Found:
    """Runs DeepSpeed on the ranks. Returns each one's results."""
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", with_deepspeed())
        return dict(zip(runs, run(out, list(runs.values()), RANKS, "deepspeed_rank.py"), strict=True))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """Returns a folder of checkpoints that the ranks have written, and their results."""
    folder = tmp_path_factory.mktemp("deepspeed")
    runs = {way: ("train", {"folder": str(folder), "name": way, **options}) for way, options in WAYS.items()}
    return folder, deepspeed(folder / "found", runs)


@pytest.fixture(scope="module")
def back(theirs: tuple[Path, Found]) -> tuple[dict[str, Any], Found]:
    """Returns each way's results here, loaded from DeepSpeed and trained on, and DeepSpeed's results from that."""
    folder, _ = theirs
    ours: dict[str, Any] = {}
    runs = {}
    for way, options in WAYS.items():
        model = model_of(way)
        optimizer = longshore.AdamW(model.named_parameters(), **RATES)
        checkpoint.load_deepspeed(optimizer, folder / f"{way}-universal")
        optimizer.open()
        come = states(optimizer, model)
        losses = steps(model, optimizer, range(STEPS, STEPS + LATER))
        checkpoint.save_deepspeed(optimizer, folder / f"{way}-ours")
        gone = states(optimizer, model)
        after = steps(model, optimizer, range(STEPS + LATER, STEPS + 2 * LATER))
        ours[way] = {"come": come, "losses": losses, "gone": gone, "after": after}
        runs[way] = ("load", {"folder": str(folder / f"{way}-ours"), **options})
    return ours, deepspeed(folder / "found again", runs)


def model_of(way: str) -> Net:
    return net().to({"fp32": torch.float32, "bf16": torch.bfloat16}[WAYS[way]["dtype"]])


def steps(model: Net, optimizer: longshore.AdamW, numbers: range) -> list[list[float]]:
    """Returns the losses of each rank's batches, which form one batch here."""
    losses = []
    for step in numbers:
        of_ranks = [model(step * RANKS + rank) for rank in range(RANKS)]
        optimizer.zero_grad()
        (sum(of_ranks) / RANKS).backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append([loss.item() for loss in of_ranks])
    return losses


def states(optimizer: longshore.AdamW, model: Net) -> dict[str, dict[str, Any]]:
    """Returns all state, by name. The weights of an fp32 model are the master weights."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = optimizer.state_dict(full=True)["state"]
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    weights = dict(model.named_parameters())
    return {name: {"master": weights[name].detach().clone(), **found[places[name]]} for name in names}


def check_same_bits(ours: dict[str, dict[str, Any]], of_rank: dict[str, dict[str, Any]], step: int) -> None:
    assert ours.keys() == of_rank.keys()
    for name, state in of_rank.items():
        assert ours[name]["step"] == step
        for key, value in state.items():
            assert torch.equal(ours[name][key].view(-1), value.view(-1)), (name, key)


def check_close(ours: list[list[float]], ranks: list[dict[str, Any]], way: str) -> None:
    """Losses of steps agree within the error of a step's sums."""
    for rank, found in enumerate(ranks):
        assert [losses[rank] for losses in ours] == pytest.approx(found["losses"], rel=0.03 if "2" in way else 1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_what_deepspeed_has_written_comes_to_the_bit(theirs: tuple[Path, Found], back: tuple[dict[str, Any], Found], way: str) -> None:
    ours, ranks = back[0][way], theirs[1][way]
    for found in ranks:
        check_same_bits(ours["come"], found["state"], STEPS)
    check_close(ours["losses"], ranks, way)


@pytest.mark.parametrize("way", WAYS)
def test_deepspeed_loads_to_the_bit_what_is_written_for_it(back: tuple[dict[str, Any], Found], way: str) -> None:
    ours, ranks = back[0][way], back[1][way]
    for found in ranks:
        assert found["steps"] == STEPS + LATER
        check_same_bits(ours["gone"], found["state"], STEPS + LATER)
    check_close(ours["after"], ranks, way)


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_goes_on_from_deepspeeds_checkpoint(theirs: tuple[Path, Found], way: str) -> None:
    folder, found = theirs
    options = config(**{**WAYS[way], "stage": 2}, checkpoint={"load_universal": True}, gradient_accumulation_steps=RANKS)
    options["optimizer"]["params"].pop("torch_adam")
    model = model_of(way)
    if "3" not in way:  # stage 3 has frozen weights in pieces
        torch.nn.init.zeros_(model.base.weight)
    model.scale.zero_()
    engine, _, _, _ = longshore.initialize(model=model, config=options)
    with warnings.catch_warnings(record=True, action="always") as told:
        path, client = engine.load_checkpoint(folder / f"{way}-universal")
    assert path is not None and client == {}
    assert engine.global_steps == STEPS
    assert ["what else is frozen" in str(warning.message) for warning in told] == [True] * ("3" in way)
    assert torch.equal(model.base.weight, model_of(way).base.weight) and torch.equal(model.scale, model_of(way).scale)
    losses: list[list[float]] = []
    for step in range(STEPS, STEPS + LATER):
        losses.append([])
        for rank in range(RANKS):
            loss = engine(step * RANKS + rank)
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    check_close(losses, found[way], way)
    engine.destroy()
