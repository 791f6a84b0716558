"""Frozen parameters that servers keep: where they lie in the job, what a new job gets of them, and how they come back."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longshore._host import Place
from longshore._job import JobParam
from longshore._params import Param, is_sharded
from longshore._weights import values
from longshore.errors import UsageError, invalid


class Kept:
    """Frozen parameters that each rank has whole. They come after all others in the job.

    Args:
        first: how many others there are.
        fills: whether this rank fills a new job.
    """

    def __init__(self, params: list[Param], first: int, fills: bool) -> None:
        self._fills = fills
        for param in params:
            if is_sharded(param.tensor):
                remedy = "call fully_shard on the whole model, so that it takes what trains as well, or leave frozen ones to the framework"
                raise invalid(param.name, "sharded (DTensor)", "whole with frozen='keep', as what trains", remedy)
        self._params = [dataclasses.replace(param, index=first + place) for place, param in enumerate(params)]

    def described(self) -> Sequence[JobParam]:
        """What the job's layout has of them."""
        return self._params

    def values(self) -> tuple[list[Place], list[Tensor]]:
        """All of them as they are now, where this rank fills the job, and what holds their memory."""
        return values(self._params) if self._fills else ([], [])

    def whole(self) -> list[Param]:
        """Those that each rank has whole."""
        return self._params

    def own(self) -> list[Param]:
        """Those of which each rank has a part of its own."""
        return []

    def read(self, job: Any, version: int, params: list[Param]) -> None:
        """Gives some of them the job's weights, one at a time: this process may not have made them.

        Raises:
            UsageError: as in :func:`give`.
        """
        for param in params:
            memory = torch.empty(param.shape, dtype=param.dtype, device="cpu")
            job.pull(version, [(param.index, memory.data_ptr(), param.elements, param.wire)])
            give(param, memory)


@torch.no_grad()
def give(param: Param, weights: Tensor) -> None:
    """Gives a frozen parameter the job's weights of it.

    Raises:
        UsageError: where a backward runs that needs the weights it had.
    """
    if torch.equal(weights, param.tensor.to(weights.device)):
        return
    if torch._C._current_graph_task_id() != -1:
        # Streaming opens a job with its first gradient, and that backward needs the weights that its forward used.
        raise UsageError(
            f"{param.name} is frozen, and the job's weights of it are not the model's, as with an image_dtype of fewer "
            "bits: call optimizer.open() before the first forward"
        )
    param.tensor.copy_(weights)
