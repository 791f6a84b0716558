"""The benchmarks: what Python takes of a step, the peers in the comparison, and the parts for GPUs with tiny models on this host."""

import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import peer_ways
import peers
import pytest
import torch
from overhead import overhead

from longshore.transfer import device


# No test limits the time: on a busy host the same code took 6 to 14 times as long as a fixed loop. The benchmark's
# command reports the figure.
@pytest.mark.parametrize("mode", [{}, {"streaming": True}, {"streaming": True, "where": "simulated"}])
def test_what_python_takes_of_a_step_is_measured(mode: dict[str, Any]) -> None:
    assert overhead(8, rounds=2, **mode) > 0


ROUNDS = 2


def test_peers_take_turns_and_train_alike(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    times = peers.peers(300_000, 500_000, 3, 2, 8, ROUNDS, "longshore,torch,deepspeed")
    ways = [*peer_ways.OURS, "torch fused, with casts"]
    layered = [peer_ways.BASE, "longshore, stage 2"]
    steps = [*peer_ways.OURS, "torch AdamW, with casts", "torch fused, with casts"]
    parts = {"step": steps, "training": ways, "stage 3": layered}
    assert list(times) == [f"{part}: {name}" for part, names in parts.items() for name in names]
    assert all(len(taken) == ROUNDS and min(taken) > 0 for taken in times.values())
    printed = capsys.readouterr().out
    assert printed.count("not measured: ") == 6, "what is not installed is said, and nothing else stops"
    assert "load" in printed
    losses = [float(line.split()[-1]) for line in printed.splitlines() if " loss " in line]
    assert len(losses) == len(ways) + len(layered)
    training, in_units = losses[: len(ways)], losses[len(ways) :]
    assert training == pytest.approx([training[0]] * len(ways), rel=1e-2)
    assert in_units[0] == in_units[1], "stages 2 and 3 have the same bits"


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


@pytest.mark.parametrize("part", ["links", "largest_delayed", "stage_3", *(["update", "trace", "largest", "threads"] if SOAK else [])])
def test_a_part_runs(gpu: Any, part: str, tmp_path: pathlib.Path) -> None:
    links = {"to host": 9.0, "to device": 9.0, "to the arena": 10.0, "from the server": 10.0}
    for earlier, figures in {"links": links, "update": {"fp32": 0.1, "state-bf16/master-bf16": 0.5}}.items():
        (tmp_path / f"{earlier}.json").write_text(json.dumps(figures))
    found = gpu.PARTS[part](tmp_path)
    assert found == json.loads(json.dumps(found))
    if part == "largest_delayed":
        assert found["layers that keep activations"] == 1 and found["plan"]["gpus"]["stages"]
    if part == "stage_3":
        assert min(found["planned"].values()) > 0
        assert found["same bits"] and found["peak bytes"] <= found["weight bytes"] // 4
