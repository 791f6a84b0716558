"""Sees to it that gradients are not clipped twice, or clipped after they have left.

``clip_grad_norm_`` and ``clip_grad_value_`` of ``torch.nn.utils`` take what is in ``.grad``. Where gradients have left already they
would find none and clip nothing, without a word. So they ask here first.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from longshore.errors import UsageError, invalid

# By the parameter's id: its optimizer, its name, and why it must not be clipped from outside.
_guarded: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Any], str, str]] = {}

STREAMING = "its gradient leaves as backward makes it"
SCALED = "its gradient carries the loss scale, which the servers take off"
SERVERS = "its optimizer clips on the servers, since it has max_grad_norm"


def guard(optimizer: Any, names: Iterable[tuple[str, Tensor]], why: str) -> None:
    """Lets clipping of these parameters from outside fail, as long as their optimizer lives."""
    _install()
    for name, tensor in names:
        _guarded[id(tensor)] = (weakref.ref(tensor), weakref.ref(optimizer), name, why)


def release(tensors: Iterable[int]) -> None:
    """Ends what :func:`guard` began, by ``id``."""
    for tensor in tensors:
        _guarded.pop(tensor, None)


def _check(parameters: Any) -> None:
    for tensor in [parameters] if isinstance(parameters, Tensor) else parameters:
        found = _guarded.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1]() is not None:
            _, _, name, why = found
            raise invalid(
                f"clipping of {name}",
                "done outside",
                "left to the optimizer",
                f"{why}: give the optimizer max_grad_norm= and do not clip yourself (Trainer: max_grad_norm=0)",
                UsageError,
            )


@functools.cache
def _install() -> None:
    _install_by_value()
    _install_by_norm()


def _install_by_value() -> None:
    """Replaces ``clip_grad_value_`` in torch's modules, where frameworks look it up. Who has imported the function by its name
    before has torch's own, which nothing can reach."""
    inner = clip_grad.clip_grad_value_

    @functools.wraps(inner)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = parameters if isinstance(parameters, Tensor) else list(parameters)
        _check(parameters)
        inner(parameters, *args, **kwargs)

    clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = torch.compiler.disable(clip)


def _install_by_norm() -> None:
    """Wraps what ``clip_grad_norm_`` and ``clip_grads_with_norm_`` call, by whatever name they were imported."""
    inner: Callable[..., Any] | None = getattr(clip_grad, "_clip_grads_with_norm_", None)
    if inner is None:  # a torch that is built otherwise: docs/pytorch.md says not to clip
        return

    @functools.wraps(inner)
    def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        parameters = parameters if isinstance(parameters, Tensor) else list(parameters)
        # With an infinite norm nothing is clipped: that is how frameworks ask for the norm alone.
        if max_norm != math.inf:
            _check(parameters)
        return inner(parameters, max_norm, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = torch.compiler.disable(clip)
