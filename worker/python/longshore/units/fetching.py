"""Units' weights from their sources: servers for trained ones, copies in the host's memory for frozen ones.

A model in units has one :class:`Fetcher`. :mod:`longshore.units.residency` has it begin each :class:`Fetch`, and a device copies on streams of
the package. :class:`Copies` hold frozen weights, a rank's part of these, and at the end all weights, when servers are gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longshore.errors import LongshoreError, UsageError
from longshore.transfer import device as _device
from longshore.transfer import tensors
from longshore.transfer.device import is_plain
from longshore.transfer.params import DTYPES, Place, are_equal
from longshore.transfer.partitions import Share, share
from longshore.transfer.pinned import Lending, Run, Staging, host_memory
from longshore.units.model import Member, Span, Spans, in_one_piece, places_of

if TYPE_CHECKING:
    from longshore.units.rounds import Rounds

#: Seconds between two times at which a wait lets signal handlers run.
_PERIOD = 0.1


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

    def copy(self, lending: Lending, streams: _device.Streams) -> None:
        """Enqueues the copies on their devices' streams, after :meth:`read`."""
        targets = [target for _, target in self._parts]
        if self._runs is not None:
            lending.copy(self._asked, self._runs, targets, streams)
            return
        for target, memory in zip(targets, self._staged, strict=True):
            _device.accelerator.copy(target, memory, streams[target.device])
        lending.hold(None, self._staged, targets, streams)


class Fetch:
    """A fetch of some members' weights."""

    def __init__(self, fetcher: Fetcher, members: list[Member]) -> None:
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
            _device.accelerator.let_wait(owner, _device.accelerator.record(self._fetcher.streams[device]))

    def _copy(self) -> None:
        if self._copied is not None:
            return
        copied: dict[torch.device, Any] = {}
        if not self.is_staged:
            self._copied = copied
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for device, (_, before) in self._before.items():
                _device.accelerator.let_wait(self._fetcher.streams[device], before)
            if self.lent is not None and self._fetcher.lending is not None:
                self.lent.copy(self._fetcher.lending, self._fetcher.streams)
            for target, source in self.sources:
                if _device.accelerator.has(target):
                    _device.accelerator.copy(target, source, self._fetcher.streams[target.device])
                else:
                    target.copy_(source)
            for device in self._before:
                copied[device] = _device.accelerator.record(self._fetcher.streams[device])
            self._copied = copied
            for staged, device in self.staged:
                self._fetcher.staging.give_back(staged, copied.get(device))


def _result(read: Future[None]) -> None:
    """Waits for the read in waits of 0.1 s. A signal just before such a wait does not end the wait, and its handler
    runs up to 0.1 s later."""
    while True:
        try:
            return read.result(_PERIOD)
        except TimeoutError:
            if read.done():
                return read.result()


class Copies:
    """Members' weights on the host, which need no fetch from servers.

    Args:
        rounds: the rounds in which ranks agree on gathers; None if each rank keeps whole weights.
        memory: returns memory for a tensor.
    """

    def __init__(self, rounds: Rounds | None, memory: Callable[[Tensor], Tensor]) -> None:
        self._rounds = rounds
        self._memory = memory
        #: Whole copies, by the member's ``id``.
        self.wholes: dict[int, Tensor] = {}
        #: Frozen members that ranks keep in parts, by the member's ``id``. The members are the same on all ranks. Each
        #: has this rank's pieces with the index of their first elements.
        self.shares: dict[int, tuple[Member, list[tuple[Tensor, int]]]] = {}

    def take(self, member: Member) -> None:
        """Keeps a frozen member. A rank keeps only its part if servers and the other ranks have the rest."""
        of_rank = share_of(self._rounds, member.tensor) if member.kept is not None else None
        if of_rank is None:
            self._take_whole(member)
            return
        copy = tensors.built(member.tensor)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            flat = (member.tensor if copy is None else copy).reshape(-1)
            parts = [(flat[start : start + elements], start) for start, elements in of_rank.own]
            self.shares[id(member)] = member, [(self._memory(part).copy_(part), start) for part, start in parts]

    def _take_whole(self, member: Member) -> None:
        copy = tensors.built(member.tensor)
        if copy is None:
            self.write(member)
        else:
            self.wholes[id(member)] = copy

    def write(self, member: Member) -> None:
        """Keeps a whole copy of a member's current weights, which serves its later fetches."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            kept = self.wholes.get(id(member))
            if kept is None:
                kept = self.wholes[id(member)] = self._memory(member.tensor)
            kept.copy_(member.tensor)

    def take_all_of(self, names: Iterable[str]) -> None:
        """Keeps whole copies of frozen members instead of parts, before their memory is released."""
        wanted = set(names)
        for key, (member, _) in list(self.shares.items()):
            if member.name in wanted:
                del self.shares[key]
                self._take_whole(member)

    def whole(self, member: Member) -> Tensor | None:
        """Returns a member's whole copy; None without one."""
        return self.wholes.get(id(member))

    def parts(self, member: Member) -> list[tuple[Tensor, int]] | None:
        """Returns this rank's pieces of a member with the first element of each; None unless it keeps a part."""
        found = self.shares.get(id(member))
        return None if found is None else found[1]

    def add(self, whole: dict[int, Tensor]) -> None:
        """Adds whole copies by the member's ``id``. An existing copy, which may have been written, wins."""
        self.wholes = whole | self.wholes


def share_of(rounds: Rounds | None, target: Tensor) -> Share | None:
    """Returns this rank's part of a member for a gather; None if the rank fetches all of it."""
    if rounds is None or not target.is_contiguous():
        return None
    return share(target.numel(), target.element_size(), rounds.rank, rounds.world_size)


class Fetcher:
    """Fetches weights from servers, copies or other ranks.

    Args:
        version: the trained parameters' current version.
        is_gone: returns whether servers may have overwritten a parameter's weights of this version.
        spans: returns the spans of a parameter's elements in the job.
        rounds: the rounds in which ranks agree on gathers; None if each rank pulls whole weights.
        memory: returns memory for a tensor's copy.
        lending: servers' memory that a device copies weights from; None if weights arrive in this process's memory first.

    Attributes:
        version, rounds, lending: as above.
        staging: host memory that weights pass through on their way to a device.
        is_at_hand: whether the last fetch was one copy from a server's memory to its target. Prefetch wins nothing then: on two cores its
            extra thread made a step 4 % longer.
        pulled: bytes of weights requested from servers.
    """

    def __init__(
        self,
        job: Any,
        version: int,
        members: list[Member],
        is_gone: Callable[[Member], bool],
        spans: Spans = in_one_piece,
        rounds: Rounds | None = None,
        memory: Callable[[Tensor], Tensor] = host_memory,
        lending: Lending | None = None,
    ) -> None:
        self._job = job
        self._process = os.getpid()
        self.version = version
        self.pulled = 0
        self._spans = spans
        self.rounds = rounds
        self.lending = lending
        #: Trained parameters whose weights of this version are not read yet. No gradient can come from these.
        self.unread: set[int] = set()
        self._trained = {member.param.index for member in members if member.param is not None}
        self._frozen = {id(member) for member in members if not member.is_trained}
        self._is_gone = is_gone
        #: Weights that need no fetch from servers.
        self.copies = Copies(rounds, memory)
        self.staging = Staging()
        #: The devices' streams for arriving weights.
        self.streams = _device.Streams()
        # A single thread, so that weights are read in the order of their requests.
        self._thread = ThreadPoolExecutor(1, "longshore-fetch")
        self.is_at_hand = False
        self._is_closed = False
        for member in members:
            if not member.is_trained:
                self.copies.take(member)

    def is_gone(self, member: Member) -> bool:
        """Returns whether servers may have overwritten the member's weights, so that they cannot be fetched until the
        next step."""
        return self.copies.whole(member) is None and self._is_gone(member)

    def keep(self, member: Member) -> None:
        """Keeps a copy of a member in the host's memory, which serves its later fetches."""
        self.copies.write(member)

    def written(self) -> list[str]:
        """Returns the frozen members that differ from the servers' weights, judged by this rank's part."""
        names = []
        for member, parts in self.copies.shares.values():
            theirs = [(_device.host_empty(part.shape, part.dtype), start) for part, start in parts]
            self._ask([place for part, start in theirs for place in places_of(self._spans, member, part, start)]).read()
            if not all(are_equal(mine, its) for (mine, _), (its, _) in zip(parts, theirs, strict=True)):
                names.append(member.name)
        return names

    def read_frozen(self, members: list[Member]) -> None:
        """Reads the kept copies or parts of frozen members from the servers, whose job may have changed."""
        for member in members:
            if id(member) in self.copies.shares:
                self.copies.wholes.pop(id(member), None)
            parts = self.copies.parts(member) or [(self.kept(member), 0)]
            self._ask([place for part, start in parts for place in places_of(self._spans, member, part, start)]).read()

    def kept(self, member: Member) -> Tensor:
        """Returns a member's kept copy."""
        kept = self.copies.whole(member)
        assert kept is not None, member.name
        return kept

    def expect(self, version: int) -> None:
        """Marks all trained parameters unread, since new weights were requested."""
        self.version = version
        self.unread.update(self._trained)

    def belong_to(self, job: Any) -> None:
        """Switches to another job: kept copies of trained weights and open requests belong to the old one."""
        self._job = job
        self.lending = None if self.lending is None else self.lending.renewed(job)
        self.unread.clear()
        self.copies.wholes = {key: kept for key, kept in self.copies.wholes.items() if key in self._frozen}

    def begin(self, members: list[Member], *, ahead: bool, shared: bool = False) -> Fetch:
        """Begins a fetch into the members' memory, on the background thread if it is ``ahead`` of their use. With ``shared`` it fetches
        only this rank's part of members large enough to gather."""
        with torch._C.DisableTorchFunctionSubclass():
            fetch = Fetch(self, members)
            lent = self._lent(members)
            if lent:
                self._check_process()
            fetch.lent = self._lend(lent) if lent else None
            places = self._places(fetch, [] if fetch.lent is None else lent, shared)
        if not places and fetch.lent is None:
            return fetch
        version = self.version
        pull = self._ask([place for place, _ in places]) if places else None

        # The default argument keeps the places' tensors alive while the pull may write into their memory.
        def read(held: list[tuple[tuple[Place, int], Tensor]] = places) -> None:
            if fetch.lent is not None:
                fetch.lent.read()
            if pull is not None:
                pull.read()
            if version == self.version:
                self.unread.difference_update(member.param.index for member in members if member.param is not None)

        self.is_at_hand = pull is not None and pull.is_lent and not fetch.is_staged and self.rounds is None
        if ahead and not self._is_closed:
            fetch.pull = pull
            fetch.read = self._thread.submit(read)
        else:
            read()
        return fetch

    def gather_all(self, members: list[Member]) -> None:
        """Keeps copies of all members, gathered among ranks in the host's memory. Each rank brings its part.

        Small members are left out, and all if a rank is gone. An existing whole copy is kept."""
        if self.rounds is None or self.rounds.is_over:
            return
        # A member with an existing copy is gathered too. Only some ranks may have a copy, and all need the same list.
        with torch._C.DisableTorchFunctionSubclass():
            shares = [(member, share_of(self.rounds, member.tensor)) for member in members]
            shared = [(m, of_rank) for m, of_rank in shares if of_rank and (m.is_trained or self.copies.parts(m) is not None)]
            kept = [host_memory(member.tensor) for member, _ in shared]
        try:
            for whole, (member, of_rank) in zip(kept, shared, strict=True):
                self._read_own(member, whole.view(-1), of_rank)
        except BaseException:
            self.rounds.fail()
            raise
        with contextlib.suppress(LongshoreError), self.rounds.last():
            if self.rounds.end([self.version, *(member.name for member, _ in shared)]):
                bytes_of = [whole.view(-1)[: of_rank.gathered].view(torch.uint8) for whole, (_, of_rank) in zip(kept, shared, strict=True)]
                parts = [of_rank.part * whole.element_size() for whole, (_, of_rank) in zip(kept, shared, strict=True)]
                self.rounds.gather(list(zip(bytes_of, parts, strict=True)), on_host=True)
                self.copies.add({id(member): whole for whole, (member, _) in zip(kept, shared, strict=True)})

    def _read_own(self, member: Member, whole: Tensor, of_rank: Share) -> None:
        """Reads this rank's part of a member into memory for all of it."""
        own = [(whole[start : start + elements], start) for start, elements in of_rank.own]
        mine = self.copies.parts(member)
        if mine is None:
            self._ask([place for part, start in own for place in places_of(self._spans, member, part, start)]).read()
        else:
            for (part, _), (source, _) in zip(own, mine, strict=True):
                part.copy_(source)

    def keep_all(self, members: list[Member]) -> None:
        """Copies all members without a whole copy from the servers, which end next. Nothing is gathered afterwards."""
        self.copies.shares.clear()
        self.rounds = None
        kept: dict[int, Tensor] = {}
        for member in members:
            if self.copies.whole(member) is None:
                with torch._C.DisableTorchFunctionSubclass():
                    kept[id(member)] = host_memory(member.tensor)
                self._ask(places_of(self._spans, member, kept[id(member)], 0)).read()
        self.unread.clear()
        self.copies.add(kept)

    def retire(self) -> None:
        """Accepts no further background fetch. The thread ends with the model."""
        self._is_closed = True

    def close(self) -> None:
        """Ends the thread. Weights in the host's memory are fetched as before."""
        self.retire()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check_process(self) -> None:
        """Refuses a fetch in a fork, as of a DataLoader's worker, which has no connection to servers."""
        if self._process != os.getpid():
            raise UsageError(
                "a model in units has its weights in the process that trains, and this process was forked from it: pass num_workers=0 to "
                "the DataLoader that uses the model, or load its state_dict() into a model of your own before the fork"
            )

    def _ask(self, places: list[tuple[Place, int]]) -> Any:
        self._check_process()
        self.pulled += sum(elements * (4 if wire == "fp32" else 2) for (_, _, elements, wire), _ in places)
        return self._job.fetch(self.version, places)

    def _lent(self, members: list[Member]) -> list[Member]:
        """Returns the members that a device may copy from servers' memory."""
        lending = self.lending
        if lending is None:
            return []
        return [m for m in members if m.is_trained and self.copies.whole(m) is None and lending.fits(m.tensor)]

    def _lend(self, members: list[Member]) -> MappedFetch | None:
        """Requests members for a copy straight from servers' memory; None if the weights do not lie there."""
        parts: list[tuple[Span, Tensor]] = []
        for member in members:
            # Weights are written through ``.data``, since autograd would count a write to the parameter as a change.
            left = member.tensor.data.view(-1)
            assert member.param is not None
            for part in self._spans(member.param, 0, left.numel()):
                parts.append((part, left[: part[2]]))
                left = left[part[2] :]
        asked = self._job.lend(self.version, [part for part, _ in parts])
        if asked is None:
            return None
        self.pulled += sum(target.nbytes for _, target in parts)
        return MappedFetch(self._job, self.version, asked, parts)

    def _places(self, fetch: Fetch, lent: list[Member], shared: bool) -> list[tuple[tuple[Place, int], Tensor]]:
        """Returns places in host memory for servers' weights, with the tensors that own the memory. Lent members have none."""
        places: list[tuple[tuple[Place, int], Tensor]] = []
        for member in fetch.members:
            if any(member is other for other in lent):
                continue
            kept = self.copies.whole(member)
            if kept is None and not shared and is_plain(member.tensor):
                places += [(place, member.tensor) for place in places_of(self._spans, member, member.tensor, 0)]
                continue
            # Weights are written through ``.data``, since autograd would count a write to the parameter as a change.
            target = member.tensor.data
            if kept is not None:
                fetch.sources.append((target, kept))
                continue
            parts = self._share_of(fetch, member, target) if shared else [(target, 0)]
            mine = self.copies.parts(member) if shared else None
            if mine is not None:
                fetch.sources += [(part, own) for (part, _), (own, _) in zip(parts, mine, strict=True)]
                continue
            for part, start in parts:
                memory = part
                if not is_plain(part):
                    memory = self.staging.take(part)
                    fetch.sources.append((part, memory))
                    fetch.staged.append((memory, part.device))
                places += [(place, memory) for place in places_of(self._spans, member, memory, start)]
        return places

    def _share_of(self, fetch: Fetch, member: Member, target: Tensor) -> list[tuple[Tensor, int]]:
        """Returns the parts of a member's memory that this rank fills before the gather, each with the index of its
        first element."""
        of_rank = share_of(self.rounds, target)
        if of_rank is None:
            return [(target, 0)]
        flat = target.view(-1)
        fetch.shared.append((member, flat[: of_rank.gathered].view(torch.uint8), of_rank.part * target.element_size()))
        return [(flat[start : start + elements], start) for start, elements in of_rank.own]
