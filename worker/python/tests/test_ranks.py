"""Four ranks with gloo, in each way in which ranks and servers share the work. A rank runs rank.py."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Forked
from programs import ranks
from rank import STEPS, give, loss, net
from test_streaming_and_delay import Delayed
from torch import Tensor, nn

import longshore

RANKS = 4
LR, CLIP = 1e-3, 0.5


def start(
    out: Path, runs: list[tuple[str, dict[str, Any]]], world_size: int = RANKS, program: str = "rank.py"
) -> list[subprocess.Popen[str]]:
    """Starts all ranks like torchrun."""
    path, given = Path(__file__).with_name(program), (str(out), json.dumps(runs))
    return [
        Forked(path, *given, environment={**os.environ, **place}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for place in ranks(world_size)
    ]


def finish(started: list[subprocess.Popen[str]]) -> list[str]:
    """Waits for all ranks. Returns each rank's standard error."""
    try:
        return [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()


def run(
    out: Path, runs: list[tuple[str, dict[str, Any]]], world_size: int = RANKS, program: str = "rank.py"
) -> list[list[dict[str, Any]]]:
    """Returns the results by run and rank."""
    started = start(out, runs, world_size, program)
    errors = finish(started)
    assert [process.returncode for process in started] == [0] * world_size, errors
    found = [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(world_size)]
    return [[found[rank][index] for rank in range(world_size)] for index in range(len(runs))]


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

    def has(self, weights: list[Tensor]) -> bool:
        return all(np.array_equal(rule.master, ours.numpy()) for rule, ours in zip(self.rules, weights, strict=True))


SCATTER: dict[str, Any] = {"partition": "reduce-scatter"}
#: By case of rank.py: options, and the error on every rank.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "settings": (SCATTER, r"InvalidError: warmup_steps is 7 on rank 2, but must be 300, as on rank 0"),
    "world": (SCATTER, r"InvalidError: rank and world_size is rank . of 2, but must be rank . of 4, as torch.distributed has it"),
    "ddp": (SCATTER, r"InvalidError: partition is 'reduce-scatter' with Distr.*pass partition='all-reduced'"),
    "ddp streaming": ({"streaming": True}, r"UsageError: DistributedDataParallel reduces gradients after they have left"),
    "unreduced": ({"partition": "all-reduced"}, r"GradientError: .*grad is another on rank . than on rank 0"),
    "missing": ({"missing_gradients": "error", **SCATTER}, r"MissingGradientError: sometimes.weight.grad is None and 3 more"),
    "missing streaming": ({"missing_gradients": "error", "streaming": True, **SCATTER}, r"MissingGradientError: sometimes.weight"),
    "fsdp layer": ({}, r"GradientError: first.weight.grad is another on rank 1 than on rank 0.*call fully_shard on the whole model"),
    "written": (SCATTER, r"UsageError: first\.weight is another in the model than on the servers, which have had job written since"),
    "fsdp written": ({}, r"UsageError: first\.weight is another in the model than on the servers"),
    "first weights": ({"streaming": True, **SCATTER}, r"UsageError: .*first\.weight is another in this rank's model than on the servers"),
    "short": (SCATTER, r"InvalidError: partition is nothing for rank 2"),
}

WAYS = ("sum", "scatter", "fsdp", "ddp")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Returns each rank's results in each way, some also in streaming mode and with a delay."""
    from conftest import several

    delayed = {"delay": 1, "warmup_steps": 2, "streaming": True}
    runs: dict[str, tuple[str, dict[str, Any]]] = {way: (way, {"transport": "tcp"}) for way in WAYS}
    runs |= {f"{way} streaming": (way, {"streaming": True}) for way in ("scatter", "fsdp")}
    runs["scatter streaming"][1]["opens"] = False  # its first gradients open the job, in the middle of a backward
    runs["engine"] = ("engine", {})
    runs |= {f"{way} delayed": (way, delayed) for way in ("sum", "scatter", "fsdp")}
    runs |= {f"{way} saved": (way, {**delayed, "correction": "none", "saves_at": 4}) for way in ("sum", "scatter", "fsdp")}
    for way in ("scatter", "fsdp"):
        runs[way][1]["keep"] = True
    runs["fsdp resumed"] = ("fsdp", {"resume": "scatter", "keep": True, "steps": 0})
    runs["scatter resumed"] = ("scatter", {"resume": "fsdp", "keep": True, "steps": 0})
    with several(2, "2GiB") as servers:
        given = [
            (way, {**options, "servers": servers, "job": name.replace(" ", "-"), "max_grad_norm": CLIP})
            for name, (way, options) in runs.items()
        ]
        runs |= {f"!{case}": (f"!{case}", options) for case, (options, _) in REFUSED.items()}
        given += [(f"!{case}", {"servers": servers, "job": case.replace(" ", "-"), **options}) for case, (options, _) in REFUSED.items()]
        found = run(tmp_path_factory.mktemp("ranks"), given)
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_way_equals_a_plain_loop_bit_for_bit(trained: dict[str, list[dict[str, Any]]], way: str) -> None:
    ranks = trained[way]
    loop = Loop()
    for step in range(STEPS):
        gradients = ranks[0]["gradients"][step]
        norm = ranks[0]["norms"][step]
        exact = torch.stack([gradient.double().norm() for gradient in gradients]).norm().item()
        assert norm == pytest.approx(exact, rel=1e-6)
        loop.step(gradients, norm)
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
        assert loop.has(rank["weights"])


@pytest.mark.parametrize(("source", "resumed"), [("scatter", "fsdp resumed"), ("fsdp", "scatter resumed")])
def test_a_new_job_goes_on_from_all_state(trained: dict[str, list[dict[str, Any]]], source: str, resumed: str) -> None:
    for one, other in zip(trained[source], trained[resumed], strict=True):
        assert same_state(one["state"], other["state"])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(one["weights"], other["weights"], strict=True))


def test_one_rank_goes_on_from_the_state_of_four(trained: dict[str, list[dict[str, Any]]]) -> None:
    model = net()
    optimizer = longshore.AdamW(model.named_parameters(), lr=LR)
    give(model, trained["scatter"][0]["state"])
    optimizer.load_state_dict(trained["scatter"][0]["state"])
    optimizer.open()
    assert same_state(optimizer.state_dict(full=True), trained["scatter"][0]["state"])
    # The job continues like a plain loop of four ranks.
    loop = Loop()
    for gradients, norm in zip(trained["scatter"][0]["gradients"], trained["scatter"][0]["norms"], strict=True):
        loop.step(gradients, norm)
    optimizer.zero_grad()
    loss(model, STEPS, 0).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    loop.step(gradients, 0.0)
    assert loop.has([parameter.detach() for parameter in model.parameters()])


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    states = [one["state"], other["state"]]
    assert all(state["step"] == STEPS for given in states for state in given.values())
    return all(torch.equal(states[0][number][key], states[1][number][key]) for number in states[0] for key in states[0][number])


def test_losses_of_all_ways_agree(trained: dict[str, list[dict[str, Any]]]) -> None:
    for way in WAYS:
        assert trained[way][0]["losses"] == pytest.approx(trained["sum"][0]["losses"], rel=1e-3)
    assert trained["sum"][0]["losses"][-1] < trained["sum"][0]["losses"][0]


@pytest.mark.parametrize("way", ["scatter", "fsdp"])
def test_streaming_equals_safe_on_every_rank(trained: dict[str, list[dict[str, Any]]], way: str) -> None:
    for safe, streamed in zip(trained[way], trained[f"{way} streaming"], strict=True):
        assert safe["norms"] == streamed["norms"]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(safe["weights"], streamed["weights"], strict=True))


def test_an_engine_of_several_ranks_scatters(trained: dict[str, list[dict[str, Any]]]) -> None:
    for plain, engine in zip(trained["scatter streaming"], trained["engine"], strict=True):
        assert [pushed for pushed, _ in engine["bytes"]] == [pushed for pushed, _ in plain["bytes"]]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain["weights"], engine["weights"], strict=True))


@pytest.mark.parametrize("way", ["scatter", "fsdp"])
def test_delayed_ways_agree_with_delayed_servers_that_sum(trained: dict[str, list[dict[str, Any]]], way: str) -> None:
    summed, partitioned = trained["sum delayed"], trained[f"{way} delayed"]
    assert partitioned[0]["losses"] == pytest.approx(summed[0]["losses"], rel=1e-3)
    assert partitioned[0]["losses"] != trained[way][0]["losses"]
    for rank in partitioned:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(rank["weights"], partitioned[0]["weights"], strict=True))


@pytest.mark.parametrize("way", ["scatter", "fsdp"])
def test_rank_0_saves_alone_between_delayed_steps(trained: dict[str, list[dict[str, Any]]], way: str) -> None:
    """The other ranks read no weights meanwhile, and rank 0 must not wait for them."""
    assert trained[f"{way} saved"][0]["losses"] == pytest.approx(trained["sum saved"][0]["losses"], rel=1e-3)


@pytest.mark.parametrize("way", ["scatter", "fsdp", "ddp"])
def test_a_rank_moves_a_quarter_of_the_bytes(trained: dict[str, list[dict[str, Any]]], way: str) -> None:
    whole = 4 * sum(parameter.numel() for parameter in net().parameters())
    for summed, partitioned in zip(trained["sum"], trained[way], strict=True):
        for before, ours in zip(summed["bytes"], partitioned["bytes"], strict=True):
            assert before[0] == pytest.approx(whole, rel=0.1)
            assert ours[0] == pytest.approx(before[0] / RANKS, rel=0.1)
        # Weights arrive behind a report. By the last one the weights of 5 steps have come, and perhaps those of 7.
        for found in (summed, partitioned):
            image = found["bytes"][0][0]  # as large as the gradient, since both are fp32
            assert (STEPS - 1) * image <= sum(pulled for _, pulled in found["bytes"]) <= (STEPS + 1) * image


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_is_told_what_cannot_be_done(trained: dict[str, list[Any]], case: str) -> None:
    for told in trained[f"!{case}"]:
        assert re.match(REFUSED[case][1], told), told


@pytest.mark.parametrize("way", [{}, SCATTER], ids=["sum", "scatter"])
def test_all_ranks_are_told_that_rank_0_could_not_open_the_job(way: dict[str, Any], tmp_path: Path) -> None:
    """The other ranks would wait for the job for half an hour. Then all ranks open another job of the same name."""
    from conftest import several

    with several(2, "2GiB") as servers:
        [ranks] = run(tmp_path, [("opens", {"servers": servers, "job": "opens", **way})])
    why = r"RefusedError: {}OpenJob of job opens on server .* failed .*state_dir is not set"
    for rank, found in enumerate(ranks):
        assert len(found["told"]) == 2 and found["version"] == 1, found["told"][2:]
        for told in found["told"]:
            assert re.match(why.format("rank 0 failed, so that no rank can go on: " if rank else ""), told), told


def test_killed_ranks_start_again_and_go_on(trained: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    from conftest import ended_after, several

    with several(2, "2GiB") as servers:
        runs = [("fsdp", {"servers": servers, "job": "deadly", "max_grad_norm": CLIP})]
        started = start(tmp_path, runs)
        try:
            losses: dict[int, float] = {}
            assert started[1].stdout is not None
            with ended_after(240, *started):
                while max(losses, default=0) < 3:
                    version, value = started[1].stdout.readline().split()
                    losses[int(version)] = float.fromhex(value)
            started[2].send_signal(signal.SIGKILL)
        finally:
            # A rank without another one cannot continue; a launcher ends it.
            for process in started:
                process.kill()
                process.communicate()
        found = run(tmp_path, runs)[0]
    undisturbed = trained["fsdp"][0]["losses"]
    assert list(losses.values()) == undisturbed[: len(losses)]
    assert 3 <= found[0]["version"] < STEPS
    for rank, whole in zip(found, trained["fsdp"], strict=True):
        assert rank["losses"] == undisturbed[rank["version"] :]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(rank["weights"], whole["weights"], strict=True))
