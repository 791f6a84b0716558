"""Sources of units' weights: servers for trained ones, copies in the host's memory for frozen ones.

A model in units has one :class:`Fetcher`. Copies hold frozen weights, a rank's part of these, and all weights once no server will be there.
"""

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from longshore.distributed.gathered import Share, share
from longshore.distributed.rounds import Rounds
from longshore.errors import LongshoreError
from longshore.transfer import device as _device
from longshore.transfer import tensors
from longshore.transfer.gradients import Place, is_plain
from longshore.transfer.params import are_equal
from longshore.transfer.pinned import Lending, Staging, host_memory
from longshore.units.fetch import Fetch, MappedFetch
from longshore.units.model import Member, Span, Spans, in_one_piece, parts_of, places_of


class Copies:
    """What is kept of the members of a model, so that servers need not be asked for it.

    Args:
        rounds: in which ranks that gather weights say what they want; None where each has all of what it keeps.
        memory: makes memory for a tensor.
    """

    def __init__(self, rounds: Rounds | None, memory: Callable[[Tensor], Tensor]) -> None:
        self._rounds = rounds
        self._memory = memory
        self._whole: dict[int, Tensor] = {}
        #: By frozen member whose other parts come from other ranks: it, and what this rank keeps of it, each piece with its first
        #: element.
        self._parts: dict[int, tuple[Member, list[tuple[Tensor, int]]]] = {}

    def take(self, member: Member) -> None:
        """Keeps a frozen member: this rank's part alone, where servers and the other ranks have the rest."""
        copy = tensors.built(member.tensor)
        if member.kept is not None and share_of(self._rounds, member.tensor) is not None:
            self._take_part(member, member.tensor if copy is None else copy)
        elif copy is not None:
            self._whole[id(member)] = copy
        else:
            self.write(member)

    def write(self, member: Member) -> None:
        """Keeps all of a member as it is now, from which it comes from now on."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            kept = self._whole.get(id(member))
            if kept is None:
                kept = self._whole[id(member)] = self._memory(member.tensor)
            kept.copy_(member.tensor)

    def _take_part(self, member: Member, weights: Tensor) -> None:
        of_rank = share_of(self._rounds, weights)
        assert of_rank is not None
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            flat = weights.reshape(-1)
            parts = [(flat[start : start + elements], start) for start, elements in of_rank.own]
            self._parts[id(member)] = member, [(self._memory(part).copy_(part), start) for part, start in parts]

    def take_all_of(self, names: Iterable[str]) -> None:
        """Keeps all of these frozen members instead of a part, before their memory goes."""
        wanted = set(names)
        for key, (member, _) in list(self._parts.items()):
            if member.name in wanted:
                del self._parts[key]
                copy = tensors.built(member.tensor)
                if copy is None:
                    self.write(member)
                else:
                    self._whole[key] = copy

    def whole(self, member: Member) -> Tensor | None:
        """All of a member, where that is kept."""
        return self._whole.get(id(member))

    def parts(self, member: Member) -> list[tuple[Tensor, int]] | None:
        """The pieces that this rank keeps of a member, each with its first element, where it keeps a part."""
        found = self._parts.get(id(member))
        return None if found is None else found[1]

    def in_parts(self) -> list[tuple[Member, list[tuple[Tensor, int]]]]:
        """The members of which this rank keeps a part, the same ones on all ranks, and these parts."""
        return list(self._parts.values())

    def forget_written(self, member: Member) -> None:
        """Lets go of what somebody wrote to a member of which a part is kept."""
        if id(member) in self._parts:
            self._whole.pop(id(member), None)

    def forget_all_but(self, members: set[int]) -> None:
        """Lets go of what is kept whole of any other members than these, by ``id``."""
        self._whole = {key: kept for key, kept in self._whole.items() if key in members}

    def add(self, whole: dict[int, Tensor]) -> None:
        """Has these members, by ``id``, come from these copies. What somebody wrote to one stays."""
        self._whole = whole | self._whole

    def end_parts(self) -> None:
        """Has no member come from a part any more."""
        self._parts.clear()


def share_of(rounds: Rounds | None, target: Tensor) -> Share | None:
    """What this rank has to bring of a member before ranks gather it; None where it is all of it."""
    if rounds is None or not target.is_contiguous():
        return None
    return share(target.numel(), target.element_size(), rounds.rank, rounds.world_size)


class Fetcher:
    """Where weights come from.

    Args:
        job: the Rust half's.
        version: that which the trained parameters have now.
        is_gone: whether servers may not have a parameter's weights of this version any more.
        spans: where elements of a parameter lie in the job.
        rounds: in which ranks that gather weights say what they want; None where each pulls all of them.
        memory: makes the memory in which a tensor is kept.
        lending: what servers lend of their memory, for a device to copy weights from; None where they come to this process's first.

    Attributes:
        version, rounds, lending: these.
        staging: memory that weights go through on their way to a device.
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
        lending: Lending | None = None,
    ) -> None:
        self._job = job
        self.version = version
        self.pulled = 0
        self._spans = spans
        self.rounds = rounds
        self.lending = lending
        #: Trained parameters that nobody has read in this version.
        self._unread: set[int] = set()
        self._trained = {member.param.index for member in members if member.param is not None}
        self._frozen = {id(member) for member in members if not member.is_trained}
        self._is_gone = is_gone
        self._copies = Copies(rounds, memory)
        self.staging = Staging()
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
        self.lending = None if self.lending is None else self.lending.renewed(job)
        self._unread.clear()
        self._copies.forget_all_but(self._frozen)

    def has_unread(self, member: Member) -> bool:
        """Whether new weights of it were asked for and nobody has read them."""
        return member.param is not None and member.param.index in self._unread

    def begin(self, members: list[Member], *, ahead: bool, shared: bool = False) -> Fetch:
        """Begins to fetch into these members' memory, in the background if that is ahead of their use. Where ranks share, it
        fetches this rank's part of those that are worth it."""
        with torch._C.DisableTorchFunctionSubclass():
            fetch = Fetch(self, members)
            lent = self._lent(members)
            fetch.lent = self._lend(lent) if lent else None
            places = self._places(fetch, [] if fetch.lent is None else lent, shared)
        if not places and fetch.lent is None:
            return fetch
        version = self.version
        pull = self._ask([place for place, _ in places]) if places else None

        # It holds the tensors of the places, whose memory stays as long as something may write there.
        def read(held: list[tuple[tuple[Place, int], Tensor]] = places) -> None:
            if fetch.lent is not None:
                fetch.lent.read()
            if pull is not None:
                pull.read()
            if version == self.version:
                self._unread.difference_update(member.param.index for member in members if member.param is not None)

        self.is_at_hand = pull is not None and pull.is_lent and not fetch.is_staged and self.rounds is None
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

    def _ask(self, places: list[tuple[Place, int]]) -> Any:
        self.pulled += sum(elements * (4 if wire == "fp32" else 2) for (_, _, elements, wire), _ in places)
        return self._job.fetch(self.version, places)

    def _lent(self, members: list[Member]) -> list[Member]:
        """Those that a device may copy from servers' memory."""
        lending = self.lending
        if lending is None:
            return []
        return [m for m in members if m.is_trained and self._copies.whole(m) is None and lending.fits(m.tensor)]

    def _lend(self, members: list[Member]) -> MappedFetch | None:
        """Asks for members to be copied from where they lie, if that is servers' memory."""
        parts: list[tuple[Span, Tensor]] = []
        for member in members:
            # Not the parameter itself: autograd would take what is written there for a change.
            left = member.tensor.data.view(-1)
            for part in parts_of(self._spans, member, left.numel()):
                parts.append((part, left[: part[2]]))
                left = left[part[2] :]
        asked = self._job.lend(self.version, [part for part, _ in parts])
        if asked is None:
            return None
        self.pulled += sum(target.nbytes for _, target in parts)
        return MappedFetch(self._job, self.version, asked, parts)

    def _places(self, fetch: Fetch, lent: list[Member], shared: bool) -> list[tuple[tuple[Place, int], Tensor]]:
        """Where servers' weights go in the host's memory, and the tensors whose memory that is; those that are lent go nowhere there."""
        places: list[tuple[tuple[Place, int], Tensor]] = []
        for member in fetch.members:
            if any(member is other for other in lent):
                continue
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
                    memory = self.staging.take(part)
                    fetch.sources.append((part, memory))
                    fetch.staged.append((memory, part.device))
                places += [(place, memory) for place in places_of(self._spans, member, memory, start)]
        return places

    def _share_of(self, fetch: Fetch, member: Member, target: Tensor) -> list[tuple[Tensor, int]]:
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
