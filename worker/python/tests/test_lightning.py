"""Lightning: its strategy, mixed precision, and several ranks whose gradients the servers sum."""

import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import lit
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from programs import run_ranks

import longshore
import longshore.lightning

STEPS = 12
CLOSE = 1e-6
RANK = """
import json, torch
torch.set_num_threads(1)
import lit
from test_lightning import own_data
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
given = own_data(rank)
lit.data = lambda: lit.Loader(torch.utils.data.TensorDataset(*given), batch_size=8)
losses = lit.main(f"{folder}/{{rank}}", {servers!r}, "ranks", strategy="longshore")
print("losses", json.dumps([losses[index] for index in sorted(losses)]))
torch.distributed.destroy_process_group()
"""


def own_data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(10 + rank))
    return inputs, inputs[:, :4].argmax(1)


def test_two_ranks_of_lightning_train_on_the_mean_of_their_gradients(tmp_path: pathlib.Path, servers: str) -> None:
    """The servers sum the gradients. Each rank clips its own before they leave, as Lightning does."""
    said = run_ranks(2, RANK.format(folder=tmp_path, servers=servers), ["lit"], TORCHELASTIC_RUN_ID="none")
    found = [json.loads(text.rsplit("losses ", 1)[1]) for text in said]
    model = lit.Sorting(None, None).layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    expected: list[list[float]] = [[], []]
    for step in range(STEPS):
        means = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in (0, 1):
            inputs, labels = own_data(rank)
            optimizer.zero_grad()
            for index in (2 * step, 2 * step + 1):
                batch = slice(8 * index, 8 * index + 8)
                loss = torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
                expected[rank].append(loss.item())
                (loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean += parameter.grad / 2
        for mean, parameter in zip(means, model.parameters(), strict=True):
            parameter.grad = mean
        optimizer.step()
        schedule.step()
    for rank in (0, 1):
        assert found[rank] == pytest.approx(expected[rank], rel=1e-5)


def short(folder: pathlib.Path, **given: Any) -> pl.Trainer:
    """Returns a trainer of four steps that shows and keeps nothing by default."""
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(shown, False)
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "max_steps": 4, "default_root_dir": str(folder), **quiet, **given})


class Delayed(lit.Sorting):  # type: ignore[misc]
    """A delayed job: the newest weights come into the model only on request. Keeps the weights at the end of training, which lack the last
    step."""

    def configure_optimizers(self) -> Any:
        self.optimizer = longshore.AdamW(self.named_parameters(), lr=1e-2, delay=1, warmup_steps=1)
        return self.optimizer

    def on_train_end(self) -> None:
        self.lagging = self.layers[0].weight.detach().clone()


@pytest.mark.parametrize("saves", [False, True])
def test_the_strategy_leaves_and_saves_the_newest_weights_and_logs_what_the_callback_logs(tmp_path: pathlib.Path, saves: bool) -> None:
    callbacks = [pl.callbacks.ModelCheckpoint(str(tmp_path), every_n_train_steps=4, save_weights_only=True, filename="only")] * saves
    module, trainer = Delayed(None, None), short(tmp_path, strategy="longshore", callbacks=callbacks, enable_checkpointing=saves)
    trainer.fit(module, lit.data())
    left = module.layers[0].weight.detach().clone()
    newest = module.optimizer.state_dict(full=True)["state"][0]["master"]
    assert torch.equal(left, newest) and {"server_grad_norm", "exposed_ms", "loss_scale"} <= set(trainer.callback_metrics)
    if saves:
        saved = torch.load(tmp_path / "only.ckpt", weights_only=False)
        assert "optimizer_states" not in saved and torch.equal(saved["state_dict"]["layers.0.weight"], newest)
    else:
        assert not torch.equal(left, module.lagging)


@pytest.mark.parametrize("way", ["alone", "callback", "strategy"])
def test_a_save_without_an_adapter_says_what_it_lacks(tmp_path: pathlib.Path, way: str) -> None:
    saves = pl.callbacks.ModelCheckpoint(str(tmp_path), every_n_train_steps=4)
    given = {"callbacks": [saves, *([longshore.lightning.Callback()] if way == "callback" else [])]}
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = short(tmp_path, enable_checkpointing=True, strategy="longshore" if way == "strategy" else "auto", **given)
        trainer.fit(lit.Sorting(None, None), lit.data())
    said = [str(warning.message) for warning in caught if "is a handle" in str(warning.message)]
    assert len(said) == (way == "alone"), said


@pytest.mark.parametrize("way", ["test", "predict"])
def test_the_strategy_evaluates_the_newest_weights(tmp_path: pathlib.Path, way: str) -> None:
    """Evaluates within training, as some callbacks do."""
    strategy = longshore.lightning.Strategy()
    model = lit.Sorting(None, None)
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, delay=1, warmup_steps=1)
    for step in range(4):
        optimizer.zero_grad()
        inputs, labels = own_data(step)
        torch.nn.functional.cross_entropy(model.layers(inputs), labels).backward()
        optimizer.step()
    lagging = model.layers[0].weight.detach().clone()
    seen = []
    setattr(model, f"{way}_step", lambda: seen.append(model.layers[0].weight.detach().clone()))
    strategy.optimizers = [optimizer]
    strategy._lightning_module = strategy.model = model
    getattr(strategy, f"{way}_step")()
    assert not torch.equal(seen[0], lagging)
    newest = optimizer.state_dict(full=True)["state"][0]["master"]
    assert torch.equal(seen[0], newest)
    optimizer.close()
    assert torch.equal(strategy.lightning_module_state_dict()["layers.0.weight"], newest)


def optimizer_of(kind: Any, module: pl.LightningModule) -> Callable[[], Any]:
    return lambda: kind(list(module.named_parameters()), lr=1e-2)


#: For each precision: the strategy of the run with the package's optimizer, and arguments of the Trainer.
PRECISIONS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "bf16": ("auto", lambda: {"precision": "bf16-mixed", "callbacks": [longshore.lightning.Callback()]}),
    "bf16, strategy": ("longshore", lambda: {"precision": "bf16-mixed"}),
    # The optimizer clips unscaled gradients. A scaler for the CPU is named, since the default one is for CUDA.
    "fp16": ("auto", lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))]}),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_mixed_precision_with_clipping(tmp_path: pathlib.Path, name: str) -> None:
    """Lightning refuses to clip where an optimizer unscales gradients by itself. The losses equal those with torch's optimizer."""
    strategy, precision = PRECISIONS[name]
    found = []
    for kind in (longshore.AdamW, torch.optim.AdamW):
        module = lit.Sorting(None, None)
        module.configure_optimizers = optimizer_of(kind, module)
        trainer = short(tmp_path, strategy=strategy if kind is longshore.AdamW else "auto", gradient_clip_val=0.5, **precision())
        trainer.fit(module, lit.data())
        found.append([module.losses[index] for index in sorted(module.losses)])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0][-1] < found[0][0]
