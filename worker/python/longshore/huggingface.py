"""A callback for the Hugging Face Trainer."""

from typing import Any

from transformers import TrainerCallback

from longshore._optimizer import Optimizer


class Callback(TrainerCallback):
    """Sees to it that evaluations and saves have the newest weights, and logs what the servers did.

    Args:
        checkpoint: whether the servers write a checkpoint whenever the Trainer saves. They need a folder for it.
    """

    def __init__(self, *, checkpoint: bool = False) -> None:
        self._checkpoint = checkpoint

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = _ours(kwargs)
        if optimizer is not None and (control.should_evaluate or control.should_save or control.should_training_stop):
            optimizer.flush()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = _ours(kwargs)
        if optimizer is not None and self._checkpoint:
            optimizer.checkpoint(f"step-{state.global_step:08}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        optimizer = _ours(kwargs)
        if logs is None or optimizer is None or optimizer.last_report is None or "loss" not in logs:
            return
        report = optimizer.last_report
        logs["exposed_ms"] = round(report.exposed_s * 1e3, 3)
        logs["server_grad_norm"] = report.grad_norm


def _ours(kwargs: dict[str, Any]) -> Optimizer | None:
    """The optimizer of this package, which Accelerate may have wrapped."""
    optimizer = kwargs.get("optimizer")
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return optimizer if isinstance(optimizer, Optimizer) else None
