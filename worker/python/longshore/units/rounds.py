"""Ranks and streams that wait for each other where they use units.

Ranks that gather units do so in :class:`Rounds`. In a round each rank announces the unit that it wants next. If all
want the same unit, they gather it together. Wishes differ if a rank skips a unit, or has a unit resident that others
have released. The ranks furthest behind in the step then pull their units alone, until all want the same again. So each
round ends, whatever the ranks run, as long as each reaches a use of a unit or ``step``.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, distributed

from longshore.distributed import collectives
from longshore.distributed.collectives import Collective
from longshore.errors import LongshoreError, UsageError, WaitError
from longshore.transfer import device as _device

if TYPE_CHECKING:
    from longshore.units.model import Unit


@dataclass(slots=True)
class _Uses:
    """Streams that use a unit on one device."""

    #: Streams for which the unit's memory was allocated. Released memory goes back to them at once, even if other
    #: streams still read it.
    owners: list[Any] = field(default_factory=list)
    #: Streams that have used the unit.
    users: list[Any] = field(default_factory=list)
    #: Streams that already wait for the unit's latest weights.
    shown: list[Any] = field(default_factory=list)
    #: Streams that wait for a gather of the unit, each with an event after the gather.
    gathered: list[tuple[Any, Any]] = field(default_factory=list)


class UnitStreams:
    """Makes streams wait for each other where one writes a unit that another uses. Streams that only read do not wait.

    Args:
        copies: the devices' streams for arriving weights.
    """

    def __init__(self, copies: _device.Streams) -> None:
        self._copies = copies
        self._uses: dict[Unit, dict[torch.device, _Uses]] = {}

    def begin(self, unit: Unit, owners: Mapping[torch.device, Any]) -> None:
        """Notes that a unit's weights arrive in memory of these streams, by device."""
        for device, owner in owners.items():
            uses = self._uses.setdefault(unit, {}).setdefault(device, _Uses())
            _add(uses.owners, owner)
            uses.shown.clear()

    def gathered(self, unit: Unit) -> None:
        """Notes a gather on this thread's streams. Other streams that use the unit wait for it, too."""
        for device, uses in self._uses.get(unit, {}).items():
            current = _device.accelerator.current_stream(device)
            others = [(stream, done) for stream, done in uses.gathered if stream != current]
            uses.gathered = [*others, (current, _device.accelerator.record(current))]

    def use(self, unit: Unit, *, waits: bool) -> None:
        """Notes a use by this thread's streams. ``waits`` means that they wait for the weights already."""
        for device, uses in self._uses.get(unit, {}).items():
            current = _device.accelerator.current_stream(device)
            if current in uses.shown:
                continue
            if not waits:
                _device.accelerator.let_wait(current, _device.accelerator.record(self._copies[device]))
            _wait_for_gathered(uses, current)
            uses.shown.append(current)
            _add(uses.users, current)

    def leave(self, unit: Unit) -> None:
        """Makes later work in a unit's memory wait for its users, before the weights are released."""
        for uses in self._uses.get(unit, {}).values():
            for owner in uses.owners:
                for user in uses.users:
                    if user != owner:
                        _device.accelerator.let_wait(owner, _device.accelerator.record(user))

    def forget(self, unit: Unit) -> None:
        """Forgets a unit that no device has any more."""
        self._uses.pop(unit, None)


def _wait_for_gathered(uses: _Uses, current: Any) -> None:
    for stream, done in uses.gathered:
        if stream != current:
            _device.accelerator.let_wait(current, done)


def _add(streams: list[Any], stream: Any) -> None:
    if stream not in streams:
        streams.append(stream)


#: A rank's message in a round. The smallest message is furthest behind in the step.
#:
#: Fields: the number of its meetings so far, where ranks meet at each end of a step; its turns between forward and
#: backward since the last meeting; the wanted unit's place in that pass; a digest of the wanted weights.
_Wish = tuple[int, int, int, int]

#: Number of turns that a rank sends at a meeting. The number exceeds any real one, so ranks that still use units of the
#: step are behind.
_MEETS = 1 << 40
#: Sent in place of the number of meetings by a rank that cannot continue.
_FAILED = -1
#: Longest wait for an interrupted gather in seconds. Without it the wait might not end, since another rank may have
#: been interrupted before it began the gather.
_ENDING = 10.0
#: Number of meetings that a rank sends when it uses no more units. The number exceeds any real one, so no rank waits
#: for the ended rank.
_ENDS = 1 << 40


class Rounds:
    """This rank's part in the rounds. Their process group is separate, since a group has one order of collectives on all ranks.

    Attributes:
        is_over: whether a rank has failed or ended, so that no rank may be waited for any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size = collectives.place()
        collectives.begin()
        timeout = collectives.timeout()
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
        """Waits until all ranks have come here, as at the end of a step. Other ranks may use units meanwhile."""
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
        gathering: list[Collective] = []
        failure: RuntimeError | None = None
        try:
            for whole, part in weights:
                own = whole[self.rank * part : (self.rank + 1) * part]
                gathering.append(collectives.all_gather(whole, own, group))
            for collective in gathering:
                try:
                    collective.wait("units that ranks gather")
                except RuntimeError as error:
                    failure = failure or error  # the other gathers may still write
        except BaseException:
            _let_end(gathering)
            raise
        if failure is not None:
            self._give_up("a gather of units", failure)

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
                # Ranks can no longer agree: some end, and others are at the end of a further step.
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


def _let_end(gathering: list[Collective]) -> None:
    """Waits for gathers that Ctrl-C has interrupted, since their memory is freed next. The wait is short, since all
    ranks have agreed to gather."""
    end = time.monotonic() + _ENDING
    while time.monotonic() < end and not all(collective.is_done() for collective in gathering):
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(0.01)


def _digest(what: Iterable[int | str]) -> int:
    return zlib.crc32(repr(tuple(what)).encode())
