"""Fetches under way: a unit's weights from servers, copies or lent memory, and the streams that wait for them.

:mod:`longshore.units.residency` begins a fetch on the training thread; a device copies on streams of the package.
"""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from longshore.distributed.gathered import Rounds
from longshore.errors import LongshoreError
from longshore.transfer import device as _device
from longshore.transfer.params import DTYPES
from longshore.transfer.pinned import Lending, Run, Staging
from longshore.units.model import Member, Span, Unit


@dataclass(slots=True)
class _Uses:
    """Uses of a unit on a device."""

    #: Streams that own the unit's memory. Released memory is theirs again at once, even if other streams still read it.
    owners: list[Any] = field(default_factory=list)
    #: Streams that have used the unit, and streams that wait for its latest weights.
    users: list[Any] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)
    #: Streams behind which ranks have gathered the unit, each with the event of the gather's end.
    gathered: list[tuple[Any, Any]] = field(default_factory=list)


class UnitStreams:
    """Orders streams by the units that they share. Streams that only read are not ordered.

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
        job: the Rust half's job.
        version: the weights' version.
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
        lending.hold(self._staged, targets, stream)


#: Seconds after which a wait lets signal handlers run.
_PERIOD = 0.1


class Source(Protocol):
    """The part of :class:`longshore.units.fetching.Fetcher` that this module uses."""

    rounds: Rounds | None
    lending: Lending | None
    staging: Staging
    version: int

    def begin(self, members: list[Member], *, ahead: bool, shared: bool = False) -> "Fetch": ...

    def stream(self, device: torch.device) -> Any: ...


class Fetch:
    """A fetch of some members' weights."""

    def __init__(self, fetcher: Source, members: list[Member]) -> None:
        self.members = members
        #: The background wait for the weights, and the pull that can cancel it.
        self.read: Future[None] | None = None
        self.pull: Any = None
        #: Members that their device copies from servers' memory.
        self.lent: MappedFetch | None = None
        #: Pairs (target, source) to copy once the source has arrived. A target is a member or a part of one.
        self.sources: list[tuple[Tensor, Tensor]] = []
        #: Staging memory, with the device that copies from it.
        self.staged: list[tuple[Tensor, torch.device]] = []
        #: Members of which this fetch brings a rank's part, with the bytes to gather and the size of a part.
        self.shared: list[tuple[Member, Tensor, int]] = []
        self._fetcher = fetcher
        self._copied: dict[torch.device, Any] | None = None
        #: By device, the stream that the memory was allocated for, and its work at that time, which may use the memory's previous tensor.
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
            self._end()
            raise

    def finish_together(self, name: str, place: int, *, is_backward: bool) -> bool:
        """Waits for this rank's part of a unit, and gathers the others if all ranks want the same unit. Otherwise it fetches the whole
        unit.

        Args:
            name, place, is_backward: as in :meth:`longshore.distributed.gathered.Rounds.agree`.

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
            self._end()
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
        """Ends the fetch. Nothing writes to the members afterwards."""
        self._end()

    def _end(self) -> None:
        """Ends all writes to the members, whose memory is released next."""
        for wait_ in (self.pull, self.lent):
            if wait_ is not None:
                wait_.cancel()
        if self.read is not None and not self.read.cancel():
            while not self.read.done():
                # The read ends soon. A second Ctrl-C must not free memory that it writes to.
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
    """Waits for the read. A signal just before a wait does not end the wait: its handler runs between two waits."""
    while True:
        try:
            return read.result(_PERIOD)
        except TimeoutError:
            if read.done():
                return read.result()
