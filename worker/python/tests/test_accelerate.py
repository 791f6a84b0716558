"""longshore.accelerate.attach on an Accelerator: its saves and state dicts have the newest weights, and its trackers the servers' figures.
"""

import pathlib
import pickle
from typing import Any

import accelerate
import accelerated
import pytest
import torch
from accelerate.tracking import GeneralTracker
from models import Mlp, pair
from safetensors.torch import load_file

import longshore
import longshore.accelerate


class Kept(GeneralTracker):
    """Keeps the logged values."""

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
    accelerated.main(str(tmp_path), trackers=[kept])
    assert [step for step, _ in kept.logged] == [4, 8, 12]
    for _, values in kept.logged:
        assert set(values) == {"loss", "validation", "server_grad_norm", "loss_scale", "exposed_ms"}
        assert values["server_grad_norm"] > 0 and values["loss_scale"] == 1
    validation = [values["validation"] for _, values in kept.logged]
    assert validation == sorted(validation, reverse=True)


def test_a_pickled_accelerator_loads_without_the_attachment() -> None:
    accelerate.state.GradientState._reset_state()  # keeps an earlier test's loader, which is not pickled
    accelerator = accelerate.Accelerator(cpu=True)
    longshore.accelerate.attach(accelerator)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    loaded, again = pickle.loads(pickle.dumps((accelerator, model)))
    assert loaded.log.__func__ is accelerate.Accelerator.log
    assert torch.equal(again(torch.ones(2)), model(torch.ones(2)))


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


@pytest.mark.parametrize("is_first", [True, False], ids=["attached before", "attached after"])
def test_an_evaluation_of_a_delayed_job_has_the_newest_weights(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    inputs, labels = accelerated.data()[:8]
    network, teacher = accelerated.model(0.0), accelerated.model(0.0).eval()
    optimizer = longshore.AdamW(network.named_parameters(), lr=1e-2, delay=1, warmup_steps=1)
    flushed: list[int | None] = []
    flush = optimizer.flush
    monkeypatch.setattr(optimizer, "flush", lambda: flushed.append(flush()))
    if is_first:
        attached = longshore.accelerate.attach(accelerator)
    network, teacher, prepared = accelerator.prepare(network, teacher, optimizer)
    if not is_first:
        attached = longshore.accelerate.attach(accelerator)

    def train(passes: int) -> None:
        network.train()
        for _ in range(passes):
            with accelerator.accumulate(network), torch.no_grad():
                teacher(inputs)
                with torch.enable_grad():
                    accelerator.backward(torch.nn.functional.cross_entropy(network(inputs), labels))
                prepared.step()
                prepared.zero_grad()

    def evaluate() -> torch.Tensor:
        network.eval()
        with torch.inference_mode():
            return network(inputs).clone()

    train(passes=8)
    with torch.no_grad():
        lagging = network(inputs)
    assert flushed == [], "neither a call in train() nor one of a model that is not trained is an evaluation"
    newest = evaluate()
    assert flushed == [4] and not torch.equal(newest, lagging)
    state = optimizer.state_dict(full=True)["state"]
    assert all(torch.equal(state[index]["master"], weight) for index, weight in enumerate(network.parameters()))
    flushed.clear()
    assert torch.equal(evaluate(), newest) and flushed == [], "nothing is newer"
    train(passes=1)
    evaluate()
    assert flushed == [], "a step that is begun is left alone"
    train(passes=1)
    evaluate()
    assert flushed == [5]
    attached.remove()
    train(passes=2)
    evaluate()
    assert flushed == [5]
