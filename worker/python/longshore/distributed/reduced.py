"""Ranks with whole parameters, which gather their weights bucket by bucket in forward order.

:class:`Reduced` has gradients that another library has reduced, as DistributedDataParallel does. Ranks of :class:`Scattered` reduce bucket by
bucket, so that each gets its part of the mean, as in ZeRO-2.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.distributed import agree, collectives
from longshore.distributed.collectives import Collective
from longshore.distributed.ranks import CheckMissing, Ranks, on_all
from longshore.errors import GradientError, invalid
from longshore.transfer import device as _device
from longshore.transfer import partitions
from longshore.transfer import params as _params
from longshore.transfer.params import DTYPES, Param, Place
from longshore.transfer.partitions import Bucket, Layout, layout, piece_param
from longshore.transfer.tensors import on_host


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
        before: tuple[Bucket, Collective, Tensor] | None = None
        with collectives.telling():
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


class Reduced(Ranks):
    """Ranks whose gradients come reduced, equal on all ranks. Each rank sends its part of them, and gathers the weights."""

    def __init__(self, params: list[Param]) -> None:
        super().__init__(params, layout(params, agree.place()[1]))
        self._gathered = Gathered(self.layout, self.rank, self.world_size)
        #: Parameters whose gradients ranks have compared, or had the occasion to.
        self._compared: set[int] = set()

    def first_weights(self) -> tuple[list[Place], list[Tensor]]:
        if self.rank != 0:
            return [], []
        whole = [on_host(param.tensor) for param in self.params]
        return [piece.place(piece.part_of(whole[piece.param.index])) for piece in self.layout.pieces()], whole

    def read(self, job: Any) -> None:
        self._gathered.read(job)

    def forget_weights(self) -> None:
        self._gathered.release()

    def push(self, job: Any, scale: float, check_missing: CheckMissing) -> bool:
        has = {param.index for param in self.params if param.tensor.grad is not None}
        if has - self._compared:
            self._compare()
            self._compared |= has | {param.index for param in self.params if param.tensor.requires_grad}
        return super().push(job, scale, check_missing)

    def _compare(self) -> None:
        """Refuses gradients that differ between ranks: they were not reduced. Runs in the first step, and again when parameters begin to
        train, which DistributedDataParallel may not know."""
        sums = [
            torch.zeros(2, dtype=torch.float64, device="cpu")
            if param.tensor.grad is None
            else torch.stack([param.tensor.grad.double().sum(), param.tensor.grad.double().abs().sum()]).cpu()
            for param in self.params
        ]
        everyones = agree.together(lambda: torch.stack(sums))
        for rank, theirs in enumerate(everyones):
            apart = (theirs[:, 0] - everyones[0][:, 0]).abs() > 1e-3 * everyones[0][:, 1]
            if apart.any():
                name = self.params[int(apart.int().argmax())].name
                raise invalid(
                    f"{name}.grad",
                    f"another on rank {rank} than on rank 0",
                    "reduced, so that all ranks have the same, with partition='all-reduced'",
                    "train with DistributedDataParallel, built while the parameter required a gradient, or pass partition='reduce-scatter'",
                    GradientError,
                )

    def _send(self, job: Any, param: Param, gradient: Tensor, scale: float) -> None:
        _params.check_gradient(param, gradient)
        piece = self._mine.get(param.index)
        if piece is not None:
            part = gradient.reshape(-1)[piece.start : piece.start + piece.elements]
            self._outgoing.send(job, piece_param(piece, part, param.dtype), part, scale)


@dataclass(frozen=True, slots=True)
class _Filling:
    """A bucket being filled, with a row for each rank, and the streams that write to it. The first stream owns its memory."""

    slots: Tensor
    streams: list[Any]


class Scattered(Reduced):
    """Ranks with gradients of their own. A bucket is reduced once it has all its gradients, from the last bucket on. So all ranks have one
    order, even if some parameters have no gradient."""

    def __init__(self, params: list[Param], reduce_dtype: torch.dtype | None) -> None:
        super().__init__(params)
        self._compared.update(param.index for param in params)  # each rank has its own gradients, so none are compared
        self._dtype = reduce_dtype
        self._bucket = {param.index: bucket for bucket in self.layout.buckets for param in bucket.params}
        #: Buckets being filled, and the number of gradients that each lacks.
        self._filling: dict[int, _Filling] = {}
        self._lacks = {bucket.index: len(bucket.params) for bucket in self.layout.buckets}
        self._next = len(self.layout.buckets) - 1
        #: Buckets being reduced, with this rank's part of the result, oldest first.
        self._reducing: list[tuple[Bucket, Collective, Tensor]] = []
        self._scale = 1.0
        #: Parameters without a gradient on any rank. Known at the end of a micro-step, until which their buckets wait.
        self._absent: set[int] = set()

    def bucket_bytes(self) -> int:
        width = (self._dtype or torch.uint8).itemsize
        return max(bucket.slot * self.world_size * max(bucket.dtype.itemsize, width) for bucket in self.layout.buckets)

    def push(self, job: Any, scale: float, check_missing: CheckMissing) -> bool:
        self._scale = scale
        with self.telling():
            return super().push(job, scale, on_all(check_missing))

    def telling(self) -> contextlib.AbstractContextManager[None]:
        return collectives.telling()

    def end_micro_step(self, job: Any, check_missing: CheckMissing) -> bool:
        # Ranks without further gradients still reduce with the others, so that none waits for another.
        self._reduce_rest()
        if super().end_micro_step(job, on_all(check_missing)):
            return True
        for _, reducing, _ in self._reducing:
            reducing.wait("gradients that ranks reduce")
        self._begin()
        return False

    def _begin(self) -> None:
        self._reducing.clear()
        self._taken.clear()
        self._absent.clear()
        self._lacks = {bucket.index: len(bucket.params) for bucket in self.layout.buckets}
        self._next = len(self.layout.buckets) - 1

    def _end(self, job: Any) -> None:
        self._reduce_rest()
        self._push_reduced(job, wait=True)
        self._outgoing.push_rest(job)
        self._begin()
        job.end_micro_step()

    def _send(self, job: Any, param: Param, gradient: Tensor, scale: float) -> None:
        _params.check_gradient(param, gradient)
        bucket = self._bucket[param.index]
        slots, accelerator = self._filled(bucket).slots, _device.accelerator
        _device.run_where([gradient, slots], functools.partial(partitions.copy, self._pieces[param.index]))
        if accelerator.has(gradient):
            # The gradient may be of another stream, and is freed next.
            accelerator.keep_for(gradient, accelerator.current_stream(gradient.device))
        self._lacks[bucket.index] -= 1
        while self._next >= 0 and self._lacks[self._next] == 0:
            self._reduce()
        self._push_reduced(job, wait=False)

    def _reduce_rest(self) -> None:
        while self._next >= 0:
            self._reduce()

    def _filled(self, bucket: Bucket) -> _Filling:
        """Returns a bucket for the next work of this thread's stream. Elements without a gradient are zero."""
        filling, tensor = self._filling.get(bucket.index), bucket.params[0].tensor
        if filling is None:
            slots = _device.empty_beside(tensor, [self.world_size, bucket.slot], self._dtype or bucket.dtype)
            _device.run_where([slots], Tensor.zero_)
            filling = self._filling[bucket.index] = _Filling(slots, [])
        if _device.accelerator.has(tensor):
            current = _device.accelerator.current_stream(tensor.device)
            if current not in filling.streams:
                # Each stream writes behind the zeroing, which runs on the first one.
                for first in filling.streams[:1]:
                    _device.accelerator.let_wait(current, _device.accelerator.record(first))
                filling.streams.append(current)
        return filling

    def _reduce(self) -> None:
        """Begins to reduce the next bucket."""
        bucket = self.layout.buckets[self._next]
        filling = self._filled(bucket)
        del self._filling[bucket.index]
        self._next -= 1
        for stream in filling.streams:
            current = _device.accelerator.current_stream(filling.slots.device)
            if stream != current:
                _device.accelerator.let_wait(current, _device.accelerator.record(stream))
        reducing, part = collectives.reduce_scatter(filling.slots, self.rank)
        self._reducing.append((bucket, reducing, part))

    def _push_reduced(self, job: Any, wait: bool) -> None:
        """Sends this rank's part of reduced buckets; with ``wait`` of all buckets being reduced.

        Memory of another stream may be freed here, for one of two reasons. The host may have seen that the bucket is reduced, since ranks
        count their gradients behind it. Otherwise one stream has all of the step's work.
        """
        while self._reducing and (wait or self._reducing[0][1].is_done()):
            bucket, reducing, part = self._reducing.pop(0)
            reducing.wait("gradients that ranks reduce")
            scale = self._scale / self.world_size
            absent = [piece.index for piece in bucket.pieces[self.rank] if piece.param.index in self._absent]
            if absent:
                job.begin_step()
                job.push_zeros(absent)
            for piece in bucket.pieces[self.rank]:
                if piece.param.index in self._absent:
                    continue
                gradient = part[piece.offset : piece.offset + piece.elements]
                self._outgoing.send(job, piece_param(piece, gradient, gradient.dtype), gradient, scale)

    def _missing(self, has: list[bool]) -> list[Param]:
        """Returns the parameters without a gradient on some rank; all parameters, if no rank has any gradient."""
        counts = agree.ranks_with(has, self.params[0].tensor)
        self._absent = {param.index for param, count in zip(self.params, counts, strict=True) if not count}
        if not any(counts):
            return self.params
        return [param for param, count in zip(self.params, counts, strict=True) if count < self.world_size]
