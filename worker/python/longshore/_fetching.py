"""Fetches weights of units: trained ones from servers, frozen ones from what is kept of them in the host's memory."""

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from longshore import _device
from longshore._copies import Copies, share_of
from longshore._gathered import Share
from longshore._host import Place, is_plain
from longshore._params import are_equal
from longshore._rounds import Rounds
from longshore._staging import Staging, host_memory
from longshore._unit_spans import Spans, in_one_piece, places_of
from longshore._units import Member
from longshore.errors import LongshoreError

#: Seconds after which a wait lets the handlers of signals run.
_PERIOD = 0.1


class Fetcher:
    """Where weights come from.

    Args:
        job: the Rust half's.
        version: that which the trained parameters have now.
        is_gone: whether servers may not have a parameter's weights of this version any more.
        spans: where elements of a parameter lie in the job.
        rounds: in which ranks that gather weights say what they want; None where each pulls all of them.
        memory: makes the memory in which a tensor is kept.
        amends: whether trained weights are amended as they come. The step that computes with them begins before that.

    Attributes:
        version, rounds: these.
        is_at_hand: whether what came last was one copy from a server's memory to where it is used. Then nothing is won by fetching
            ahead: on two cores the other thread that this takes made a step 4 % longer.
        pulled: bytes of weights that servers were asked for.
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
        amends: bool = False,
    ) -> None:
        self._job = job
        self._amends = amends
        self.version = version
        self.pulled = 0
        self._spans = spans
        self.rounds = rounds
        #: Trained parameters that nobody has read in this version.
        self._unread: set[int] = set()
        self._trained = {member.param.index for member in members if member.param is not None}
        self._frozen = {id(member) for member in members if not member.is_trained}
        self._is_gone = is_gone
        self._copies = Copies(rounds, memory)
        self._staging = Staging()
        self._streams: dict[torch.device, Any] = {}
        # One thread, since weights come in the order in which they were asked for.
        self._thread = ThreadPoolExecutor(1, "longshore-fetch")
        self.is_at_hand = False
        self._is_closed = False
        for member in members:
            if not member.is_trained:
                self._copies.take(member)

    def is_gone(self, member: Member) -> bool:
        """Whether its weights cannot be had before the next step."""
        return self._copies.whole(member) is None and self._is_gone(member)

    def keep(self, member: Member) -> None:
        """Keeps a copy of a member in the host's memory, from which it comes from now on."""
        self._copies.write(member)

    def written(self) -> list[str]:
        """The frozen members that are not what servers have of them, as far as this rank's part of them shows."""
        names = []
        for member, parts in self._copies.in_parts():
            theirs = [(torch.empty(part.shape, dtype=part.dtype, device="cpu"), start) for part, start in parts]
            self._ask([place for part, start in theirs for place in places_of(self._spans, member, part, start)]).read()
            if not all(are_equal(mine, its) for (mine, _), (its, _) in zip(parts, theirs, strict=True)):
                names.append(member.name)
        return names

    def read_first(self, wanted: list[tuple[Member, Tensor]]) -> None:
        """Reads the first elements of members from the servers, into flat memory of the host."""
        self._begin_step()
        self._job.fetch(self.version, [place for member, memory in wanted for place in places_of(self._spans, member, memory, 0)]).read()

    def take_all_of(self, names: Iterable[str]) -> None:
        """Keeps all of these frozen members as they are, instead of a part. It is called before their memory goes."""
        self._copies.take_all_of(names)

    def read_frozen(self, members: list[Member]) -> None:
        """Reads what is kept of these frozen members from the servers, whose job may be another now."""
        for member in members:
            self._copies.forget_written(member)
            parts = self._copies.parts(member) or [(self.kept(member), 0)]
            self._ask([place for part, start in parts for place in places_of(self._spans, member, part, start)]).read()

    def kept(self, member: Member) -> Tensor:
        """The copy of a member that is kept."""
        kept = self._copies.whole(member)
        assert kept is not None, member.name
        return kept

    def expect(self, version: int) -> None:
        """New weights were asked for, of all trained parameters."""
        self.version = version
        self._unread = set(self._trained)

    def belong_to(self, job: Any) -> None:
        """Weights come from this job from now on: trained ones that were kept, and those that were asked for, are the old one's."""
        self._job = job
        self._unread.clear()
        self._copies.forget_all_but(self._frozen)

    def has_unread(self, member: Member) -> bool:
        """Whether new weights of it were asked for and nobody has read them."""
        return member.param is not None and member.param.index in self._unread

    def begin(self, members: list[Member], *, ahead: bool, shared: bool = False) -> "Fetch":
        """Begins to fetch into these members' memory, in the background if that is ahead of their use. Where ranks share, it
        fetches this rank's part of those that are worth it."""
        with torch._C.DisableTorchFunctionSubclass():
            fetch = Fetch(self, members)
            places = self._places(fetch, shared)
        if not places:
            return fetch
        if any(member.is_trained for member in members):
            self._begin_step()
        version = self.version
        pull = self._ask([place for place, _ in places])

        # It holds the tensors of the places, whose memory stays as long as something may write there.
        def read(held: list[tuple[tuple[Place, int], Tensor]] = places) -> None:
            pull.read()
            if version == self.version:
                self._unread.difference_update(member.param.index for member in members if member.param is not None)

        self.is_at_hand = pull.is_lent and not fetch.is_staged and self.rounds is None
        if ahead and not self._is_closed:
            fetch.pull = pull
            fetch.read = self._thread.submit(read)
        else:
            read()
        return fetch

    def gather_all(self, members: list[Member]) -> None:
        """Keeps all of these, which ranks gather from each other in the host's memory, each with its part. What is small,
        and what cannot be gathered since a rank is gone, is left out. A copy that was kept whole before stays the one that is kept."""
        if self.rounds is None or self.rounds.is_over:
            return
        # These are the same on all ranks, also where one has a copy of what it has written.
        with torch._C.DisableTorchFunctionSubclass():
            shares = [(member, share_of(self.rounds, member.tensor)) for member in members]
            shared = [(m, of_rank) for m, of_rank in shares if of_rank and (m.is_trained or self._copies.parts(m) is not None)]
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
                self._copies.add({id(member): whole for whole, (member, _) in zip(kept, shared, strict=True)})

    def _read_own(self, member: Member, whole: Tensor, of_rank: Share) -> None:
        """Brings this rank's part of a member into memory for all of it."""
        own = [(whole[start : start + elements], start) for start, elements in of_rank.own]
        mine = self._copies.parts(member)
        if mine is None:
            self._ask([place for part, start in own for place in places_of(self._spans, member, part, start)]).read()
        else:
            for (part, _), (source, _) in zip(own, mine, strict=True):
                part.copy_(source)

    def keep_all(self, members: list[Member]) -> None:
        """Copies from the servers, which will not be there, what is not kept whole of these. Nothing is gathered from now on."""
        self._copies.end_parts()
        self.rounds = None
        kept: dict[int, Tensor] = {}
        for member in members:
            if self._copies.whole(member) is None:
                self._begin_step()
                with torch._C.DisableTorchFunctionSubclass():
                    kept[id(member)] = host_memory(member.tensor)
                self._ask(places_of(self._spans, member, kept[id(member)], 0)).read()
        self._unread.clear()
        self._copies.add(kept)

    def retire(self) -> None:
        """Gives the thread nothing more. It ends with the model."""
        self._is_closed = True

    def close(self) -> None:
        """Ends the thread. Weights that are in the host's memory are fetched as before."""
        self.retire()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin_step(self) -> None:
        """Has the step in hand begin, if it has not and weights are amended for it: that is known once the step before is decided."""
        if self._amends:
            self._job.loss_scale()  # which is that of this step

    def _ask(self, places: list[tuple[Place, int]]) -> Any:
        self.pulled += sum(elements * (4 if wire == "fp32" else 2) for (_, _, elements, wire), _ in places)
        return self._job.fetch(self.version, places)

    def _places(self, fetch: "Fetch", shared: bool) -> list[tuple[tuple[Place, int], Tensor]]:
        """Where servers' weights go in the host's memory, and the tensors whose memory that is."""
        places: list[tuple[tuple[Place, int], Tensor]] = []
        for member in fetch.members:
            kept = self._copies.whole(member)
            if kept is None and not shared and is_plain(member.tensor):
                places += [(place, member.tensor) for place in places_of(self._spans, member, member.tensor, 0)]
                continue
            # Not the parameter itself: autograd would take what is written there for a change.
            target = member.tensor.data
            if kept is not None:
                fetch.sources.append((target, kept))
                continue
            parts = self._share_of(fetch, member, target) if shared else [(target, 0)]
            mine = self._copies.parts(member) if shared else None
            if mine is not None:
                fetch.sources += [(part, own) for (part, _), (own, _) in zip(parts, mine, strict=True)]
                continue
            for part, start in parts:
                memory = part
                if not is_plain(part):
                    memory = self._staging.take(part)
                    fetch.sources.append((part, memory))
                    fetch.staged.append((memory, part.device))
                places += [(place, memory) for place in places_of(self._spans, member, memory, start)]
        return places

    def _share_of(self, fetch: "Fetch", member: Member, target: Tensor) -> list[tuple[Tensor, int]]:
        """The memory that this rank fills of a member before ranks gather it, and its first elements."""
        of_rank = share_of(self.rounds, target)
        if of_rank is None:
            return [(target, 0)]
        flat = target.view(-1)
        fetch.shared.append((member, flat[: of_rank.gathered].view(torch.uint8), of_rank.part * target.element_size()))
        return [(flat[start : start + elements], start) for start, elements in of_rank.own]

    def stream(self, device: torch.device) -> Any:
        """The stream that weights come to a device on."""
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
        if self.pull is not None:
            self.pull.cancel()
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
            for target, source in self.sources:
                if _device.accelerator.has(target):
                    _device.accelerator.copy(target, source, self._fetcher.stream(target.device))
                else:
                    target.copy_(source)
            for device in self._before:
                copied[device] = _device.accelerator.record(self._fetcher.stream(device))
            self._copied = copied
            for staged, device in self.staged:
                self._fetcher._staging.give_back(staged, copied.get(device))


def _result(read: "Future[None]") -> None:
    """Waits for its end. A signal that comes just before a wait does not end that: its handler runs between two waits."""
    while True:
        try:
            return read.result(_PERIOD)
        except TimeoutError:
            if read.done():
                return read.result()
