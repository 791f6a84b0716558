"""Ranks that reduce gradients among themselves: each sends and reads its own partition.

:mod:`longshore.distributed.reduced` has ranks with whole parameters, and :mod:`longshore.distributed.dtensor` ranks whose parameters are
sharded already, as FSDP2's are. :func:`has_ddp` finds models of DistributedDataParallel.
"""

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from longshore import _longshore
from longshore.distributed import agree, collectives
from longshore.errors import LongshoreError, UsageError
from longshore.transfer import device
from longshore.transfer.filling import Filling, FrozenParams, write_frozen
from longshore.transfer.gradients import Outgoing
from longshore.transfer.params import Param, Place
from longshore.transfer.partitions import Layout, exported, share
from longshore.transfer.pinned import LockedMemory

#: Most concurrent exports of a job.
_EXPORTS = 4

#: Raises if a step may not lack gradients of these parameters.
CheckMissing = Callable[[list[Param]], None]


class Ranks(ABC):
    """This rank's part in a job of partitions. All ranks call its methods in the same order."""

    def __init__(self, params: list[Param], cut: Layout) -> None:
        self.rank, self.world_size = agree.place()
        self.params = params
        self.layout = cut
        self._pieces = self.layout.of_params()
        self._mine = {piece.param.index: piece for piece in self.layout.of_rank(self.rank)}
        self._taken: set[int] = set()
        self._outgoing = Outgoing()

    def refuse(self) -> None:
        """Refuses to continue once a rank has failed: parameters may have outdated parts of that rank."""
        collectives.refuse()

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Context in which a rank takes gradients. Ranks that wait for it in collectives are told if it fails."""
        return contextlib.nullcontext()

    def copy_into(self, locked: LockedMemory | None) -> None:
        """Sets the page-locked memory that devices copy gradients to."""
        self._outgoing.gradients.locked = locked

    def connect(self, settings: Any) -> Any:
        """Connects this rank to the servers, if all ranks want the same job."""
        agree.check_same(settings)
        jobs: list[Any] = []
        agree.together(lambda: jobs.append(_longshore.Job(settings)))
        return jobs[0]

    def find(self, job: Any) -> int | None:
        """Returns the job's version on its servers, found by rank 0; None without the job."""
        found: int | None = agree.together(lambda: job.find() if self.rank == 0 else None)[0]
        return found

    def keep(self, frozen: list[Param]) -> FrozenParams:
        """Returns these ranks' handling of frozen parameters that servers keep."""
        return FrozenParams(frozen, self.layout.count(), self.rank == 0)

    def read_kept(self, job: Any, version: int, kept: FrozenParams, has: Callable[[], set[int]]) -> None:
        """Gives frozen parameters the job's weights: a rank reads its own parts, and ranks gather the others. ``has`` reads some another
        way, and returns their places."""
        if not kept.described():
            return
        others: set[int] = set()
        failure: UsageError | None = None

        def end() -> None:
            if failure is not None:
                raise failure

        with collectives.telling():
            agree.together(lambda: others.update(has()))
            agree.together(lambda: kept.read(job, version, kept.own()))
            params = [param for param in kept.whole() if param.index not in others]
            for param, weights in gather_frozen(job, version, params, self.rank, self.world_size):
                try:
                    write_frozen(param, weights)
                except UsageError as error:
                    failure = error
                del weights
            agree.together(end)

    def start(
        self, job: Any, name: str, filling: Filling | None, found: bool, kept: FrozenParams, *, in_units: bool = False
    ) -> tuple[int, int]:
        """Opens and joins the job. A new job gets ``filling``, or else the model's weights; a model in units gives none.

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

            started = agree.together(lambda: agree.rank_0_first(name, self.rank, self.world_size, begin, is_shared=True))[self.rank]
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
            applied = agree.together(lambda: export() if self.rank in mine else 0)[turn]
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
        missing = self._missing([param.tensor.grad is not None for param in self.params])
        if len(missing) == len(self.params):
            return False
        check_missing(missing)
        # The last layers come first, as in backward: ranks that reduce do so in this order.
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
        check_missing(missing)
        self._end(job)
        return True

    def _missing(self, has: list[bool]) -> list[Param]:
        """Returns the parameters without a gradient. Here all ranks have the same ones."""
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


def on_all(check_missing: CheckMissing) -> CheckMissing:
    """Returns a check that raises on all ranks alike: each rank knows which parameters have a gradient anywhere."""

    def check(missing: list[Param]) -> None:
        try:
            check_missing(missing)
        except LongshoreError as error:
            raise collectives.known(error) from None

    return check


def has_ddp(tensors: Iterable[Tensor]) -> bool:
    """Returns whether a DistributedDataParallel model has some of these tensors as parameters."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.nn.parallel import DistributedDataParallel

    mine = {id(tensor) for tensor in tensors}
    # `isinstance` would read each object's `__class__`. Some of torch's objects warn at that, and it takes seconds.
    wrapped = [found for found in gc.get_objects() if DistributedDataParallel in type(found).__mro__]
    return any(id(tensor) in mine for model in wrapped for tensor in model.parameters())
