"""The weights that a job begins with, in models that have weights already.

Rank 0's count. The others read them when the job is opened, which may be in the midst of a step: by then a forward has used what the model
had, and autograd refuses a backward whose weights were written since.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore._params import Param, is_image, is_sharded

#: How far a master weight of 16 bits may be from what it was made of, relative to that: bf16 has 8 bits, and rounds either way.
_MASTER_APART = 2.0**-7


@dataclass(frozen=True, slots=True)
class Rounding:
    """What servers do to weights before workers read them.

    Attributes:
        image: the type that they round to.
        is_master: whether they keep the master weights in fewer bits than fp32 as well.
    """

    image: torch.dtype
    is_master: bool

    def changes(self, dtype: torch.dtype) -> bool:
        """Whether weights of this type may come back as others."""
        return self.is_master or dtype != self.image

    def may_give(self, own: Tensor, theirs: Tensor) -> bool:
        """Whether the second come of the first."""
        if self.is_master:
            return torch.allclose(theirs, own.to(self.image).to(own.dtype), rtol=2 * _MASTER_APART, atol=0.0)
        return is_image(own, theirs, self.image)


@torch.no_grad()
def read_in_step(params: list[Param], rounding: Rounding, read: Callable[[], None]) -> list[Param]:
    """Reads a job's first weights where the model's may have been used. Those that servers have only rounded stay as they were, and
    autograd does not learn of it. It takes a copy of all weights in the host's memory meanwhile.

    Args:
        params: the job's. Shards are read and no more: what has used them had a copy.
        read: writes the job's weights into the parameters.

    Returns:
        The parameters that had other weights, and have the job's now.
    """
    whole = [param for param in params if not is_sharded(param.tensor)]
    tensors = [param.tensor for param in whole]
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    with contextlib.ExitStack() as counts:
        for tensor in tensors:
            counts.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
        read()
        others = [param for param, own in zip(whole, before, strict=True) if not _put_back(param.tensor, own, rounding)]
    torch.autograd.graph.increment_version([param.tensor for param in others])
    return others


def _put_back(tensor: Tensor, own: Tensor, rounding: Rounding) -> bool:
    """Gives a tensor its own weights again if those that it has now come of them."""
    if not rounding.may_give(own.reshape(-1), tensor.to("cpu").reshape(-1)):
        return False
    if rounding.changes(tensor.dtype):
        tensor.copy_(own)
    return True


@torch.no_grad()
def read_rounded(params: list[Param], rounding: Rounding, read: Callable[[Param, Tensor], None]) -> None:
    """Gives the model that a job was filled from the weights as servers round them, which all others have.

    Args:
        params: the job's. Shards of one rank that has all of them stay as they are.
        read: writes the servers' weights of a parameter into memory of its shape.
    """
    for param in params:
        if rounding.changes(param.dtype) and not is_sharded(param.tensor):
            theirs = torch.empty(param.shape, dtype=param.dtype, device="cpu")
            read(param, theirs)
            param.tensor.copy_(theirs)
