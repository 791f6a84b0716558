"""For Accelerate: ``save_state`` has the servers write a checkpoint, which ``load_state`` goes back to, and what the loop logs has what the
servers did."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator

from longshore._optimizer import Optimizer
from longshore._saving import Saving


class Attached:
    """What :func:`attach` does to an ``Accelerator``."""

    def __init__(self, accelerator: Accelerator, checkpoint: bool | None) -> None:
        self._accelerator = accelerator
        self._saving = Saving(checkpoint)
        self._handle = accelerator.register_save_state_pre_hook(self._before_save)
        self._instead("get_state_dict", self._get_state_dict)
        self._instead("log", self._log)
        self._instead("prepare", self._prepare)
        self._watch()

    def remove(self) -> None:
        """Ends that."""
        self._handle.remove()
        for name in ("get_state_dict", "log", "prepare"):
            vars(self._accelerator).pop(name, None)

    def flush(self) -> None:
        """Brings the newest weights into the model. With ``delay=1`` call it before an evaluation, on all ranks: Accelerate does not say
        that one begins. Without a delay the model has them anyway."""
        for optimizer in self._optimizers():
            if not optimizer.is_closed:  # one that is closed has brought them
                optimizer.flush()

    def report(self) -> dict[str, float]:
        """What became of the newest step: the global gradient norm before clipping, the loss scale, and the milliseconds that this process
        waited. Of a second optimizer the names end in ``_1``, and so on."""
        values: dict[str, float] = {}
        for index, optimizer in enumerate(self._optimizers()):
            found, end = optimizer.last_report, f"_{index}" if index else ""
            if found is not None:
                values[f"server_grad_norm{end}"] = found.grad_norm
                values[f"loss_scale{end}"] = found.loss_scale
                values[f"exposed_ms{end}"] = round(found.exposed_s * 1e3, 3)
        return values

    def _instead(self, name: str, act: Callable[..., Any]) -> None:
        inner = getattr(self._accelerator, name)
        setattr(self._accelerator, name, functools.wraps(inner)(functools.partial(act, inner)))

    def _optimizers(self) -> Iterator[Optimizer]:
        for wrapped in self._accelerator._optimizers:
            optimizer = getattr(wrapped, "optimizer", wrapped)
            if isinstance(optimizer, Optimizer):
                yield optimizer

    def _watch(self) -> None:
        for optimizer in self._optimizers():
            optimizer.watch(*self._accelerator._models)

    def _prepare(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = inner(*args, **kwargs)
        self._watch()
        return prepared

    def _before_save(self, models: Any, weights: Any, folder: Any) -> None:
        for optimizer in self._optimizers():
            self._saving.save(optimizer, optimizer.version)

    def _get_state_dict(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.flush()
        return inner(*args, **kwargs)

    def _log(self, inner: Callable[..., Any], values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return inner({**self.report(), **values}, *args, **kwargs)


def attach(accelerator: Accelerator, *, checkpoint: bool | None = None) -> Attached:
    """Lets every ``accelerator.save_state`` fetch the newest weights first, and have the servers write a checkpoint for each
    optimizer of this package that was prepared. ``save_model`` and ``get_state_dict`` fetch them too, and ``accelerator.log`` gives
    trackers what :meth:`Attached.report` has beside what the loop logs.

    Args:
        checkpoint: None warns where the servers have no folder for checkpoints (``--checkpoint-dir``), True raises, False asks for none.

    Returns:
        A handle, whose ``flush`` belongs before an evaluation, and whose ``remove`` ends all this.
    """
    return Attached(accelerator, checkpoint)
