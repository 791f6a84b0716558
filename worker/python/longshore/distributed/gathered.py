"""Weights that ranks gather, each rank having read its part: bucket by bucket in forward order, frozen ones, or unit by unit.

In rounds ranks announce the next unit they want, so that no rank waits for a rank with another wish. Ranks gather a unit together only if all
of them want it now. Ranks want different units if a rank skips a unit, or has a unit resident that others have released. The ranks furthest
behind in the step pull theirs alone, until all want the same again. So each round ends, whatever the ranks run, as long as each reaches a
use of a unit or ``step``.
"""

import contextlib
import functools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed

from longshore.distributed import agree, collectives
from longshore.distributed.collectives import Collective
from longshore.errors import LongshoreError, UsageError, WaitError
from longshore.transfer import partitions
from longshore.transfer import device as _device
from longshore.transfer.params import DTYPES, Param, Place
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


#: A rank's message in a round. The smallest message is furthest behind in the step.
#:
#: Fields: its meetings so far, its turns between forward and backward since the last meeting, its place in that pass, and a digest of the
#: wanted weights.
_Wish = tuple[int, int, int, int]

#: Number of turns of a rank at a meeting: larger than any turn, so ranks before the meeting are behind.
_MEETS = 1 << 40
#: Number of meetings that a rank sends when it cannot continue.
_FAILED = -1
#: Number of meetings that a rank sends when it ends and uses no more units: the largest, so it is behind no rank.
_ENDS = 1 << 40


class Rounds:
    """This rank's part in the rounds. Their process group is separate, since a group has one order of collectives on all ranks.

    Attributes:
        is_over: whether a rank has failed or ended, so that no rank may be waited for any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size = agree.place()
        collectives.begin()
        timeout = agree.timeout()
        self._speech: Any = distributed.new_group(backend="gloo", timeout=timeout)
        #: Process group for gathers of this device's weights.
        self._group: Any = distributed.new_group(backend="gloo" if device.type == "cpu" else None, timeout=timeout)
        self.is_over = False
        self._meetings = 0
        self._turn = 0
        self._was_backward = False

    def least(self, mine: int | None) -> int | None:
        """Returns the ranks' least number; None if no rank has one."""
        if mine is None:
            return None
        least = torch.tensor([mine], dtype=torch.int64, device="cpu")
        work = distributed.all_reduce(least, distributed.ReduceOp.MIN, self._speech, async_op=True)
        collectives.wait(work, "the least budget of all ranks")
        return int(least.item())

    def agree(self, name: str, place: int, what: Iterable[int | str], *, is_backward: bool) -> bool:
        """Announces that this rank wants a unit.

        Args:
            name: the unit's name.
            place: the unit's place in the order of use.
            what: the wanted version and weights of the unit.

        Returns:
            True if all ranks want the same now. Otherwise this rank pulls the unit alone.

        Raises:
            LongshoreError: if another rank has failed, or has not come in time.
        """
        self._turn += is_backward is not self._was_backward
        self._was_backward = is_backward
        return self._ends_together((self._meetings, self._turn, place, _digest(what)), f"a use of unit {name}")

    def meet(self) -> None:
        """Waits until all ranks have come here, as at the end of a step. Other ranks may use units meanwhile.

        Raises:
            LongshoreError: as in :meth:`agree`.
        """
        if not self._ends_together((self._meetings, _MEETS, 0, 0), "the end of a step"):
            remedy = "call step() as often on each of them, with the same accumulate=, and close() after the same step"
            raise UsageError(f"ranks end different steps: {remedy}")
        self._meetings += 1
        self._turn, self._was_backward = 0, False

    def end(self, what: Iterable[int | str]) -> bool:
        """Waits until all ranks end. Other ranks may use units meanwhile.

        Args:
            what: this rank's last version and weights.

        Returns:
            True if all ranks have come, and want the same.

        Raises:
            LongshoreError: as in :meth:`agree`.
        """
        return self._ends_together((_ENDS, _MEETS, self._meetings, _digest(what)), "close()")

    @contextlib.contextmanager
    def last(self) -> Iterator[None]:
        """Context of the ranks' last gather. If Ctrl-C ends it on this rank, the others may have finished, and are not waited for again."""
        try:
            yield
        except BaseException:
            self.is_over = True
            raise

    def fail(self) -> None:
        """Tells the others that this rank cannot go on, as far as they can be reached."""
        self.is_over = True
        with contextlib.suppress(LongshoreError):
            self._say((_FAILED, 0, 0, 0), "an error of its own")

    def gather(self, weights: list[tuple[Tensor, int]], *, on_host: bool = False) -> None:
        """Gathers weights of which each rank has its part in place. ``weights`` has pairs of all bytes and a part's size. The weights lie
        on the device, or all of them in the host's memory."""
        group = self._speech if on_host else self._group
        gathering = []
        failure: RuntimeError | None = None
        for whole, part in weights:
            own = whole[self.rank * part : (self.rank + 1) * part]
            gathering.append(collectives.all_gather(whole, own, group))
        for collective in gathering:
            try:
                collective.wait("units that ranks gather")
            except RuntimeError as error:
                failure = error  # the other gathers may still write
        if failure is not None:
            self._give_up("what they have pulled", failure)

    def _ends_together(self, wish: _Wish, where: str) -> bool:
        while True:
            wishes = self._say(wish, where)
            failed = [rank for rank, other in enumerate(wishes) if other[0] == _FAILED]
            if failed:
                self.is_over = True
                raise LongshoreError(f"rank {failed[0]} could not get its part of a unit, so that no rank can go on: its own error says why")
            if all(other == wish for other in wishes):
                return True
            if any(other[0] == _ENDS for other in wishes) and all(other[1] == _MEETS for other in wishes):
                # Some ranks end, and others have made a further step, so ranks can no longer agree.
                self.is_over = True
                return False
            if wish == min(wishes):
                return False

    def _say(self, wish: _Wish, where: str) -> list[_Wish]:
        """Returns every rank's message of this round, by rank."""
        said = torch.empty(self.world_size, len(wish), dtype=torch.int64, device="cpu")
        try:
            work = distributed.all_gather_into_tensor(said.view(-1), torch.tensor(wish, dtype=torch.int64, device="cpu"), self._speech, async_op=True)
            collectives.wait(work, where)
        except RuntimeError as error:
            self._give_up(where, error)
        return [tuple(other) for other in said.tolist()]

    def _give_up(self, where: str, error: Exception) -> NoReturn:
        self.is_over = True
        if isinstance(error, LongshoreError) and not isinstance(error, WaitError):
            raise error  # another rank has given the reason
        raise WaitError(
            f"rank {self.rank} waited at {where} for the other ranks, and one has ended, or came to no use of a unit and to no step() "
            "within the timeout of init_process_group: look at the other ranks' errors, and have all ranks run the same passes and make the "
            f"same steps, or pass weights='whole' to shard(). torch.distributed says: {error}"
        ) from error


def _digest(what: Iterable[int | str]) -> int:
    return zlib.crc32(repr(tuple(what)).encode())
