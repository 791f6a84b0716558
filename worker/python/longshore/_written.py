"""Trained weights that somebody writes between the opening of a job and ``shard``: they would go without a word.

An optimizer of torch goes on from what it finds in its parameters, and so does one of FSDP. Here the servers have the weights from the
opening of the job on, and ``shard`` lets go of the model's. So what was loaded too late is refused, as it is once the model is in units.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from longshore import _agree, _unit_tensors
from longshore._connection import Connection
from longshore._fetching import Fetcher
from longshore._params import is_image
from longshore._units import Member
from longshore.errors import UsageError, invalid

#: Elements that are compared of a parameter of which torch has counted no change. Who loads weights changes nearly all of them.
_FIRST = 256
#: Bytes that are compared at a time, of more than one parameter.
_BATCH = 16 * 1024 * 1024


def refuse(connection: Connection, fetcher: Fetcher, members: Iterable[Member]) -> None:
    """Refuses trained weights that are not what servers have of them. Where ranks gather, all of them call it and all raise, also one
    that has no members to compare, since it has opened the job just now.

    What torch has counted a change of is compared whole. Writes past its count, as to ``.data``, show in the first elements. What
    :class:`longshore.Init` has built is left out: it holds what the job was filled with, or what it found no use for.

    Raises:
        UsageError: naming the parameter.
    """
    wanted = [
        (member, member.tensor.numel() if connection.may_be_written(member.param) else min(_FIRST, member.tensor.numel()))
        for member in members
        if member.param is not None and not _unit_tensors.is_built(member.tensor)
    ]

    def check() -> None:
        for name in _others(fetcher, wanted, connection.image_dtype):
            raise invalid(
                name,
                f"another in the model than on the servers, which have had job {connection.name} since before it was written",
                "the servers' when shard() is called",
                "load weights before the job is opened: before the optimizer is built where the servers have the job, with another job= to "
                "start from these, and otherwise before optimizer.open() and the first step",
                UsageError,
            )

    if fetcher.rounds is None:
        check()
    else:
        _agree.together(check)


@torch.no_grad()
def _others(fetcher: Fetcher, wanted: list[tuple[Member, int]], image: torch.dtype) -> Iterator[str]:
    """The names of those whose first so many elements servers have not, as they round them."""
    for batch in _batches(wanted):
        theirs = [torch.empty(elements, dtype=member.tensor.dtype, device="cpu") for member, elements in batch]
        fetcher.read_first([(member, memory) for (member, _), memory in zip(batch, theirs, strict=True)])
        for (member, elements), weights in zip(batch, theirs, strict=True):
            mine: Tensor = member.tensor.detach().reshape(-1)[:elements].to("cpu")
            if not is_image(mine, weights, image):
                yield member.name


def _batches(wanted: list[tuple[Member, int]]) -> Iterator[list[tuple[Member, int]]]:
    batch: list[tuple[Member, int]] = []
    room = _BATCH
    for member, elements in wanted:
        nbytes = elements * member.tensor.element_size()
        if batch and nbytes > room:
            yield batch
            batch, room = [], _BATCH
        batch.append((member, elements))
        room -= nbytes
    if batch:
        yield batch
