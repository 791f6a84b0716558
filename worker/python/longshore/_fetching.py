"""Fetches weights of units: the trained ones from servers, the frozen ones from copies in the host's memory."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from longshore import _device
from longshore._host import Place, is_plain
from longshore._params import DTYPES
from longshore._units import Member


#: Seconds after which a wait lets the handlers of signals run.
_PERIOD = 0.1


class Fetcher:
    """Where weights come from.

    Args:
        job: the Rust half's.
        version: that which the trained parameters have now.
        is_gone: whether servers may not have a parameter's weights of this version any more.
    """

    def __init__(self, job: Any, version: int, members: list[Member], is_gone: Callable[[Member], bool]) -> None:
        self._job = job
        self._version = version
        #: Trained parameters that nobody has read in this version.
        self._unread: set[int] = set()
        self._trained = {member.param.index for member in members if member.param is not None}
        self._frozen = {id(member) for member in members if not member.is_trained}
        self._is_gone = is_gone
        self._kept: dict[int, Tensor] = {}
        self._staging = _Staging()
        self._streams: dict[torch.device, Any] = {}
        # One thread, since weights come in the order in which they were asked for.
        self._thread = ThreadPoolExecutor(1, "longshore-fetch")
        self._is_closed = False
        for member in members:
            if not member.is_trained:
                before = getattr(member.tensor, "_longshore_member", None)
                if before is not None:  # built by Init, which has the copy
                    self._kept[id(member)] = member.tensor._longshore_home.kept(before)  # type: ignore[attr-defined]
                else:
                    self.keep(member)

    def is_gone(self, member: Member) -> bool:
        """Whether its weights cannot be had before the next step."""
        return id(member) not in self._kept and self._is_gone(member)

    def keep(self, member: Member) -> None:
        """Keeps a copy of a member in the host's memory, from which it comes from now on."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            kept = self._kept.get(id(member))
            if kept is None:
                kept = self._kept[id(member)] = self._memory(member.tensor)
            kept.copy_(member.tensor)

    def kept(self, member: Member) -> Tensor:
        """The copy of a member that is kept."""
        return self._kept[id(member)]

    def _memory(self, tensor: Tensor) -> Tensor:
        return _host_memory(tensor)

    def expect(self, version: int) -> None:
        """New weights were asked for, of all trained parameters."""
        self._version = version
        self._unread = set(self._trained)

    def belong_to(self, job: Any) -> None:
        """Weights come from this job from now on: trained ones that were kept, and those that were asked for, are the old one's."""
        self._job = job
        self._unread.clear()
        self._kept = {key: kept for key, kept in self._kept.items() if key in self._frozen}

    def has_unread(self, member: Member) -> bool:
        """Whether new weights of it were asked for and nobody has read them."""
        return member.param is not None and member.param.index in self._unread

    def begin(self, members: list[Member], *, ahead: bool) -> "Fetch":
        """Begins to fetch into these members' memory, in the background if that is ahead of their use."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            fetch = Fetch(self, members)
            places = self._places(fetch)
        if not places:
            return fetch
        version = self._version
        pull = self._job.fetch(version, [place for place, _ in places])

        # It holds the tensors of the places, whose memory stays as long as something may write there.
        def read(held: list[tuple[Place, Tensor]] = places) -> None:
            pull.read()
            if version == self._version:
                self._unread.difference_update(place[0] for place, _ in held)

        if ahead and not self._is_closed:
            fetch.pull = pull
            fetch.read = self._thread.submit(read)
        else:
            read()
        return fetch

    def keep_all(self, members: list[Member]) -> None:
        """Copies all trained parameters from the servers, since these will not be there."""
        kept: dict[int, Tensor] = {}
        for member in members:
            if member.param is not None and id(member) not in self._kept:
                kept[id(member)] = _host_memory(member.tensor)
                self._job.fetch(self._version, [_place(member, kept[id(member)])]).read()
        self._unread.clear()
        self._kept |= kept

    def retire(self) -> None:
        """Gives the thread nothing more. It ends with the model."""
        self._is_closed = True

    def close(self) -> None:
        """Ends the thread. Weights that are in the host's memory are fetched as before."""
        self.retire()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _places(self, fetch: "Fetch") -> list[tuple[Place, Tensor]]:
        """Where servers' weights go in the host's memory, and the tensors whose memory that is."""
        places: list[tuple[Place, Tensor]] = []
        for member in fetch.members:
            kept = self._kept.get(id(member))
            if kept is not None:
                fetch.sources.append((member, kept))
            elif is_plain(member.tensor):
                places.append((_place(member, member.tensor), member.tensor))
            else:
                staged = self._staging.take(member)
                fetch.sources.append((member, staged))
                fetch.staged.append((member, staged))
                places.append((_place(member, staged), staged))
        return places

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = _device.accelerator.new_stream(device)
        return self._streams[device]


class Fetch:
    """Weights of some members on their way."""

    def __init__(self, fetcher: Fetcher, members: list[Member]) -> None:
        self.members = members
        #: What waits for them in the background, and what ends that wait.
        self.read: Future[None] | None = None
        self.pull: Any = None
        #: What is copied into a member when it has come, and which of that is staging memory.
        self.sources: list[tuple[Member, Tensor]] = []
        self.staged: list[tuple[Member, Tensor]] = []
        self._fetcher = fetcher
        self._copied: dict[torch.device, Any] | None = None
        #: By device: what it had to do when the memory was allocated, which another may have had before.
        self._before: dict[torch.device, Any] = {}
        for device in {member.tensor.device for member in members if _device.accelerator.has(member.tensor)}:
            self._before[device] = _device.accelerator.record(_device.accelerator.current_stream(device))

    def has_come(self) -> bool:
        """Whether all is in the host's memory."""
        return self.read is None or (self.read.done() and not self.read.cancelled() and self.read.exception() is None)

    def advance(self) -> None:
        """Begins to copy to the device what has come by now."""
        if self.has_come():
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

    def give_up(self) -> None:
        """Nobody needs the members any more. Nothing writes to them after this."""
        self._end()

    def _end(self) -> None:
        """Ends what still writes to the members, whose memory goes now."""
        if self.pull is not None:
            self.pull.cancel()
        if self.read is not None and not self.read.cancel():
            while not self.read.done():
                # It ends soon. Ctrl-C once more must not free what it writes to.
                with contextlib.suppress(KeyboardInterrupt):
                    wait([self.read])
        for device in self._before:
            copies = _device.accelerator.record(self._fetcher._stream(device))
            _device.accelerator.let_wait(_device.accelerator.current_stream(device), copies)

    def _copy(self) -> None:
        if self._copied is not None:
            return
        copied: dict[torch.device, Any] = {}
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for device, before in self._before.items():
                _device.accelerator.let_wait(self._fetcher._stream(device), before)
            for member, source in self.sources:
                # Not through the parameter itself: autograd would take that for a change.
                target = member.tensor.data
                if _device.accelerator.has(target):
                    _device.accelerator.copy(target, source, self._fetcher._stream(target.device))
                else:
                    target.copy_(source)
            for device in self._before:
                copied[device] = _device.accelerator.record(self._fetcher._stream(device))
            self._copied = copied
            for member, staged in self.staged:
                self._fetcher._staging.give_back(staged, copied.get(member.tensor.device))


def _result(read: "Future[None]") -> None:
    """Waits for its end. A signal that comes just before a wait does not end that: its handler runs between two waits."""
    while True:
        try:
            return read.result(_PERIOD)
        except TimeoutError:
            if read.done():
                return read.result()


class _Staging:
    """Host memory that weights go through: what was used once is used again for others of the same size."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, bool], list[tuple[Tensor, Any]]] = {}

    def take(self, member: Member) -> Tensor:
        free = self._free.get(_kind(member.tensor.shape, member.tensor.dtype, _device.accelerator.has(member.tensor)))
        if not free:
            return _host_memory(member.tensor)
        staged, copied = free.pop(0)
        if copied is not None:
            _device.accelerator.wait(copied)
        return staged

    def give_back(self, staged: Tensor, copied: Any) -> None:
        """``copied`` is the event after the last copy that reads it."""
        kind = _kind(staged.shape, staged.dtype, copied is not None)
        self._free.setdefault(kind, []).append((staged, copied))


def _kind(shape: torch.Size, dtype: torch.dtype, is_locked: bool) -> tuple[torch.Size, torch.dtype, bool]:
    return shape, dtype, is_locked


def _host_memory(tensor: Tensor) -> Tensor:
    """Memory of the host for such a tensor, page-locked where a device copies from it."""
    if _device.accelerator.has(tensor):
        return _device.accelerator.locked(tensor.shape, tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _place(member: Member, memory: Tensor) -> Place:
    assert member.param is not None
    return member.param.index, memory.data_ptr(), member.param.elements, DTYPES[memory.dtype]
