"""Weights of which each rank reads its part, and which ranks gather from each other, bucket by bucket in forward order."""

from typing import Any

import torch
from torch import Tensor, distributed

from longshore import _partition
from longshore._device import accelerator
from longshore._host import Place
from longshore._params import DTYPES
from longshore._partition import Bucket, Layout


class Gathered:
    """The parameters of a job, as all ranks have them."""

    def __init__(self, layout: Layout, rank: int, world_size: int) -> None:
        self._layout = layout
        self._pieces = layout.of_params()
        self._rank = rank
        self._world_size = world_size
        #: This rank's part of each bucket in the host's memory, and what a device still reads from there.
        self._rows: list[Tensor] = []
        self._reading: list[Any] = []

    def read(self, job: Any) -> None:
        """Waits for this rank's part of the weights that were asked for, and gives the parameters all of them. While ranks
        gather a bucket, the next one's part arrives."""
        self._wait()
        if not self._rows:
            self._rows = [_row(bucket) for bucket in self._layout.buckets]
        before: tuple[Bucket, Any, Tensor] | None = None
        for bucket, row in zip(self._layout.buckets, self._rows, strict=True):
            job.read_weights(self._targets(bucket, row))
            device = bucket.params[0].tensor.device
            part = row.to(device, non_blocking=True)
            whole = torch.empty(self._world_size * bucket.slot, dtype=bucket.dtype, device=device)
            work = distributed.all_gather_into_tensor(whole, part, async_op=True)
            if before is not None:
                self._spread(*before)
            before = (bucket, work, whole)
        if before is not None:
            self._spread(*before)
        has = accelerator.has
        devices = {bucket.params[0].tensor.device for bucket in self._layout.buckets if has(bucket.params[0].tensor)}
        self._reading = [accelerator.record(accelerator.current_stream(device)) for device in devices]

    def release(self) -> None:
        """Lets go of the host's memory."""
        self._wait()
        self._rows.clear()

    def _wait(self) -> None:
        for event in self._reading:
            accelerator.wait(event)
        self._reading.clear()

    def _targets(self, bucket: Bucket, row: Tensor) -> list[Place]:
        size, wire = row.element_size(), DTYPES[row.dtype]
        return [
            (piece.index, row.data_ptr() + piece.offset * size, piece.elements, wire) for piece in bucket.pieces[self._rank]
        ]

    @torch.no_grad()
    def _spread(self, bucket: Bucket, work: Any, whole: Tensor) -> None:
        """Copies a bucket that was gathered into its parameters."""
        work.wait()
        slots = whole.view(self._world_size, bucket.slot)
        for param in bucket.params:
            _partition.copy_back(self._pieces[param.index], slots, param.tensor.detach())


def _row(bucket: Bucket) -> Tensor:
    if accelerator.has(bucket.params[0].tensor):
        return accelerator.locked([bucket.slot], bucket.dtype)
    return torch.empty(bucket.slot, dtype=bucket.dtype)
