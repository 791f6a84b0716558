"""Adapter for Lightning: a callback, and a strategy with the same effect.

Lightning saves weights and optimizer states in one file. Before a save the newest weights must be there, and the servers must have a
checkpoint, to which ``fit(ckpt_path=...)`` returns.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from longshore.checkpoint import Saving
from longshore.optim import Optimizer
from longshore.optimizer.parts import unwrapped

__all__ = ["Callback", "Strategy"]


class _Logging(pl.Callback):
    """Logs the servers' gradient norm, the loss scale and the exposed time."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # With bf16-mixed precision Lightning has no ``GradScaler``, but before it clips it asks the optimizer as if it
        # had.
        for _, optimizer in _ours(trainer):
            optimizer.watch(pl_module)
            optimizer.has_no_scaler = getattr(trainer.precision_plugin, "scaler", None) is None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        for _, optimizer in _ours(trainer):
            report = optimizer.last_report
            if report is not None:
                pl_module.log("server_grad_norm", report.grad_norm)
                pl_module.log("exposed_ms", report.exposed_s * 1e3)
                pl_module.log("loss_scale", report.loss_scale)


class Callback(_Logging):
    """Brings the newest weights to saves and evaluations. Logs the servers' gradient norm, the loss scale and the exposed time.

    A save of weights alone has the newest ones with :class:`Strategy`. With this callback and ``delay=1`` it has the next step's weights.

    Args:
        checkpoint: without a checkpoint folder on the servers (``--checkpoint-dir``), None warns and True raises. False never writes
            checkpoints.
    """

    def __init__(self, *, checkpoint: bool | None = None) -> None:
        self._saving = Saving(checkpoint)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        for _, optimizer in _ours(trainer):
            # No warning is needed: Lightning takes a handle first, and on_save_checkpoint below replaces it.
            optimizer.warns_of_handles = False

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        for index, optimizer in _ours(trainer):
            self._saving.save(optimizer, trainer.global_step)
            checkpoint["optimizer_states"][index] = optimizer.state_dict()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for _, optimizer in _ours(trainer):
            if not optimizer.is_closed:
                optimizer.flush()

    on_test_start = on_predict_start = on_fit_end = on_validation_start


class Strategy(SingleDeviceStrategy):
    """Strategy of a single device: ``Trainer(strategy=longshore.lightning.Strategy())`` or ``Trainer(strategy="longshore")``.

    The servers write a checkpoint when Lightning takes the optimizer's state. Evaluations, saves and the end of training get the newest
    weights. Logs are those of :class:`Callback`. For several ranks start one such trainer a rank, with ``RANK``, ``WORLD_SIZE`` and its own
    data. The servers sum the gradients.

    Args:
        device: the model's device. By default torch's accelerator, if there is one and the Trainer's ``accelerator`` is not ``"cpu"``.
        checkpoint: as for :class:`Callback`.
    """

    strategy_name = "longshore"

    def __init__(self, device: Any = None, checkpoint: bool | None = None, **given: Any) -> None:
        super().__init__(_here() if device is None else device, **given)
        self._is_given = device is not None
        self._has_failed = False
        self._saving = Saving(checkpoint)

    def setup_environment(self) -> None:
        if not self._is_given and isinstance(self.accelerator, CPUAccelerator):
            self._root_device = torch.device("cpu")
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        self._has_failed = False
        if not any(isinstance(callback, _Logging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            # The first place, since later callbacks may save by the values that this one logs.
            trainer.callbacks.insert(0, _Logging())  # type: ignore[attr-defined]
        super().setup(trainer)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        inner = unwrapped(optimizer)
        if inner is not None:
            self._saving.save(inner, inner._version)
        return super().optimizer_state(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._flush()
        return super().lightning_module_state_dict()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._flush()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._flush()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._flush()
        return super().predict_step(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        if not self._has_failed:
            self._flush()
        super().teardown()

    def _flush(self) -> None:
        for optimizer in filter(None, map(unwrapped, self.optimizers)):
            if not optimizer.is_closed:  # close() has brought the newest weights
                optimizer.flush()


def _here() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


StrategyRegistry.register("longshore", Strategy, "one device, its optimizer on servers")


def _ours(trainer: pl.Trainer) -> list[tuple[int, Optimizer]]:
    """Returns the optimizers of this package, with their places among the trainer's."""
    return [(index, optimizer) for index, optimizer in enumerate(map(unwrapped, trainer.optimizers)) if optimizer is not None]
