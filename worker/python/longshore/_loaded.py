"""Weights that the Trainer loads into a model in units before it has the optimizer go back to where they were saved.

What trains has its weights from the servers, and cannot be written. So until training begins what is loaded is left out, and noted.
It is compared once the servers are where the Trainer goes on.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longshore import _unit_tensors
from longshore.errors import UsageError, invalid


class Loaded:
    """What was loaded into a model since this was made, by parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        #: By name: the digest of what was loaded.
        self._digests: dict[str, bytes] = {}
        #: What was left out of the load in hand.
        self._left_out: set[str] = set()
        self._handles = [
            model.register_load_state_dict_pre_hook(self._leave_out),
            model.register_load_state_dict_post_hook(self._is_not_missing),
        ]

    def check(self) -> None:
        """Compares what was loaded with what the servers have. From now on weights cannot be loaded.

        Raises:
            UsageError: naming a parameter that has other weights there.
        """
        for handle in self._handles:
            handle.remove()
        for name, parameter in self._in_units():
            if name in self._digests and _digest(_unit_tensors.copy_of(parameter)) != self._digests[name]:
                raise invalid(
                    name,
                    "another on the servers than what was loaded into the model",
                    "the same",
                    "its weights are the servers', so resume from a folder that was saved by this job; to start from other weights, load "
                    "them before shard() and give the optimizer another job=",
                    UsageError,
                )
        self._digests.clear()

    def _in_units(self) -> Iterator[tuple[str, Any]]:
        """The parameters that train and are in units, by each of their names."""
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, _unit_tensors.UnitParameter) and parameter._longshore_member.is_trained:  # type: ignore[attr-defined]
                yield name, parameter

    def _leave_out(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self._left_out.clear()
        for name, parameter in self._in_units():
            value = state.get(prefix + name)
            # One of another shape is refused by torch, with its name.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                self._digests[name] = _digest(value.to(parameter.dtype))
                self._left_out.add(prefix + name)
                del state[prefix + name]

    def _is_not_missing(self, module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in self._left_out]


def is_in_units(model: Any) -> bool:
    """Whether a model was given to :func:`longshore.shard`."""
    return isinstance(model, nn.Module) and any(isinstance(p, _unit_tensors.UnitParameter) for p in model.parameters())


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(memoryview(flat.numpy())).digest()
