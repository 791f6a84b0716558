"""Whether DistributedDataParallel reduces a model's gradients."""

import gc
from collections.abc import Iterable

import torch
from torch import Tensor


def has_any(tensors: Iterable[Tensor]) -> bool:
    """Whether some of these are parameters of a model that it wraps."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.nn.parallel import DistributedDataParallel

    mine = {id(tensor) for tensor in tensors}
    # `isinstance` would ask each object for its `__class__`, at which some of torch's warn, and take seconds.
    wrapped = [found for found in gc.get_objects() if DistributedDataParallel in type(found).__mro__]
    return any(id(tensor) in mine for model in wrapped for tensor in model.parameters())
