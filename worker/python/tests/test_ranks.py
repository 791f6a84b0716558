"""Four ranks with gloo, for each division of the work between ranks and servers. Some cases have parameters on meshes: HSDP, tensor
parallelism, and both together. A rank runs rank.py."""

import json
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import several
from forked import Forked
from programs import ranks
from rank import STEPS, give, loss, net
from safetensors.torch import load_file
from test_streaming_and_delay import Delayed
from torch import Tensor, nn

import longshore

RANKS = 4
LR, CLIP = 1e-3, 0.5
Found = dict[str, list[Any]]


def run(
    out: Path, runs: list[tuple[str, dict[str, Any]]], world_size: int = RANKS, program: str = "rank.py"
) -> list[list[dict[str, Any]]]:
    """Starts all ranks like torchrun. Returns the results by run and rank."""
    path, given = Path(__file__).with_name(program), (str(out), json.dumps(runs))
    started = [
        Forked(path, *given, environment={**os.environ, **place}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for place in ranks(world_size)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * world_size, errors
    found = [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(world_size)]
    return [[found[rank][index] for rank in range(world_size)] for index in range(len(runs))]


def run_named(out: Path, runs: dict[str, tuple[str, dict[str, Any]]], program: str = "rank.py", world_size: int = RANKS, **given: Any) -> Found:
    """Returns the results by a run's name, which is its job's too by default, and by rank. ``given`` are options of all runs."""
    named = [(way, {"job": re.sub(r"\W", "-", name), **given, **options}) for name, (way, options) in runs.items()]
    return dict(zip(runs, run(out, named, world_size, program), strict=True))


def are_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


class Loop:
    """A plain loop of AdamW with clipping, in NumPy, over the trained parameters."""

    def __init__(self, model: nn.Module | None = None) -> None:
        trained = (parameter for parameter in (model or net()).parameters() if parameter.requires_grad)
        self.rules = [Delayed(parameter.detach().numpy()) for parameter in trained]
        self.steps = 0

    def step(self, gradients: list[Tensor], norm: float) -> None:
        self.steps += 1
        scale = np.float32(min(1.0, CLIP / (norm + 1e-6)))
        for rule, gradient in zip(self.rules, gradients, strict=True):
            rule.step(gradient.numpy() * scale, self.steps, LR, ahead=False)

    def check(self, ranks: list[dict[str, Any]]) -> None:
        """Checks that all ranks have the norms and weights of this loop."""
        for gradients, norm in zip(ranks[0]["gradients"], ranks[0]["norms"], strict=True):
            exact = torch.stack([gradient.double().norm() for gradient in gradients]).norm().item()
            assert norm == pytest.approx(exact, rel=1e-6)
            self.step(gradients, norm)
        assert self.steps == STEPS
        for rank in ranks:
            assert rank["norms"] == ranks[0]["norms"]
            assert self.has(rank["weights"])

    def has(self, weights: list[Tensor]) -> bool:
        return all(np.array_equal(rule.master, ours.numpy()) for rule, ours in zip(self.rules, weights, strict=True))


SCATTER: dict[str, Any] = {"partition": "reduce-scatter"}
#: For each refused case of rank.py, the options, and the error that every rank raises.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "settings": (SCATTER, r"InvalidError: warmup_steps is 7 on rank 2, but must be 300, as on rank 0"),
    "world": (SCATTER, r"InvalidError: rank and world_size is rank . of 2, but must be rank . of 4, as torch.distributed has it"),
    "ddp": (SCATTER, r"InvalidError: partition is 'reduce-scatter' with Distr.*pass partition='all-reduced'"),
    "ddp streaming": ({"streaming": True}, r"UsageError: DistributedDataParallel reduces gradients after they have left"),
    "unreduced": ({"partition": "all-reduced"}, r"GradientError: .*grad is another on rank . than on rank 0"),
    "missing": ({"missing_gradients": "error", **SCATTER}, r"MissingGradientError: sometimes.weight.grad is None and 3 more"),
    "fsdp layer": ({}, r"GradientError: first.weight.grad is another on rank 1 than on rank 0.*call fully_shard on the whole model"),
    "written": (SCATTER, r"UsageError: first\.weight is another in the model than on the servers, which have had job written since"),
    "first weights": ({"streaming": True, **SCATTER}, r"UsageError: .*first\.weight is another in this rank's model than on the servers"),
    "partial": ({}, r"InvalidError: weight is placed as \[Partial\(sum\)\], but must be placed by Shard and Replicate: redistribute"),
    "placed written": ({}, r"UsageError: 0\.weight is another in the model than on the servers"),
}

WAYS = ("sum", "scatter", "fsdp", "ddp")
#: Ways in which parameters lie on meshes.
PLACED = ("hybrid", "tensor", "both")
#: Ways in which ranks can push gradients during backward.
STREAMING = ("sum", "scatter", "fsdp", *PLACED)


def model_of(way: str) -> Any:
    return net("placed" if way in PLACED else "net")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Returns folders for other programs' files, by way and whether all ranks call."""
    return {(way, everyone): tmp_path_factory.mktemp(way) for way in STREAMING for everyone in (False, True)}


@pytest.fixture(scope="module")
def trained(folders: dict[tuple[str, bool], Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Returns each rank's results in each way: in one go, in streaming mode where a model of other weights continues the job, and with a
    delay."""
    delayed = {"delay": 1, "warmup_steps": 2, "streaming": True}
    clipped = {"max_grad_norm": CLIP}
    runs: dict[str, tuple[str, dict[str, Any]]] = {way: (way, {**clipped, "transport": "tcp"}) for way in (*WAYS, *PLACED)}
    for way in STREAMING:
        runs[way][1].update(keep=True, saves={"folder": str(folders[way, False]), "everyone": False})
        parted = {**clipped, "streaming": True, "job": f"parted-{way}"}
        # The first gradients open one job, in the middle of a backward pass.
        runs[f"{way} first"] = (way, {**parted, "steps": 3, "opens": way != "scatter"})
        runs[f"{way} then"] = (way, {**parted, "seed": 1, "keep": True, "saves": {"folder": str(folders[way, True]), "everyone": True}})
        runs[f"{way} delayed"] = (way, {**clipped, **delayed, "streaming": way != "hybrid"})
    for way in ("sum", "scatter", "fsdp"):
        runs[f"{way} delayed"][1]["saves_at"] = 4
    runs["engine"] = ("engine", clipped)
    runs["fsdp resumed"] = ("fsdp", {"resume": "scatter", "keep": True, "steps": 0})
    runs["scatter resumed"] = ("scatter", {"resume": "fsdp", "keep": True, "steps": 0})
    runs["both resumed"] = ("both", {"resume": "hybrid", "seed": 1, "keep": True, "steps": 0})
    runs |= {f"!{case}": (f"!{case}", {"job": case.replace(" ", "-"), **options}) for case, (options, _) in REFUSED.items()}
    with several(2, "6GiB") as servers:
        return run_named(tmp_path_factory.mktemp("ranks"), runs, servers=servers)


@pytest.mark.parametrize("way", [*WAYS, *PLACED])
def test_a_way_equals_a_plain_loop_bit_for_bit(trained: Found, way: str) -> None:
    """The norm covers the whole gradient, with each piece once. Every rank has the frozen weights of rank 0."""
    Loop(model_of(way)).check(trained[way])
    frozen = [parameter for parameter in model_of(way).parameters() if not parameter.requires_grad]
    assert all(are_equal(rank["frozen"], frozen) for rank in trained[way])


@pytest.mark.parametrize("way", STREAMING)
def test_streaming_ranks_that_find_the_job_go_on_to_the_bits_of_safe_mode(trained: Found, way: str) -> None:
    for whole, first, then in zip(trained[way], trained[f"{way} first"], trained[f"{way} then"], strict=True):
        assert then["version"] == 3 and first["norms"] + then["norms"] == whole["norms"]
        assert are_equal(then["own"], whole["own"])


def read_universal(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns all tensors in the places where DeepSpeed's loader looks."""
    found: dict[str, dict[str, Any]] = {}
    for file in (folder / "zero").glob("*/*.pt"):
        content = torch.load(file, weights_only=True)
        found.setdefault(file.parent.name, {})[file.stem] = content if file.stem == "step" else content["param"]
    return found


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("way", STREAMING)
def test_rank_0_writes_other_programs_files_of_what_all_ranks_have(
    trained: Found, folders: dict[tuple[str, bool], Path], way: str, everyone: bool
) -> None:
    folder, found = folders[way, everyone], trained[f"{way} then" if everyone else way][0]
    as_torch = torch.load(folder / "adamw.pt", weights_only=True)["state"]
    universal, model = read_universal(folder / "universal" / "tag"), load_file(folder / "model" / "model.safetensors")
    names = [name for name, parameter in model_of(way).named_parameters() if parameter.requires_grad]
    assert set(universal) == set(model) == set(names)
    for (number, state), name, weight in zip(found["state"]["state"].items(), names, found["weights"], strict=True):
        assert torch.equal(model[name], weight), name
        assert torch.equal(universal[name]["fp32"], state["master"]), name
        assert as_torch[number]["step"] == universal[name]["step"] == STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(as_torch[number][key], state[key]) and torch.equal(universal[name][key], state[key]), (name, key)


@pytest.mark.parametrize(("source", "resumed"), [("scatter", "fsdp resumed"), ("fsdp", "scatter resumed"), ("hybrid", "both resumed")])
def test_a_new_job_goes_on_from_all_state(trained: Found, source: str, resumed: str) -> None:
    for one, other in zip(trained[source], trained[resumed], strict=True):
        assert same_state(one["state"], other["state"])
        assert are_equal(one["weights"], other["weights"])


def test_one_rank_goes_on_from_the_state_of_four(trained: Found) -> None:
    model, found = net(), trained["scatter"][0]
    optimizer = longshore.AdamW(model.named_parameters(), lr=LR, frozen="keep")
    give(model, found["state"])
    optimizer.load_state_dict(found["state"])
    optimizer.open()
    assert same_state(optimizer.state_dict(full=True), found["state"])
    # From here the job continues like a plain loop of four ranks.
    loop = Loop()
    loop.check(trained["scatter"])
    loss(model, STEPS).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    loop.step(gradients, 0.0)
    assert loop.has([parameter.detach() for parameter in model.parameters() if parameter.requires_grad])


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    states = [one["state"], other["state"]]
    assert all(state["step"] == STEPS for given in states for state in given.values())
    return all(torch.equal(states[0][number][key], states[1][number][key]) for number in states[0] for key in states[0][number])


def test_an_engine_of_several_ranks_scatters(trained: Found) -> None:
    for plain, engine in zip(trained["scatter"], trained["engine"], strict=True):
        assert [pushed for pushed, _ in engine["bytes"]] == [pushed for pushed, _ in plain["bytes"]]
        assert are_equal(plain["weights"], engine["weights"])


@pytest.mark.parametrize("way", ["scatter", "fsdp"])
def test_delayed_ways_agree_with_delayed_servers_that_sum(trained: Found, way: str) -> None:
    """Rank 0 saves alone between delayed steps. The other ranks read no weights meanwhile, and rank 0 must not wait for them."""
    partitioned = trained[f"{way} delayed"]
    assert partitioned[0]["losses"] == pytest.approx(trained["sum delayed"][0]["losses"], rel=1e-3)
    assert partitioned[0]["losses"] != trained[way][0]["losses"]
    assert all(are_equal(rank["weights"], partitioned[0]["weights"]) for rank in partitioned)


@pytest.mark.parametrize("way", [*WAYS, *PLACED])
def test_a_rank_moves_its_part_of_the_bytes(trained: Found, way: str) -> None:
    elements, frozen = (sum(p.numel() for p in model_of(way).parameters() if p.requires_grad is trains) for trains in (True, False))
    senders = RANKS if way == "sum" else 1
    for sent in zip(*([pushed for pushed, _ in rank["bytes"]] for rank in trained[way]), strict=True):
        # Each rank's part is padded to whole blocks of 64 Ki elements.
        assert 4 * senders * elements <= sum(sent) <= 4 * (senders * elements + RANKS * 64 * 1024)
        assert max(sent) < 0.3 * sum(sent)
    for rank in trained[way] if way in WAYS else ():
        # A step's weights arrive after the step's report. So at the last report this rank has the weights of 5 to 7
        # steps, and perhaps the frozen weights.
        image = rank["bytes"][0][0]  # as large as the gradient, since both are fp32
        assert (STEPS - 1) * image <= sum(pulled for _, pulled in rank["bytes"]) <= (STEPS + 1) * image + 4 * frozen


@pytest.mark.parametrize("way", PLACED)
def test_ranks_that_hold_the_same_have_the_same_bits(trained: Found, way: str) -> None:
    """The ranks also agree after delayed steps, whose weights differ from those of exact steps."""
    delayed = trained[f"{way} delayed"]
    assert all(are_equal(rank["weights"], delayed[0]["weights"]) for rank in delayed)
    assert not are_equal(delayed[0]["own"], trained[way][0]["own"])
    for one, other in ((0, 2), (1, 3)):
        assert are_equal(trained["hybrid"][one]["own"], trained["hybrid"][other]["own"])
        assert are_equal(trained["tensor"][one]["own"][:2], trained["tensor"][other]["own"][:2])


def test_parts_on_meshes_are_those_that_torch_makes(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    assert run_named(tmp_path, {"fills": ("fills", {"seed": seed})})["fills"] == [""] * RANKS


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_is_told_what_cannot_be_done(trained: Found, case: str) -> None:
    for told in trained[f"!{case}"]:
        assert re.match(REFUSED[case][1], told), told
