"""Parts of the benchmark for GPUs run on this host's CPU with tiny models."""

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


def test_a_part_that_fails_is_reported(gpu: Any, tmp_path: pathlib.Path) -> None:
    found = gpu._run("nothing", tmp_path, 100, [])
    assert found["failed"] == "exit status 2: nothing.log says more"
    assert "invalid choice" in (tmp_path / "nothing.log").read_text()
    assert gpu._run("links", tmp_path, 0.01, [])["failed"].startswith("no end within 0 s")
