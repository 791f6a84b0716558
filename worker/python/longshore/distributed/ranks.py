"""Ranks that reduce gradients among themselves: each sends and reads its own partition.

:class:`Reduced` and :class:`Scattered` have whole parameters, and gather their weights bucket by bucket in forward order. Gradients of
:class:`Reduced` come reduced by another library, for example DistributedDataParallel. Ranks of :class:`Scattered` reduce bucket by bucket, so
that each gets its part of the mean, as in ZeRO-2. Ranks of :class:`Sharded` have sharded parameters, as FSDP2's are. :func:`ranks_of` chooses.

The connection of an optimizer owns a rank's object. Streaming's hooks call it on autograd's threads, all other code on the training thread.
"""

import contextlib
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore import _longshore
from longshore.distributed import collectives
from longshore.distributed.collectives import Collective
from longshore.distributed.dtensor import compare, cuts, local_gradient, local_shard, sample, to_first_rank
from longshore.errors import GradientError, LongshoreError, UsageError, invalid
from longshore.transfer import device
from longshore.transfer.filling import Filling, FrozenParams, write_frozen
from longshore.transfer.gradients import Outgoing
from longshore.transfer.options import Options
from longshore.transfer.params import DTYPES, Param, Piece, Place, check_gradient, is_sharded
from longshore.transfer.partitions import Bucket, Layout, copy, copy_back, exported, layout, piece_param, share
from longshore.transfer.pinned import LockedMemory
from longshore.transfer.tensors import on_host
from longshore.transfer.weights import Weights

#: Largest number of ranks that export a job's state at a time.
_EXPORTS = 4

#: A check that raises if a step may not lack gradients of these parameters.
CheckMissing = Callable[[list[Param]], None]


class FrozenShards(FrozenParams):
    """Frozen parameters of which each rank has a part, and possibly some that each rank has whole."""

    def __init__(self, params: list[Param], first: int, rank: int, world_size: int) -> None:
        sharded: list[Param] = []
        whole: list[Param] = []
        for param in params:
            (sharded if is_sharded(param.tensor) else whole).append(param)
        self._rank = rank
        pieces = [piece for of_param in cuts(sharded, world_size).values() for piece in of_param]
        self._pieces = [dataclasses.replace(piece, index=first + place) for place, piece in enumerate(pieces)]
        super().__init__(whole, first + len(self._pieces), rank == 0)

    def described(self) -> Sequence[Param | Piece]:
        return [*self._pieces, *super().described()]

    def values(self) -> tuple[list[Place], list[Tensor]]:
        places, held = to_first_rank(self._pieces, self._rank)
        whole, held_whole = super().values()
        return [*places, *whole], [*held, *held_whole]

    def own(self) -> list[Param]:
        mine = (piece for piece in self._pieces if self._rank in piece.holders)
        shards = [(piece, local_shard(piece.param.tensor)) for piece in mine]
        return [
            dataclasses.replace(piece.param, index=piece.index, tensor=shard, shape=shard.shape, elements=piece.elements)
            for piece, shard in shards
        ]


class Ranks(ABC):
    """This rank's part in a job of partitions. All ranks call its methods in the same order."""

    def __init__(self, params: list[Param], cut: Layout) -> None:
        self.rank, self.world_size = collectives.place()
        self.params = params
        self.layout = cut
        self._pieces = self.layout.of_params()
        self._mine = {piece.param.index: piece for piece in self.layout.of_rank(self.rank)}
        self._taken: set[int] = set()
        self._outgoing = Outgoing()

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this rank takes gradients. If the rank fails within, ranks that wait for it in collectives
        are told."""
        return contextlib.nullcontext()

    def copy_into(self, locked: LockedMemory | None) -> None:
        """Sets the page-locked memory that devices copy gradients to."""
        self._outgoing.gradients.locked = locked

    def connect(self, settings: Any) -> Any:
        """Connects this rank to the servers, if all ranks want the same job."""
        collectives.check_same(settings)
        jobs: list[Any] = []
        collectives.together(lambda: jobs.append(_longshore.Job(settings)))
        return jobs[0]

    def find(self, job: Any) -> int | None:
        """Returns the job's version on its servers, found by rank 0; None without the job."""
        found: int | None = collectives.together(lambda: job.find() if self.rank == 0 else None)[0]
        return found

    def keep(self, frozen: list[Param]) -> FrozenParams:
        """Returns these ranks' handling of frozen parameters that servers keep."""
        return FrozenParams(frozen, self.layout.count(), self.rank == 0)

    def read_kept(self, job: Any, version: int, kept: FrozenParams, has: Callable[[], set[int]]) -> None:
        """Gives frozen parameters the job's weights. Of parameters in parts, each rank reads its part. Of whole parameters,
        ``has`` reads some and returns their indices. Of the others, each rank pulls a part, and ranks gather the whole."""
        if not kept.described():
            return
        others: set[int] = set()
        failure: UsageError | None = None

        def end() -> None:
            if failure is not None:
                raise failure

        with collectives.telling():
            collectives.together(lambda: others.update(has()))
            collectives.together(lambda: kept.read(job, version, kept.own()))
            params = [param for param in kept.whole() if param.index not in others]
            for param, weights in gather_frozen(job, version, params, self.rank, self.world_size):
                try:
                    write_frozen(param, weights)
                except UsageError as error:
                    failure = error
                del weights
            collectives.together(end)

    def start(
        self, job: Any, name: str, filling: Filling | None, found: bool, kept: FrozenParams, *, in_units: bool = False
    ) -> tuple[int, int]:
        """Opens and joins the job. A new job is filled with ``filling``, or else with the weights of a model that is
        not in units.

        Returns:
            The job's version, and the number of updates that made its weights.
        """
        with collectives.telling():
            is_new = self.find(job) is None
            first, held = self.first_weights() if is_new and not in_units else ([], [])
            frozen, frozen_held = kept.values() if is_new else ([], [])
            source = filling.of_job(self.params, list(self.layout.pieces()), first, frozen) if filling is not None else None

            def begin() -> tuple[int, int]:
                started: tuple[int, int] = job.start([*first, *frozen], source, found, in_units=in_units)
                return started

            started = collectives.together(lambda: collectives.rank_0_first(name, self.rank, self.world_size, begin, is_shared=True))[self.rank]
            del held, frozen_held
            return started

    def export_state(self, job: Any, arrays: list[list[Tensor]], *, alone: bool) -> int:
        """Writes all state into each array's tensors, one for each parameter. Returns the number of updates that made it.

        Args:
            alone: whether only this rank exports. Otherwise all do, 4 at a time.
        """

        def export() -> int:
            with exported(list(self.layout.pieces()), arrays) as places:
                applied: int = job.export_state(places)[1]
            return applied

        if alone:
            return export()
        applied = 0
        for turn in range(0, self.world_size, _EXPORTS):
            mine = range(turn, turn + _EXPORTS)
            applied = collectives.together(lambda: export() if self.rank in mine else 0)[turn]
        return applied

    def export_weights(self, job: Any, dtype: str, tensors: list[Tensor]) -> None:
        """Writes the newest master weights into tensors of one type, one for each parameter."""
        with exported(list(self.layout.pieces()), [tensors]) as [places]:
            job.export_weights(dtype, places)

    def places_of(self, param: Param, memory: Tensor) -> list[Place]:
        """Returns the places of a parameter's pieces in memory of its shape."""
        return [piece.place(piece.part_of(memory)) for piece in self._pieces[param.index]]

    def of_params(self, of_pieces: dict[int, int]) -> dict[int, int]:
        """Returns the value of each parameter's first piece. All of a parameter's pieces have the same value."""
        return {
            index: of_pieces[pieces[0].index]
            for index, pieces in self._pieces.items()
            if pieces[0].index in of_pieces
        }

    @abstractmethod
    def first_weights(self) -> tuple[list[Place], list[Tensor]]:
        """Returns on rank 0 the places of all pieces in the job's order, and the tensors that hold their memory."""

    def bucket_bytes(self) -> int:
        """Returns the bytes of the largest bucket of gradients that ranks reduce together."""
        return 0

    @abstractmethod
    def forget_weights(self) -> None:
        """Frees the memory for arriving weights, once the model is in units."""

    @abstractmethod
    def read(self, job: Any) -> None:
        """Waits for the weights of this rank's partition, and updates the parameters."""

    @abstractmethod
    def _send(self, job: Any, param: Param, gradient: Tensor, scale: float) -> None:
        """Sends this rank's part of a gradient."""

    def take(self, job: Any, param: Param, gradient: Tensor) -> None:
        """Takes a gradient of the current micro-step."""
        self._send(job, param, gradient, 1.0)
        self._taken.add(param.index)

    def push(self, job: Any, scale: float, check_missing: CheckMissing) -> bool:
        """Sends the gradients in ``.grad``, multiplied by ``scale``, as a micro-step. Returns whether there were any."""
        with self.telling():
            missing = self._missing([param.tensor.grad is not None for param in self.params])
            if len(missing) == len(self.params):
                return False
            _check_on_all(check_missing, missing)
            # The last layers come first, as in backward: subclasses that reduce expect the gradients in this order.
            for param in reversed(self.params):
                gradient = param.tensor.grad
                if gradient is not None:
                    self._send(job, param, gradient, scale)
                    self._taken.add(param.index)
            self._end(job)
            return True

    def end_micro_step(self, job: Any, check_missing: CheckMissing) -> bool:
        """Ends a micro-step whose gradients were taken. Returns whether there were any."""
        missing = self._missing([param.index in self._taken for param in self.params])
        if len(missing) == len(self.params):
            return False
        _check_on_all(check_missing, missing)
        self._end(job)
        return True

    def _missing(self, has: list[bool]) -> list[Param]:
        """Returns the parameters without a gradient, which are the same on all ranks unless a subclass says
        otherwise."""
        return [param for param, there in zip(self.params, has, strict=True) if not there]

    def _end(self, job: Any) -> None:
        """Sends zeros for parameters without a taken gradient, and ends the micro-step."""
        self._outgoing.push_rest(job)
        self.push_zeros(job, [param for param in self.params if param.index not in self._taken])
        self._taken.clear()
        job.end_micro_step()

    def push_zeros(self, job: Any, params: list[Param]) -> None:
        """Sends zeros for parameters."""
        pieces = [self._mine[param.index].index for param in params if param.index in self._mine]
        if pieces:
            job.begin_step()
            job.push_zeros(pieces)

    def empty_micro_step(self, job: Any) -> None:
        """Ends a micro-step in which no rank has a gradient."""
        self.push_zeros(job, self.params)
        job.end_micro_step()


def _check_on_all(check_missing: CheckMissing, missing: list[Param]) -> None:
    """Calls a check whose error all ranks raise alike: each rank knows which parameters have a gradient anywhere."""
    try:
        check_missing(missing)
    except LongshoreError as error:
        raise collectives.known(error) from None


class Reduced(Ranks):
    """Ranks whose gradients come reduced, equal on all ranks. Each rank sends its part of them, and gathers the weights."""

    def __init__(self, params: list[Param]) -> None:
        super().__init__(params, layout(params, collectives.place()[1]))
        #: This rank's part of the weights of each bucket, in the host's memory.
        self._rows: list[Tensor] = []
        #: Events after which no device copies from `_rows` any more.
        self._reading: list[Any] = []
        #: Indices of parameters whose gradients are not compared again. Each had a gradient when ranks compared, or
        #: could have had one.
        self._compared: set[int] = set()

    def first_weights(self) -> tuple[list[Place], list[Tensor]]:
        if self.rank != 0:
            return [], []
        whole = [on_host(param.tensor) for param in self.params]
        return [piece.place(piece.part_of(whole[piece.param.index])) for piece in self.layout.pieces()], whole

    def read(self, job: Any) -> None:
        """Waits for this rank's part of the requested weights, and gives the parameters the whole. While ranks gather a bucket, the next
        bucket's part arrives."""
        before: tuple[Bucket, Collective, Tensor] | None = None
        with collectives.telling():
            for bucket, part in self._parts(job):
                whole = device.empty_beside(part, [self.world_size * bucket.slot], bucket.dtype)
                gathering = collectives.all_gather(whole, part, collectives.group_of(part.device))
                if before is not None:
                    self._spread(*before)
                before = (bucket, gathering, whole)
            if before is not None:
                self._spread(*before)
            has = device.accelerator.has
            devices = {bucket.params[0].tensor.device for bucket in self.layout.buckets if has(bucket.params[0].tensor)}
            self._reading = [device.accelerator.record(device.accelerator.current_stream(found)) for found in devices]

    def _parts(self, job: Any) -> Iterator[tuple[Bucket, Tensor]]:
        """Yields this rank's part of each bucket once it has arrived, by way of the host."""
        self._end_copies()
        if not self._rows:
            for bucket in self.layout.buckets:
                is_there = device.accelerator.has(bucket.params[0].tensor)
                self._rows.append((device.accelerator.locked if is_there else device.host_empty)([bucket.slot], bucket.dtype))
        for bucket, row in zip(self.layout.buckets, self._rows, strict=True):
            job.read_weights(self._targets(bucket, row))
            tensor, accelerator, part = bucket.params[0].tensor, device.accelerator, row
            if accelerator.has(tensor):
                part = accelerator.empty([bucket.slot], bucket.dtype, tensor.device)
                accelerator.copy(part, row, accelerator.current_stream(tensor.device))
            yield bucket, part

    def forget_weights(self) -> None:
        self._end_copies()
        self._rows.clear()

    def _end_copies(self) -> None:
        """Waits until no device copies from this rank's part in the host's memory, which new weights overwrite next."""
        for event in self._reading:
            device.accelerator.wait(event)
        self._reading.clear()

    def _targets(self, bucket: Bucket, row: Tensor) -> list[Place]:
        size, wire = row.element_size(), DTYPES[row.dtype]
        return [
            (piece.index, row.data_ptr() + piece.offset * size, piece.elements, wire) for piece in bucket.pieces[self.rank]
        ]

    @torch.no_grad()
    def _spread(self, bucket: Bucket, gathering: Collective, whole: Tensor) -> None:
        gathering.wait("weights that ranks gather")
        slots = whole.view(self.world_size, bucket.slot)
        for param in bucket.params:
            device.run_where([slots, param.tensor.detach()], functools.partial(copy_back, self._pieces[param.index]))

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
        everyones = collectives.together(lambda: torch.stack(sums))
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
        check_gradient(param, gradient)
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
    """Ranks with gradients of their own. All ranks reduce buckets in one order, from the last bucket to the first.

    A bucket is reduced once it has all its gradients, or at the end of the micro-step.
    """

    def __init__(self, params: list[Param], reduce_dtype: torch.dtype | None) -> None:
        super().__init__(params)
        self._compared.update(param.index for param in params)  # no comparison: each rank has its own gradients
        self._dtype = reduce_dtype
        self._bucket = {param.index: bucket for bucket in self.layout.buckets for param in bucket.params}
        #: Buckets being filled, by index.
        self._filling: dict[int, _Filling] = {}
        #: Buckets being reduced, with this rank's part of the result, oldest first.
        self._reducing: list[tuple[Bucket, Collective, Tensor]] = []
        self._scale = 1.0
        #: Parameters without a gradient on any rank. Ranks know them only at the end of a micro-step, so buckets with
        #: such parameters wait until then.
        self._absent: set[int] = set()
        self._begin()

    def bucket_bytes(self) -> int:
        width = (self._dtype or torch.uint8).itemsize
        return max(bucket.slot * self.world_size * max(bucket.dtype.itemsize, width) for bucket in self.layout.buckets)

    def push(self, job: Any, scale: float, check_missing: CheckMissing) -> bool:
        self._scale = scale
        return super().push(job, scale, check_missing)

    def telling(self) -> contextlib.AbstractContextManager[None]:
        return collectives.telling()

    def end_micro_step(self, job: Any, check_missing: CheckMissing) -> bool:
        # This rank has no further gradients, but others may wait for it in the remaining buckets.
        self._reduce_rest()
        if super().end_micro_step(job, check_missing):
            return True
        for _, reducing, _ in self._reducing:
            reducing.wait("gradients that ranks reduce")
        self._begin()
        return False

    def _begin(self) -> None:
        self._reducing.clear()
        self._taken.clear()
        self._absent.clear()
        #: Number of gradients that each bucket lacks; `_next` is the bucket to reduce next.
        self._lacks = {bucket.index: len(bucket.params) for bucket in self.layout.buckets}
        self._next = len(self.layout.buckets) - 1

    def _end(self, job: Any) -> None:
        self._reduce_rest()
        self._push_reduced(job, wait=True)
        self._outgoing.push_rest(job)
        self._begin()
        job.end_micro_step()

    def _send(self, job: Any, param: Param, gradient: Tensor, scale: float) -> None:
        check_gradient(param, gradient)
        bucket = self._bucket[param.index]
        slots, accelerator = self._filled(bucket).slots, device.accelerator
        device.run_where([gradient, slots], functools.partial(copy, self._pieces[param.index]))
        if accelerator.has(gradient):
            # The gradient is freed next. Another stream may own its memory, and must not reuse that before the copy.
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
                # A further stream waits for the first one, which zeroes the bucket.
                for first in filling.streams[:1]:
                    device.accelerator.let_wait(current, device.accelerator.record(first))
                filling.streams.append(current)
        return filling

    def _reduce(self) -> None:
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

        A bucket's memory may belong to another stream, and is freed here for one of two reasons. The host may know that
        the bucket is reduced: it has asked, or has read the counts that ranks exchange afterwards. Otherwise one stream
        has all of the step's work.
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
        counts = collectives.ranks_with(has, self.params[0].tensor)
        self._absent = {param.index for param, count in zip(self.params, counts, strict=True) if not count}
        if not any(counts):
            return self.params
        return [param for param, count in zip(self.params, counts, strict=True) if count < self.world_size]


class Sharded(Ranks):
    """Ranks whose parameters and gradients are DTensors. A plain parameter among them is held whole by all ranks, for example beside
    tensor-parallel ones."""

    def __init__(self, params: list[Param]) -> None:
        world_size = collectives.place()[1]
        pieces = cuts(params, world_size)
        super().__init__(params, layout(params, world_size, lambda param: pieces[param.index]))
        #: This rank's piece of each parameter, by the parameter's index.
        self._here = {piece.param.index: piece for piece in self.layout.pieces() if self.rank in piece.holders}
        #: True if several ranks hold the same piece.
        self.has_replicas = any(piece.replicas for piece in self.layout.pieces())
        self._locals: list[Param] = []
        self._weights: list[Weights] = []
        #: Sampled elements of the first gradient of each shared piece, by the parameter's name. None once ranks have
        #: compared them, or if no piece is shared.
        self._samples: dict[str, list[float]] | None = {} if self.has_replicas else None

    def telling(self) -> contextlib.AbstractContextManager[None]:
        return collectives.telling() if self.has_replicas else super().telling()

    def first_weights(self) -> tuple[list[Place], list[Tensor]]:
        return to_first_rank(self.layout.pieces(), self.rank)

    def keep(self, frozen: list[Param]) -> FrozenParams:
        return FrozenShards(frozen, self.layout.count(), self.rank, self.world_size)

    def read(self, job: Any) -> None:
        locals_ = [
            dataclasses.replace(piece_param(piece, local, piece.param.dtype), shape=local.shape)
            for piece in self._here.values()
            for local in [local_shard(piece.param.tensor)]
        ]
        if [param.tensor.data_ptr() for param in locals_] != [param.tensor.data_ptr() for param in self._locals]:
            # FSDP2 has made new shards, as it does when the model is moved or loaded.
            self._locals = locals_
            sent = {piece.index for piece in self._mine.values()}
            own = [param for param in locals_ if param.index in sent]
            replicas = [param for param in locals_ if param.index not in sent]
            # Replicas are read first, while the rank's own pieces arrive. Once the own pieces are read, no version
            # counts as unread, and replicas would not be fetched.
            fetched: Any = _Fetched(job, replicas)
            self._weights = [Weights(replicas, fetched)] if replicas else []
            self._weights.append(Weights(own, job))
        for weights in self._weights:
            weights.read()

    def places_of(self, param: Param, memory: Tensor) -> list[Place]:
        return [self._here[param.index].place(memory)]

    def forget_weights(self) -> None:
        self._locals, self._weights = [], []

    def _send(self, job: Any, param: Param, gradient: Tensor, scale: float) -> None:
        check_gradient(param, gradient)
        local, piece = local_gradient(param, gradient), self._here.get(param.index)
        if piece is None:
            return
        if local.numel() != piece.elements:
            raise UsageError(f"{param.name} has another shard than when the optimizer was built: build it after fully_shard")
        if self._samples is not None and piece.replicas:
            self._samples[param.name] = sample(local)
        if piece.rank == self.rank:
            sent = dataclasses.replace(piece_param(piece, local, param.dtype), shape=local.shape)
            self._outgoing.send(job, sent, local, scale)

    def _end(self, job: Any) -> None:
        if self._samples is not None:
            compare([piece for piece in self.layout.pieces() if piece.replicas], collectives.together(lambda: self._samples))
            self._samples = None
        super()._end(job)


class _Fetched:
    """Stands for the job in :class:`Weights` of pieces whose gradient another rank sends. Such pieces are fetched,
    since a read brings only the pieces that this rank sends."""

    def __init__(self, job: Any, params: list[Param]) -> None:
        self._job, self._params = job, params

    def unread_params(self) -> list[int]:
        return [] if self._job.unread_weights() is None else [param.index for param in self._params]

    def read_weights(self, places: list[Place]) -> int | None:
        version: int | None = self._job.unread_weights()
        if version is not None:
            self._job.fetch(version, [(place, 0) for place in places]).read()
        return version


def gather_frozen(job: Any, version: int, params: list[Param], rank: int, world_size: int) -> Iterator[tuple[Param, Tensor]]:
    """Yields the job's frozen weights on their parameters' devices, one after the other. Each rank pulls its part."""
    shares = [share(param.elements, param.dtype.itemsize, rank, world_size) for param in params]
    pulled: list[list[tuple[int, Tensor]]] = []

    def pull() -> None:
        for param, of_rank in zip(params, shares, strict=True):
            own = of_rank.own if of_rank is not None else [(0, param.elements)]
            parts = [(start, device.host_empty([length], param.dtype)) for start, length in own]
            places = [((param.index, part.data_ptr(), len(part), param.wire), start) for start, part in parts]
            job.fetch(version, places).read()
            pulled.append(parts)

    collectives.together(pull)
    for param, of_rank in zip(params, shares, strict=True):
        whole = torch.empty(param.elements, dtype=param.dtype, device=param.tensor.device)
        for start, part in pulled.pop(0):
            whole[start : start + len(part)].copy_(part)
        if of_rank is not None:
            gathered = whole[: of_rank.gathered].view(torch.uint8)
            size = of_rank.part * whole.itemsize
            own = gathered[rank * size : (rank + 1) * size]
            gathering = collectives.all_gather(gathered, own, collectives.group_of(whole.device))
            gathering.wait(f"{param.name}, which is frozen and which ranks gather")
        yield param, whole.view(param.shape)
        # The reference ends before the next tensor comes, so that the device has one tensor at a time.
        del whole


def ranks_of(options: Options, params: list[Param]) -> Ranks | None:
    """Returns the ranks with which this one reduces or gathers; None if each rank sends its gradients for the servers to sum.

    Raises:
        UsageError: without a process group.
        InvalidError: if the process group differs from the options' world, or if a parameter cannot be trained so.
    """
    sharded = any(is_sharded(param.tensor) for param in params)
    if not sharded and (options.place()[1] == 1 or options.partition is None):
        return None
    rank, world_size = collectives.place()
    collectives.begin()
    with collectives.telling():
        if options.place() != (rank, world_size):
            given = "rank {} of {}".format(*options.place())
            limit = f"rank {rank} of {world_size}, as torch.distributed has it"
            raise invalid("rank and world_size", given, limit, "leave both out, and RANK and WORLD_SIZE to torchrun")
        if sharded:
            if options.partition is not None:
                limit = "None with parameters that are DTensors"
                raise invalid("partition", repr(options.partition), limit, "leave it out: they are partitions already")
            return Sharded(params)
        if options.partition == "all-reduced":
            return Reduced(params)
        if collectives.has_ddp(param.tensor for param in params):
            raise invalid(
                "partition",
                "'reduce-scatter' with DistributedDataParallel",
                "'all-reduced' with it",
                "it has reduced the gradients already: pass partition='all-reduced', or leave the model unwrapped",
            )
        return Scattered(params, torch.float32 if options.reduce_dtype == "fp32" else None)
