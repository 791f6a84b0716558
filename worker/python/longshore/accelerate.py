"""Adapter for Accelerate: ``save_state`` has the servers write a checkpoint, ``load_state`` returns to it, and logs include the servers'
reports.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from torch import nn

from longshore.checkpoint import Saving
from longshore.optim import Optimizer
from longshore.optimizer.parts import unwrapped

__all__ = ["Attached", "attach"]


class _Method:
    """Replaces a method of an ``Accelerator``: calls the method and does more. Unpickled, it is the accelerator's own
    method."""

    def __init__(self, accelerator: Accelerator, name: str, act: Callable[..., Any]) -> None:
        self._accelerator, self._name, self._act = accelerator, name, act
        self._inner = getattr(accelerator, name)
        functools.update_wrapper(self, self._inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._act(self._inner, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._accelerator, self._name)


class _Unattached:
    """Takes the place of :class:`Attached` in an unpickled ``Accelerator`` or model, whose hooks then do nothing."""

    def _before_save(self, *_: Any) -> None: ...

    def _before_forward(self, *_: Any) -> None: ...


class Attached:
    """The changes that :func:`attach` makes to an ``Accelerator``."""

    def __init__(self, accelerator: Accelerator, checkpoint: bool | None) -> None:
        self._accelerator = accelerator
        self._saving = Saving(checkpoint)
        self._handles: list[Any] = [accelerator.register_save_state_pre_hook(self._before_save)]
        #: The ``id`` of each optimizer that has made a step since its newest weights were fetched.
        self._stepped: set[int] = set()
        ways = {
            "get_state_dict": self._get_state_dict,
            "log": self._log,
            "prepare": self._prepare,
            "prepare_model": self._prepare_model,
            "prepare_optimizer": self._prepare_optimizer,
        }
        self._replaced = list(ways)
        for name, act in ways.items():
            setattr(accelerator, name, _Method(accelerator, name, act))
        for model in accelerator._models:
            self._watch_model(model)
        for optimizer in self._optimizers():
            self._watch_optimizer(optimizer)
        self._watch()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unattached, ()

    def remove(self) -> None:
        """Undoes the changes."""
        for handle in self._handles:
            handle.remove()
        for name in self._replaced:
            vars(self._accelerator).pop(name, None)

    def flush(self) -> None:
        """Brings the newest weights into the model, for code that reads them without calling it.

        With ``delay=1`` all ranks must call it after the same step. Without a delay the model has them anyway, and a call of the model in
        ``eval()`` flushes by itself."""
        for optimizer in self._optimizers():
            if not optimizer.is_closed:  # close() has brought the weights
                optimizer.flush()
            self._stepped.discard(id(optimizer))

    def report(self) -> dict[str, float]:
        """Returns the newest step's global gradient norm before clipping, its loss scale, and the milliseconds that this process waited.
        Names of a second optimizer end in ``_1``, and so on."""
        values: dict[str, float] = {}
        for index, optimizer in enumerate(self._optimizers()):
            found, end = optimizer.last_report, f"_{index}" if index else ""
            if found is not None:
                values[f"server_grad_norm{end}"] = found.grad_norm
                values[f"loss_scale{end}"] = found.loss_scale
                values[f"exposed_ms{end}"] = round(found.exposed_s * 1e3, 3)
        return values

    def _optimizers(self) -> Iterator[Optimizer]:
        return filter(None, map(unwrapped, self._accelerator._optimizers))

    def _prepare_model(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = inner(*args, **kwargs)
        self._watch_model(model)
        return model

    def _prepare_optimizer(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wrapped = inner(*args, **kwargs)
        optimizer = unwrapped(wrapped)
        if optimizer is not None:
            self._watch_optimizer(optimizer)
        return wrapped

    def _watch_model(self, model: nn.Module) -> None:
        # Callers may call the model without Accelerate's wrapper, so the inner model gets the hook.
        inner = self._accelerator.unwrap_model(model)
        self._handles.append(inner.register_forward_pre_hook(self._before_forward, prepend=True))

    def _watch_optimizer(self, optimizer: Optimizer) -> None:
        def stepped(optimizer: Any, *_: Any) -> None:
            self._stepped.add(id(optimizer))

        self._handles.append(optimizer.register_step_post_hook(stepped))

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        """Fetches the newest weights for an evaluation: at the first call of a model in ``eval()`` after a complete step. A model that is
        not trained, such as a teacher, causes no fetch."""
        if model.training or not self._stepped or not self._accelerator.sync_gradients:
            return
        here = {id(parameter) for parameter in model.parameters()}
        for optimizer in self._optimizers():
            if id(optimizer) in self._stepped and any(id(tensor) in here for tensor in optimizer._tensors()):
                if not optimizer.is_closed:
                    optimizer.flush()
                self._stepped.discard(id(optimizer))

    def _watch(self) -> None:
        for optimizer in self._optimizers():
            optimizer.watch(*self._accelerator._models)

    def _prepare(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = inner(*args, **kwargs)
        self._watch()
        return prepared

    def _before_save(self, models: Any, weights: Any, folder: Any) -> None:
        for optimizer in self._optimizers():
            self._saving.save(optimizer, optimizer._version)

    def _get_state_dict(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.flush()
        return inner(*args, **kwargs)

    def _log(self, inner: Callable[..., Any], values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return inner({**self.report(), **values}, *args, **kwargs)


def attach(accelerator: Accelerator, *, checkpoint: bool | None = None) -> Attached:
    """Attaches prepared optimizers of this package to an ``Accelerator``.

    ``save_state`` fetches the newest weights first, and has the servers write a checkpoint for each optimizer. ``save_model``,
    ``get_state_dict`` and the first call of a prepared model in ``eval()`` after a step fetch them too. In a delayed job all ranks must
    make that call after the same step. ``accelerator.log`` gives trackers :meth:`Attached.report` beside the loop's values.

    Args:
        checkpoint: without a checkpoint folder on the servers (``--checkpoint-dir``), None warns and True raises. False never writes
            checkpoints.

    Returns:
        A handle, whose ``remove`` undoes the changes.
    """
    return Attached(accelerator, checkpoint)
