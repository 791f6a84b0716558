"""Ranks that reduce gradients bucket by bucket, so that each gets its part of the mean, as in ZeRO-2."""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.distributed import agree, collectives
from longshore.distributed.collectives import Collective
from longshore.distributed.ranks import CheckMissing, Reduced, on_all
from longshore.transfer import device, partitions
from longshore.transfer import params as _params
from longshore.transfer.params import Param
from longshore.transfer.partitions import Bucket, piece_param


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
        slots, accelerator = self._filled(bucket).slots, device.accelerator
        device.run_where([gradient, slots], functools.partial(partitions.copy, self._pieces[param.index]))
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
            slots = device.empty_beside(tensor, [self.world_size, bucket.slot], self._dtype or bucket.dtype)
            device.run_where([slots], Tensor.zero_)
            filling = self._filling[bucket.index] = _Filling(slots, [])
        if device.accelerator.has(tensor):
            current = device.accelerator.current_stream(tensor.device)
            if current not in filling.streams:
                # Each stream writes behind the zeroing, which runs on the first one.
                for first in filling.streams[:1]:
                    device.accelerator.let_wait(current, device.accelerator.record(first))
                filling.streams.append(current)
        return filling

    def _reduce(self) -> None:
        """Begins to reduce the next bucket."""
        bucket = self.layout.buckets[self._next]
        filling = self._filled(bucket)
        del self._filling[bucket.index]
        self._next -= 1
        for stream in filling.streams:
            current = device.accelerator.current_stream(filling.slots.device)
            if stream != current:
                device.accelerator.let_wait(current, device.accelerator.record(stream))
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
