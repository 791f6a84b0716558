"""Fetches under way: weights of units from servers, copies or lent memory to the device, and the streams that wait for them.

:mod:`longshore.units.residency` begins a fetch on the training thread; a device copies on streams of the package.
"""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from longshore.distributed.rounds import Rounds
from longshore.errors import LongshoreError
from longshore.transfer import device as _device
from longshore.transfer.params import DTYPES
from longshore.transfer.pinned import Lending, Run, Staging
from longshore.units.model import Member, Span, Unit


@dataclass(slots=True)
class _Uses:
    """What one device has of a unit."""

    #: The streams that its memory belongs to: what is given up is theirs again at once, whoever still reads it.
    owners: list[Any] = field(default_factory=list)
    #: The streams that have used it, and those that wait for the last of it that came.
    users: list[Any] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)
    #: The streams that ranks have gathered parts of it behind, each with when that is done.
    gathered: list[tuple[Any, Any]] = field(default_factory=list)


class UnitStreams:
    """Orders streams by the units that they share. A caller orders none that only read.

    Args:
        copies: by device, the stream that weights come on.
    """

    def __init__(self, copies: Callable[[torch.device], Any]) -> None:
        self._copies = copies
        self._uses: dict[Unit, dict[torch.device, _Uses]] = {}

    def begin(self, unit: Unit, owners: Mapping[torch.device, Any]) -> None:
        """Weights of a unit come to memory of these streams, by device."""
        for device, owner in owners.items():
            uses = self._uses.setdefault(unit, {}).setdefault(device, _Uses())
            _add(uses.owners, owner)
            uses.shown.clear()

    def gathered(self, unit: Unit) -> None:
        """Ranks gather a unit's weights, and this thread's streams wait for that: others that use the unit will, too."""
        for device, uses in self._uses.get(unit, {}).items():
            current = _device.accelerator.current_stream(device)
            others = [(stream, done) for stream, done in uses.gathered if stream != current]
            uses.gathered = [*others, (current, _device.accelerator.record(current))]

    def use(self, unit: Unit, *, waits: bool) -> None:
        """This thread's streams use a unit from now on. ``waits`` says that they wait for its weights already."""
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
        """Weights of a unit go: what comes next in their memory waits for those who use them."""
        for uses in self._uses.get(unit, {}).values():
            for owner in uses.owners:
                for user in uses.users:
                    if user != owner:
                        _device.accelerator.let_wait(owner, _device.accelerator.record(user))

    def forget(self, unit: Unit) -> None:
        """Nothing of a unit is on a device any more."""
        self._uses.pop(unit, None)


def _wait_for_gathered(uses: _Uses, current: Any) -> None:
    for stream, done in uses.gathered:
        if stream != current:
            _device.accelerator.let_wait(current, done)


def _add(streams: list[Any], stream: Any) -> None:
    if stream not in streams:
        streams.append(stream)


class MappedFetch:
    """What was asked for together.

    Args:
        job: the Rust half's.
        version: of the weights.
        asked: the Rust half's, which will say where they lie.
        parts: where each part lies in the job, and the device's flat memory that it comes to.
    """

    def __init__(self, job: Any, version: int, asked: Any, parts: list[tuple[Span, Tensor]]) -> None:
        self._job, self._version, self._asked, self._parts = job, version, asked, parts
        self._runs: list[list[Run]] | None = None
        self._staged: list[Tensor] = []
        self._fetch: Any = None

    def read(self) -> None:
        """Waits for the weights. Where they came to this process's memory after all, since the link with a server was lost, they are read
        into page-locked memory."""
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
        """Ends the wait of a thread that reads."""
        self._asked.cancel()
        if self._fetch is not None:
            self._fetch.cancel()

    def copy(self, lending: Lending, stream: Callable[[torch.device], Any]) -> None:
        """Gives the copies to the streams of their devices, once the weights were read."""
        targets = [target for _, target in self._parts]
        if self._runs is not None:
            lending.copy(self._asked, self._runs, targets, stream)
            return
        for target, memory in zip(targets, self._staged, strict=True):
            _device.accelerator.copy(target, memory, stream(target.device))
        lending.hold(self._staged, targets, stream)


#: Seconds after which a wait lets the handlers of signals run.
_PERIOD = 0.1


class Source(Protocol):
    """What is asked of a :class:`longshore.units.fetching.Fetcher` here."""

    rounds: Rounds | None
    lending: Lending | None
    staging: Staging
    version: int

    def begin(self, members: list[Member], *, ahead: bool, shared: bool = False) -> "Fetch": ...

    def stream(self, device: torch.device) -> Any: ...


class Fetch:
    """Weights of some members on their way."""

    def __init__(self, fetcher: Source, members: list[Member]) -> None:
        self.members = members
        #: What waits for them in the background, and what ends that wait.
        self.read: Future[None] | None = None
        self.pull: Any = None
        #: Those that their device copies from servers' memory.
        self.lent: MappedFetch | None = None
        #: What is copied into a member or a part of it when it has come. Staging memory, and the device that it is for.
        self.sources: list[tuple[Tensor, Tensor]] = []
        self.staged: list[tuple[Tensor, torch.device]] = []
        #: Members of which this is a rank's part, with the bytes that ranks gather and how many of them are a part.
        self.shared: list[tuple[Member, Tensor, int]] = []
        self._fetcher = fetcher
        self._copied: dict[torch.device, Any] | None = None
        #: By device: the stream that the memory was allocated for, and what it had to do then with memory that another had before.
        self._before: dict[torch.device, tuple[Any, Any]] = {}
        for device in {member.tensor.device for member in members if _device.accelerator.has(member.tensor)}:
            stream = _device.accelerator.current_stream(device)
            self._before[device] = stream, _device.accelerator.record(stream)

    @property
    def is_staged(self) -> bool:
        """Whether some of it is copied to a device, or to memory of another shape, once it has come."""
        return bool(self.sources or self._before)

    def owners(self) -> dict[torch.device, Any]:
        """By device, the stream that the members' memory belongs to."""
        return {device: stream for device, (stream, _) in self._before.items()}

    def has_come(self) -> bool:
        """Whether all is in the host's memory."""
        return self.read is None or (self.read.done() and not self.read.cancelled() and self.read.exception() is None)

    def advance(self) -> None:
        """Begins to copy to the device what has come by now."""
        if self.is_staged and self.has_come():
            self._copy()

    def finish(self) -> None:
        """Waits until the members can be used by what this thread does next. If that fails, nothing writes to them any more."""
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
        """Waits for this rank's part of a unit, and gathers the others' if all ranks want the same. Else it fetches all of it.

        Args:
            name, place, is_backward: what :meth:`longshore.distributed.rounds.Rounds.agree` says.

        Returns:
            Whether ranks gather it, which this thread's stream waits for and no other one does.
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
        """Fetches all of the members, where this is a rank's part."""
        self.give_up()
        again = self._fetcher.begin(self.members, ahead=False)
        again._before = self._before  # it is the same memory
        again.finish()

    def give_up(self) -> None:
        """Nobody needs the members any more. Nothing writes to them after this."""
        self._end()

    def _end(self) -> None:
        """Ends what still writes to the members, whose memory goes now."""
        for wait_ in (self.pull, self.lent):
            if wait_ is not None:
                wait_.cancel()
        if self.read is not None and not self.read.cancel():
            while not self.read.done():
                # It ends soon. Ctrl-C once more must not free what it writes to.
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
    """Waits for its end. A signal that comes just before a wait does not end that: its handler runs between two waits."""
    while True:
        try:
            return read.result(_PERIOD)
        except TimeoutError:
            if read.done():
                return read.result()
