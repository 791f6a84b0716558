"""Ranks that reduce gradients among themselves: each sends and reads its own partition.

:class:`Reduced` has gradients that another library has reduced, as DistributedDataParallel does. In :mod:`longshore.distributed.scattered`
this package reduces them. :mod:`longshore.distributed.dtensor` has parameters that are sharded already, as FSDP2's are.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longshore import _longshore
from longshore.distributed import agree, collectives
from longshore.distributed.gathered import Gathered, gather_frozen
from longshore.errors import GradientError, LongshoreError, UsageError, invalid
from longshore.transfer import params as _params
from longshore.transfer.filling import Filling, FrozenParams, write_frozen
from longshore.transfer.gradients import Outgoing, Place
from longshore.transfer.params import Param
from longshore.transfer.partitions import Layout, exported, layout, piece_param
from longshore.transfer.pinned import LockedMemory
from longshore.transfer.weights import values

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
        if kept.described():
            with collectives.telling():
                self._read_kept(job, version, kept, has)

    def _read_kept(self, job: Any, version: int, kept: FrozenParams, has: Callable[[], set[int]]) -> None:
        others: set[int] = set()
        agree.together(lambda: others.update(has()))
        agree.together(lambda: kept.read(job, version, kept.own()))
        params = [param for param in kept.whole() if param.index not in others]
        failure: UsageError | None = None
        for param, weights in gather_frozen(job, version, params, self.rank, self.world_size):
            try:
                write_frozen(param, weights)
            except UsageError as error:
                failure = error
            del weights

        def end() -> None:
            if failure is not None:
                raise failure

        agree.together(end)

    def start(
        self, job: Any, name: str, filling: Filling | None, found: bool, kept: FrozenParams, *, in_units: bool = False
    ) -> tuple[int, int]:
        """Opens and joins the job. A new job gets ``filling``, or else the model's weights; a model in units gives none.

        Returns:
            The job's version, and the number of updates that made its weights.
        """
        with collectives.telling():
            return self._start(job, name, filling, found, kept, in_units)

    def _start(self, job: Any, name: str, filling: Filling | None, found: bool, kept: FrozenParams, in_units: bool) -> tuple[int, int]:
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
        _, whole = values(self.params)
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


def on_all(check_missing: CheckMissing) -> CheckMissing:
    """Returns a check that raises on all ranks alike: each rank knows which parameters have a gradient anywhere."""

    def check(missing: list[Param]) -> None:
        try:
            check_missing(missing)
        except LongshoreError as error:
            raise collectives.known(error) from None

    return check
