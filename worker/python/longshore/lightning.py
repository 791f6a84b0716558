"""For Lightning: a callback, and a strategy that does the same.

Lightning saves weights and optimizer states in one file. Before it does, the newest weights must be there, and the servers must
have a checkpoint, which ``fit(ckpt_path=...)`` goes back to.
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from longshore._optimizer import Optimizer
from longshore._saving import Saving


class Callback(pl.Callback):
    """Sees to saves and evaluations, and logs the servers' gradient norm, the loss scale and the exposed time.

    Args:
        checkpoint: None warns where the servers have no folder for checkpoints (``--checkpoint-dir``), True raises, False asks for none.
    """

    def __init__(self, *, checkpoint: bool | None = None) -> None:
        self._saving = Saving(checkpoint)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        for index, optimizer in _ours(trainer):
            self._saving.save(optimizer, trainer.global_step)
            checkpoint["optimizer_states"][index] = optimizer.state_dict()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for _, optimizer in _ours(trainer):
            optimizer.flush()

    on_test_start = on_predict_start = on_fit_end = on_validation_start

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for _, optimizer in _ours(trainer):
            report = optimizer.last_report
            if report is not None:
                pl_module.log("server_grad_norm", report.grad_norm)
                pl_module.log("exposed_ms", report.exposed_s * 1e3)
                pl_module.log("loss_scale", report.loss_scale)


class Strategy(SingleDeviceStrategy):
    """One device, as ``Trainer(strategy=longshore.lightning.Strategy())`` or ``Trainer(strategy="longshore")``: it has the servers
    write a checkpoint where Lightning takes the optimizer's state. For several ranks start one such trainer a rank, with
    ``RANK``, ``WORLD_SIZE`` and data of its own: the servers add the gradients up.
    """

    strategy_name = "longshore"

    def __init__(self, device: Any = "cpu", checkpoint: bool | None = None, **given: Any) -> None:
        super().__init__(device, **given)
        self._saving = Saving(checkpoint)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        inner = getattr(optimizer, "_optimizer", optimizer)
        if isinstance(inner, Optimizer):
            self._saving.save(inner, inner.version)
        return super().optimizer_state(optimizer)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        for optimizer in self.optimizers:
            if isinstance(inner := getattr(optimizer, "_optimizer", optimizer), Optimizer):
                inner.flush()
        return super().validation_step(*args, **kwargs)


StrategyRegistry.register("longshore", Strategy, "one device, its optimizer on servers")


def _ours(trainer: pl.Trainer) -> list[tuple[int, Optimizer]]:
    """The optimizers of this package, with their places among the trainer's."""
    unwrapped = [getattr(optimizer, "_optimizer", optimizer) for optimizer in trainer.optimizers]
    return [(index, optimizer) for index, optimizer in enumerate(unwrapped) if isinstance(optimizer, Optimizer)]
