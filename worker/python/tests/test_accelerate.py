"""What longshore.accelerate.attach adds to an Accelerator: its saves and its state dicts have the newest weights, its trackers the servers' figures."""

import pathlib
from typing import Any

import pytest
import torch
from models import Mlp, pair
from programs import load
from safetensors.torch import load_file

import longshore

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed: pip install -r worker/python/tests/requirements.txt"
)
import longshore.accelerate  # noqa: E402
from accelerate.tracking import GeneralTracker  # noqa: E402


class Kept(GeneralTracker):
    """Keeps what is logged."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> None:
        return None

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass


def test_trackers_get_the_servers_figures(tmp_path: pathlib.Path) -> None:
    kept = Kept()
    load("accelerated")["main"](str(tmp_path), trackers=[kept])
    assert [step for step, _ in kept.logged] == [4, 8, 12]
    for _, values in kept.logged:
        assert set(values) == {"loss", "validation", "server_grad_norm", "loss_scale", "exposed_ms"}
        assert values["server_grad_norm"] > 0 and values["loss_scale"] == 1
    validation = [values["validation"] for _, values in kept.logged]
    assert validation == sorted(validation, reverse=True)


def test_a_delayed_jobs_newest_weights_are_saved(tmp_path: pathlib.Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model, _ = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, delay=1, warmup_steps=1)
    model, optimizer = accelerator.prepare(model, optimizer)
    attached = longshore.accelerate.attach(accelerator)
    for number in range(4):
        optimizer.zero_grad()
        accelerator.backward(model.loss(number))
        optimizer.step()
    lagging = model.layers[0].weight.detach().clone()
    accelerator.save_model(model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")["layers.0.weight"]
    state = optimizer.optimizer.state_dict(full=True)["state"]
    assert torch.equal(saved, state[0]["master"]) and not torch.equal(saved, lagging)
    optimizer.optimizer.close()
    accelerator.save_model(model, str(tmp_path / "closed"))
    assert torch.equal(load_file(tmp_path / "closed" / "model.safetensors")["layers.0.weight"], saved)
    attached.remove()
    assert "get_state_dict" not in vars(accelerator)
    assert isinstance(model, Mlp)
