"""Weights of units on their way to where they are used."""

import contextlib
from concurrent.futures import Future, wait
from typing import Any, Protocol

import torch
from torch import Tensor

from longshore import _device
from longshore._lending import Lending
from longshore._rounds import Rounds
from longshore._staging import Staging
from longshore._unit_lent import Lent
from longshore._units import Member
from longshore.errors import LongshoreError

#: Seconds after which a wait lets the handlers of signals run.
_PERIOD = 0.1


class Source(Protocol):
    """What is asked of a :class:`longshore._fetching.Fetcher` here."""

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
        self.lent: Lent | None = None
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
            name, place, is_backward: what :meth:`longshore._rounds.Rounds.agree` says.

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
