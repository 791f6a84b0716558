"""For Accelerate: ``save_state`` has the servers write a checkpoint, which ``load_state`` goes back to, and what the loop logs has what the
servers did.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from torch import nn

from longshore.integrations.saving import Saving
from longshore.optim.optimizer import Optimizer


class Attached:
    """What :func:`attach` does to an ``Accelerator``."""

    def __init__(self, accelerator: Accelerator, checkpoint: bool | None) -> None:
        self._accelerator = accelerator
        self._saving = Saving(checkpoint)
        self._handles: list[Any] = [accelerator.register_save_state_pre_hook(self._before_save)]
        #: The optimizers that have made steps since their newest weights were fetched.
        self._stepped: set[int] = set()
        ways = {
            "get_state_dict": self._get_state_dict,
            "log": self._log,
            "prepare": self._prepare,
            "prepare_model": self._prepare_model,
            "prepare_optimizer": self._prepare_optimizer,
        }
        self._replaced = [self._instead(name, act) for name, act in ways.items()]
        for model in accelerator._models:
            self._watch_model(model)
        for optimizer in self._optimizers():
            self._watch_optimizer(optimizer)
        self._watch()

    def remove(self) -> None:
        """Ends that."""
        for handle in self._handles:
            handle.remove()
        for name in self._replaced:
            vars(self._accelerator).pop(name, None)

    def flush(self) -> None:
        """Brings the newest weights into the model, for what reads them without calling it. With ``delay=1`` all ranks must call it after
        the same step. Without a delay the model has them anyway, and a call of the model in ``eval()`` does it by itself."""
        for optimizer in self._optimizers():
            if not optimizer.is_closed:  # one that is closed has brought them
                optimizer.flush()
            self._stepped.discard(id(optimizer))

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

    def _instead(self, name: str, act: Callable[..., Any]) -> str:
        inner = getattr(self._accelerator, name)
        setattr(self._accelerator, name, functools.wraps(inner)(functools.partial(act, inner)))
        return name

    def _optimizers(self) -> Iterator[Optimizer]:
        return filter(None, map(_ours, self._accelerator._optimizers))

    def _prepare_model(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = inner(*args, **kwargs)
        self._watch_model(model)
        return model

    def _prepare_optimizer(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wrapped = inner(*args, **kwargs)
        optimizer = _ours(wrapped)
        if optimizer is not None:
            self._watch_optimizer(optimizer)
        return wrapped

    def _watch_model(self, model: nn.Module) -> None:
        # What Accelerate wraps is called with or without its wrapper.
        unwrapped = self._accelerator.unwrap_model(model)
        self._handles.append(unwrapped.register_forward_pre_hook(self._before_forward, prepend=True))

    def _watch_optimizer(self, optimizer: Optimizer) -> None:
        def stepped(optimizer: Any, *_: Any) -> None:
            self._stepped.add(id(optimizer))

        self._handles.append(optimizer.register_step_post_hook(stepped))

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        """Fetches the newest weights for an evaluation: the first call of a model in ``eval()`` after a step that is whole. A model that
        is not trained, as a teacher, is none of that."""
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
            self._saving.save(optimizer, optimizer.version)

    def _get_state_dict(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.flush()
        return inner(*args, **kwargs)

    def _log(self, inner: Callable[..., Any], values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return inner({**self.report(), **values}, *args, **kwargs)


def _ours(optimizer: Any) -> Optimizer | None:
    """The optimizer of this package that Accelerate may have wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, Optimizer) else None


def attach(accelerator: Accelerator, *, checkpoint: bool | None = None) -> Attached:
    """Lets every ``accelerator.save_state`` fetch the newest weights first, and have the servers write a checkpoint for each
    optimizer of this package that was prepared. ``save_model`` and ``get_state_dict`` fetch them too, and so does the first call of a
    prepared model in ``eval()`` after a step, which all ranks must make after the same step where a job is delayed. ``accelerator.log``
    gives trackers what :meth:`Attached.report` has beside what the loop logs.

    Args:
        checkpoint: None warns where the servers have no folder for checkpoints (``--checkpoint-dir``), True raises, False asks for none.

    Returns:
        A handle, whose ``remove`` ends all this.
    """
    return Attached(accelerator, checkpoint)
