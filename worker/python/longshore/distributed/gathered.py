"""Gathered weights: each rank reads its part, and ranks gather the rest, bucket by bucket in forward order."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.distributed import agree, collectives
from longshore.distributed.collectives import Collective
from longshore.transfer import device as _device
from longshore.transfer import partitions
from longshore.transfer.gradients import Place
from longshore.transfer.params import DTYPES, Param
from longshore.transfer.partitions import Bucket, Layout

#: Weights of fewer bytes are pulled whole by each rank, since that takes no longer than a collective.
LEAST_SHARED = 64 * 1024


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's pull of a tensor that ranks gather."""

    #: Number of elements in each rank's part, and in all parts together.
    part: int
    gathered: int
    #: First element and number of elements of this rank's pulls: its part, and the indivisible remainder.
    own: list[tuple[int, int]]


def share(elements: int, width: int, rank: int, world_size: int) -> Share | None:
    """Returns a rank's share of a tensor of ``elements`` elements of ``width`` bytes; None if it pulls the whole tensor."""
    if elements * width < LEAST_SHARED:
        return None
    part = elements // world_size
    own = [(rank * part, part), (world_size * part, elements - world_size * part)]
    return Share(part, world_size * part, [(start, length) for start, length in own if length])


def gather_frozen(job: Any, version: int, params: list[Param], rank: int, world_size: int) -> Iterator[tuple[Param, Tensor]]:
    """Yields the job's frozen weights on their parameters' devices, one after the other. Each rank pulls its part."""
    shares = [share(param.elements, param.dtype.itemsize, rank, world_size) for param in params]
    pulled: list[list[tuple[int, Tensor]]] = []

    def pull() -> None:
        for param, of_rank in zip(params, shares, strict=True):
            own = of_rank.own if of_rank is not None else [(0, param.elements)]
            parts = [(start, _device.host_empty([length], param.dtype)) for start, length in own]
            places = [((param.index, part.data_ptr(), len(part), param.wire), start) for start, part in parts]
            job.fetch(version, places).read()
            pulled.append(parts)

    agree.together(pull)
    for param, of_rank in zip(params, shares, strict=True):
        whole = torch.empty(param.elements, dtype=param.dtype, device=param.tensor.device)
        for start, part in pulled.pop(0):
            whole[start : start + len(part)].copy_(part)
        if of_rank is not None:
            gathered = whole[: of_rank.gathered].view(torch.uint8)
            part = of_rank.part * whole.itemsize
            own = gathered[rank * part : (rank + 1) * part]
            gathering = collectives.all_gather(gathered, own, agree.group_of(whole.device))
            gathering.wait(f"{param.name}, which is frozen and which ranks gather")
        yield param, whole.view(param.shape)
        # Only one tensor at a time lies on the device.
        del whole


class Gathered:
    """A job's parameters, which all ranks have whole."""

    def __init__(self, layout: Layout, rank: int, world_size: int) -> None:
        self._layout = layout
        self._pieces = layout.of_params()
        self._rank = rank
        self._world_size = world_size
        #: This rank's part of each bucket in the host's memory, and the events of device copies that read it.
        self._rows: list[Tensor] = []
        self._reading: list[Any] = []

    def read(self, job: Any) -> None:
        """Waits for this rank's part of the requested weights, and gives the parameters the whole. While ranks gather a bucket, the next
        bucket's part arrives."""
        with collectives.telling():
            self._read(job)

    def _read(self, job: Any) -> None:
        before: tuple[Bucket, Collective, Tensor] | None = None
        for bucket, part in self._parts(job):
            whole = _device.empty_beside(part, [self._world_size * bucket.slot], bucket.dtype)
            gathering = collectives.all_gather(whole, part, agree.group_of(part.device))
            if before is not None:
                self._spread(*before)
            before = (bucket, gathering, whole)
        if before is not None:
            self._spread(*before)
        has = _device.accelerator.has
        devices = {bucket.params[0].tensor.device for bucket in self._layout.buckets if has(bucket.params[0].tensor)}
        self._reading = [_device.accelerator.record(_device.accelerator.current_stream(device)) for device in devices]

    def _parts(self, job: Any) -> Iterator[tuple[Bucket, Tensor]]:
        """Yields this rank's part of each bucket once it has arrived, by way of the host."""
        self._wait()
        if not self._rows:
            self._rows = [_row(bucket) for bucket in self._layout.buckets]
        for bucket, row in zip(self._layout.buckets, self._rows, strict=True):
            job.read_weights(self._targets(bucket, row))
            tensor, accelerator, part = bucket.params[0].tensor, _device.accelerator, row
            if accelerator.has(tensor):
                part = accelerator.empty([bucket.slot], bucket.dtype, tensor.device)
                accelerator.copy(part, row, accelerator.current_stream(tensor.device))
            yield bucket, part

    def release(self) -> None:
        """Frees the memory for arriving weights."""
        self._wait()
        self._rows.clear()

    def _wait(self) -> None:
        for event in self._reading:
            _device.accelerator.wait(event)
        self._reading.clear()

    def _targets(self, bucket: Bucket, row: Tensor) -> list[Place]:
        size, wire = row.element_size(), DTYPES[row.dtype]
        return [
            (piece.index, row.data_ptr() + piece.offset * size, piece.elements, wire) for piece in bucket.pieces[self._rank]
        ]

    @torch.no_grad()
    def _spread(self, bucket: Bucket, gathering: Collective, whole: Tensor) -> None:
        """Copies a gathered bucket into its parameters."""
        gathering.wait("weights that ranks gather")
        slots = whole.view(self._world_size, bucket.slot)
        for param in bucket.params:
            _device.run_where([slots, param.tensor.detach()], functools.partial(partitions.copy_back, self._pieces[param.index]))


def _row(bucket: Bucket) -> Tensor:
    if _device.accelerator.has(bucket.params[0].tensor):
        return _device.accelerator.locked([bucket.slot], bucket.dtype)
    return _device.host_empty([bucket.slot], bucket.dtype)
