"""The benchmark for GPUs computes floors, goals and shares rightly, and its parts run: on this host's CPU with tiny models."""

import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longshore.transfer import device

PATH = pathlib.Path(__file__).parents[3] / "benchmarks" / "gpu.py"

SOAK = os.environ.get("LONGSHORE_SOAK")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """Returns the benchmark as a module with tiny sizes, on a device in the host's memory."""
    spec = importlib.util.spec_from_file_location("benchmark_gpu", PATH)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.SIZES, module.DEVICE = module.TINY, torch.device("cpu")
    from overhead import OnHost

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("LONGSHORE_")]:
            patch.delenv(name)  # commands refuse those of tests
        patch.setattr(device, "accelerator", OnHost([]))
        yield module
        torch.use_deterministic_algorithms(False)


def figures(gpu: Any) -> dict[str, Any]:
    """Returns figures with floors that are easy to compute: 10 GB/s each way, and 0.1 ns of update a parameter."""
    steps = {"forward": 0.1, "forward and backward": 0.3, "parameters": 10**9, "largest": 10**7, "tokens": 10**4, "tensors": 9}
    seconds = {gpu.BASE: 0.33, gpu.DELAYED: 0.31, "forward and backward alone": 0.3, "torchao CPUOffloadOptimizer": 0.32}
    low = {**steps, "state": "bf16", "master": "bf16", "seconds": {gpu.DELAYED: 0.6}}
    return {
        "links": {"to host": 9.0, "to device": 9.0, "to the arena": 10.0, "from the server": 10.0},
        "update": {"fp32": 0.1, "state-bf16/master-bf16": 0.5},
        "large": {**steps, "seconds": seconds},
        "largest_delayed": low,
        "small": {"failed": "no end within 40 s"},
    }


def test_floors_are_sums_of_the_measured_pieces(gpu: Any) -> None:
    floors = gpu.floors_of(figures(gpu))
    assert floors[f"large: {gpu.BASE}"]["floor"] == pytest.approx(0.2 + 0.1 + 0.004), "backward, the longer of two, the first unit's copies"
    assert floors[f"large: {gpu.DELAYED}"]["floor"] == pytest.approx(0.3), "computing binds"
    assert floors[f"largest_delayed: {gpu.DELAYED}"]["floor"] == pytest.approx(0.5), "the update in the state's own format binds"
    assert len(floors) == 3
    slow = figures(gpu)
    slow["links"]["from the server"] = 4.0
    assert gpu.floors_of(slow)[f"large: {gpu.DELAYED}"]["floor"] == pytest.approx(0.5), "the slower link binds"


def test_goals_are_held_or_not_or_not_measured(gpu: Any) -> None:
    found = figures(gpu)
    found["floors"] = gpu.floors_of(found)
    found["goals"] = goals = gpu.goals_of(found, found["floors"])
    held = {name: kept for name, _, _, kept in goals}
    assert held["0.8 B exact, of its floor"] is False and held["0.8 B exact, of torchao"] is True
    assert held["25 M exact, of forward and backward"] is None
    table = gpu.table_of(found)
    assert f"| large: {gpu.BASE} | 330.0 | 304.0 | 1.086 | 1.10 | 30,303 | 181.8 |" in table
    assert "small FAILED: no end within 40 s" in table


def test_shares_of_a_trace_sum_up_to_its_span(gpu: Any) -> None:
    def event(category: str, name: str, start: float, end: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6}

    events = [
        event("user_annotation", "steps", 10, 20),
        event("user_annotation", "forward", 10, 13),
        event("user_annotation", "backward", 13, 19),
        event("gpu_user_annotation", "forward", 0, 100),
        event("kernel", "before", 5, 11),
        event("kernel", "one", 12, 16),
        event("kernel", "beside it", 14, 15),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 15, 17),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 19.5, 30),
        {"ph": "M", "name": "process_name"},
    ]
    assert gpu.shares_of(events, "steps") == pytest.approx(
        {
            "forward: computing": 2,
            "forward: nothing on the device": 1,
            "backward: computing": 3,
            "backward: copying to the host": 1,
            "backward: nothing on the device": 2,
            "between: nothing on the device": 0.5,
            "between: copying to the device": 0.5,
        }
    )


@pytest.mark.parametrize("part", ["links", "largest_delayed", "stage_3", *(["update", "trace", "largest", "threads"] if SOAK else [])])
def test_a_part_runs(gpu: Any, part: str, tmp_path: pathlib.Path) -> None:
    for earlier in ("links", "update"):
        (tmp_path / f"{earlier}.json").write_text(json.dumps(figures(gpu)[earlier]))
    found = gpu.PARTS[part](tmp_path)
    assert found == json.loads(json.dumps(found))
    if part == "largest_delayed":
        assert found["layers that keep activations"] == 1 and found["plan"]["gpus"]["stages"]
    if part == "stage_3":
        assert min(found["planned"].values()) > 0
        assert found["same bits"] and found["peak bytes"] <= found["weight bytes"] // 4


def test_a_part_that_fails_is_reported(gpu: Any, tmp_path: pathlib.Path) -> None:
    found = gpu._run("nothing", tmp_path, 100, [])
    assert found["failed"] == "exit status 2: nothing.log says more"
    assert "invalid choice" in (tmp_path / "nothing.log").read_text()
    assert gpu._run("links", tmp_path, 0.01, [])["failed"].startswith("no end within 0 s")
