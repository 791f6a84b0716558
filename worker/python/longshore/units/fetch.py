"""Fetches under way: a unit's weights from servers, copies or lent memory, and the streams that wait for them.

:mod:`longshore.units.residency` begins a fetch on the training thread; a device copies on streams of the package.

Ranks that gather units do so in :class:`Rounds`. In a round each rank announces the unit that it wants next. If all
want the same unit, they gather it together. Wishes differ if a rank skips a unit, or has a unit resident that others
have released. The ranks furthest behind in the step then pull their units alone, until all want the same again. So each
round ends, whatever the ranks run, as long as each reaches a use of a unit or ``step``.
"""

import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, distributed

from longshore.distributed import collectives
from longshore.distributed.collectives import Collective
from longshore.errors import LongshoreError, UsageError, WaitError
from longshore.transfer import device as _device
from longshore.transfer.params import DTYPES
from longshore.transfer.pinned import Lending, Run, Staging
from longshore.units.model import Member, Span, Unit


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
        copies: returns a device's stream for arriving weights.
    """

    def __init__(self, copies: Callable[[torch.device], Any]) -> None:
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
                _device.accelerator.let_wait(current, _device.accelerator.record(self._copies(device)))
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


class MappedFetch:
    """Weights requested together, for a copy from servers' mapped memory.

    Args:
        asked: the Rust half's request, which returns the weights' addresses.
        parts: each part's span in the job, and the device's flat memory that it is copied to.
    """

    def __init__(self, job: Any, version: int, asked: Any, parts: list[tuple[Span, Tensor]]) -> None:
        self._job, self._version, self._asked, self._parts = job, version, asked, parts
        self._runs: list[list[Run]] | None = None
        self._staged: list[Tensor] = []
        self._fetch: Any = None

    def read(self) -> None:
        """Waits for the weights. After the loss of a server's link the weights arrive in this process's memory, and are read into
        page-locked memory."""
        self._runs = self._asked.runs()
        if self._runs is None:
            self._staged = [_device.accelerator.locked(target.shape, target.dtype) for _, target in self._parts]
            places = [
                ((index, memory.data_ptr(), elements, DTYPES[memory.dtype]), first)
                for ((index, first, elements), _), memory in zip(self._parts, self._staged, strict=True)
            ]
            self._fetch = self._job.fetch(self._version, places)
            self._fetch.read()

    def cancel(self) -> None:
        """Ends the wait of a thread in :meth:`read`."""
        self._asked.cancel()
        if self._fetch is not None:
            self._fetch.cancel()

    def copy(self, lending: Lending, stream: Callable[[torch.device], Any]) -> None:
        """Enqueues the copies on their devices' streams, after :meth:`read`."""
        targets = [target for _, target in self._parts]
        if self._runs is not None:
            lending.copy(self._asked, self._runs, targets, stream)
            return
        for target, memory in zip(targets, self._staged, strict=True):
            _device.accelerator.copy(target, memory, stream(target.device))
        lending.hold(None, self._staged, targets, stream)


#: A rank's message in a round. The smallest message is furthest behind in the step.
#:
#: Fields: the number of its meetings so far, where ranks meet at each end of a step; its turns between forward and
#: backward since the last meeting; the wanted unit's place in that pass; a digest of the wanted weights.
_Wish = tuple[int, int, int, int]

#: Number of turns that a rank sends at a meeting. The number exceeds any real one, so ranks that still use units of the
#: step are behind.
_MEETS = 1 << 40
#: Number of meetings that a rank sends when it cannot continue.
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
                    failure = error  # the other gathers may still write
        except BaseException:
            _let_end(gathering)
            raise
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


#: Seconds between two times at which a wait lets signal handlers run.
_PERIOD = 0.1


class Source(Protocol):
    """Source of units' weights: a :class:`longshore.units.fetching.Fetcher`, whose module imports this one.

    Attributes:
        version, rounds, lending, staging, is_at_hand: as in the fetcher.
    """

    version: int
    rounds: Rounds | None
    lending: Lending | None
    staging: Staging
    is_at_hand: bool

    def begin(self, members: list[Member], *, ahead: bool, shared: bool = False) -> "Fetch": ...
    def stream(self, device: torch.device) -> Any: ...
    def is_gone(self, member: Member) -> bool: ...
    def keep(self, member: Member) -> None: ...
    def kept(self, member: Member) -> Tensor: ...


class Fetch:
    """A fetch of some members' weights."""

    def __init__(self, fetcher: Source, members: list[Member]) -> None:
        self.members = members
        #: The wait for the weights on the background thread; None if there is none.
        self.read: Future[None] | None = None
        #: The Rust half's pull, whose cancellation ends that wait.
        self.pull: Any = None
        #: Members' weights that devices copy from servers' memory.
        self.lent: MappedFetch | None = None
        #: Pairs (target, source) to copy once the source has arrived. A target is a member's memory or a part of it.
        self.sources: list[tuple[Tensor, Tensor]] = []
        #: Staging memory, with the device that copies from it.
        self.staged: list[tuple[Tensor, torch.device]] = []
        #: Members of which this fetch brings a rank's part, with the bytes to gather and the size of a part.
        self.shared: list[tuple[Member, Tensor, int]] = []
        self._fetcher = fetcher
        self._copied: dict[torch.device, Any] | None = None
        #: By device: the stream for which the memory was allocated, and an event after that stream's work until then.
        #: The work may still use the tensor that had the memory before.
        self._before: dict[torch.device, tuple[Any, Any]] = {}
        for device in {member.tensor.device for member in members if _device.accelerator.has(member.tensor)}:
            stream = _device.accelerator.current_stream(device)
            self._before[device] = stream, _device.accelerator.record(stream)

    @property
    def is_staged(self) -> bool:
        """True if arrived weights still need a copy to a device or to memory of another shape."""
        return bool(self.sources or self._before)

    def owners(self) -> dict[torch.device, Any]:
        """Returns by device the stream that owns the members' memory."""
        return {device: stream for device, (stream, _) in self._before.items()}

    def has_come(self) -> bool:
        """Returns whether all weights are in the host's memory."""
        return self.read is None or (self.read.done() and not self.read.cancelled() and self.read.exception() is None)

    def advance(self) -> None:
        """Begins the copies to the device if the weights have arrived."""
        if self.is_staged and self.has_come():
            self._copy()

    def finish(self) -> None:
        """Waits until this thread's next work can use the members. After an error nothing writes to them any more."""
        try:
            if self.read is not None:
                _result(self.read)
            self._copy()
            for device, copied in (self._copied or {}).items():
                _device.accelerator.let_wait(_device.accelerator.current_stream(device), copied)
        except BaseException:
            self.give_up()
            raise

    def finish_together(self, name: str, place: int, *, is_backward: bool) -> bool:
        """Waits for this rank's part of a unit, and gathers the others if all ranks want the same unit. Otherwise it fetches the whole
        unit.

        Args:
            name, place, is_backward: as in :meth:`Rounds.agree`.

        Returns:
            True if ranks gather the unit. Only this thread's stream waits for the gather.
        """
        rounds = self._fetcher.rounds
        if rounds is None:  # the optimizer is gone
            self.finish_alone()
            return False
        try:
            self.finish()
        except LongshoreError:
            rounds.fail()
            raise
        names = [member.name for member, _, _ in self.shared]
        try:
            if rounds.agree(name, place, [self._fetcher.version, *names], is_backward=is_backward):
                rounds.gather([(whole, part) for _, whole, part in self.shared])
                return True
        except BaseException:
            self.give_up()
            raise
        self.finish_alone()
        return False

    def finish_alone(self) -> None:
        """Fetches the whole members instead of this rank's part."""
        self.give_up()
        again = self._fetcher.begin(self.members, ahead=False)
        again._before = self._before  # the memory is the same
        again.finish()

    def give_up(self) -> None:
        """Ends the fetch. Nothing writes to the members afterwards, whose memory is released next."""
        for wait_ in (self.pull, self.lent):
            if wait_ is not None:
                wait_.cancel()
        if self.read is not None and not self.read.cancel():
            while not self.read.done():
                # The cancelled read ends soon. A second Ctrl-C must not free the memory to which the read may still
                # write.
                with contextlib.suppress(KeyboardInterrupt):
                    wait([self.read])
        for device, (owner, _) in self._before.items():
            _device.accelerator.let_wait(owner, _device.accelerator.record(self._fetcher.stream(device)))

    def _copy(self) -> None:
        if self._copied is not None:
            return
        copied: dict[torch.device, Any] = {}
        if not self.is_staged:
            self._copied = copied
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for device, (_, before) in self._before.items():
                _device.accelerator.let_wait(self._fetcher.stream(device), before)
            if self.lent is not None and self._fetcher.lending is not None:
                self.lent.copy(self._fetcher.lending, self._fetcher.stream)
            for target, source in self.sources:
                if _device.accelerator.has(target):
                    _device.accelerator.copy(target, source, self._fetcher.stream(target.device))
                else:
                    target.copy_(source)
            for device in self._before:
                copied[device] = _device.accelerator.record(self._fetcher.stream(device))
            self._copied = copied
            for staged, device in self.staged:
                self._fetcher.staging.give_back(staged, copied.get(device))


def _result(read: "Future[None]") -> None:
    """Waits for the read in waits of 0.1 s. A signal just before such a wait does not end the wait, and its handler
    runs up to 0.1 s later."""
    while True:
        try:
            return read.result(_PERIOD)
        except TimeoutError:
            if read.done():
                return read.result()
