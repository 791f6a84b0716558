"""DistributedDataParallel and its kin: whether one reduces a model's gradients, and models that it cannot wrap."""

import functools
import gc
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from longshore.errors import UsageError
from longshore.transfer.tensors import UnitParameter

#: By name, since importing the last one takes a second.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


def has_any(tensors: Iterable[Tensor]) -> bool:
    """Returns whether a DistributedDataParallel model has some of these tensors as parameters."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.nn.parallel import DistributedDataParallel

    mine = {id(tensor) for tensor in tensors}
    # `isinstance` would read each object's `__class__`. Some of torch's objects warn at that, and it takes seconds.
    wrapped = [found for found in gc.get_objects() if DistributedDataParallel in type(found).__mro__]
    return any(id(tensor) in mine for model in wrapped for tensor in model.parameters())


@functools.cache
def refuse_models_in_units() -> None:
    """Refuses to wrap a model in units from now on: in C++, unseen by Python, torch would read released weights and crash."""
    register_module_module_registration_hook(_refuse)


def _refuse(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
    if name != "module" or model is None or _WRAPPERS.isdisjoint(kind.__name__ for kind in type(wrapper).__mro__):
        return
    if any(isinstance(parameter, UnitParameter) for parameter in model.parameters()):
        raise UsageError(
            f"{type(wrapper).__name__} cannot wrap a model in units, as longshore.shard makes them: leave the model unwrapped, since the "
            "servers sum the gradients of ranks; give Hugging Face's Trainer a longshore.huggingface.Callback, which sees to it"
        )
