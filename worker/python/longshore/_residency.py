"""Which units' weights are on the device: as many as the budget holds, fetched before their use and in the learned order."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import torch
from torch import Tensor

from longshore import _unit_tensors
from longshore._fetch import Fetch
from longshore._fetching import Fetcher
from longshore._present import Present, check_here, check_same, size
from longshore._unit_nodes import Nodes, is_in_backward
from longshore._unit_order import Order
from longshore._unit_streams import UnitStreams
from longshore._units import Member, Unit
from longshore.errors import ShortageError, UsageError, invalid

#: How many uses ahead units are fetched however large they are. Beyond these it is as many as have this many bytes together, so that small
#: units hide a round trip too; further than so many uses nobody looks.
_AHEAD, _AHEAD_BYTES, _FARTHEST = 4, 64 * 1024 * 1024, 128


class Residency:
    """The units of a model, and what of them is on the device.

    Attributes:
        units: in the model's order.
        room: bytes for weights; None for no limit.
        peak: the most bytes of weights that were on the device; fetched: bytes that came.
        epoch: how often new weights have come for the trained parameters.
    """

    def __init__(self, units: list[Unit], fetcher: Fetcher, room: int | None) -> None:
        self.units = units
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._nbytes = {unit: unit.nbytes for unit in units}
        self.room = room
        self.peak = self.fetched = 0
        self._present = Present()
        self.epoch = 0
        #: Whether the model is being built, so that no server has its weights.
        self.is_building = False
        #: Whether the call that runs may be of training: the outermost one of a module was made with gradients. What it calls may
        #: still be without, as a block of a reentrant checkpoint is.
        self.may_train = True
        #: Under this, what autograd saves of weights is fetched when it is needed. See :mod:`longshore._unit_hooks`.
        self.saving: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        #: Lets go of the units of modules' calls that have ended and that nobody was told of.
        self.unwind: Callable[[], None] = lambda: None
        self._fetcher = fetcher
        self._order = Order()
        self._streams = UnitStreams(fetcher.stream)
        self._under_way: dict[Unit, Fetch] = {}
        self._by_storage = {member.tensor.untyped_storage()._cdata: member for unit in units for member in unit.members}
        self._lock = threading.RLock()
        self._nodes = Nodes(self._lock)

    def begin(self) -> None:
        """Takes over the parameters, and lets go of their weights."""
        for unit in self.units:
            for member in unit.members:
                member.is_here, member.changes = False, member.tensor._version
                member.memory = member.tensor.untyped_storage()
                member.memory.resize_(0)
                _unit_tensors.hide(member.tensor, member, self)

    def adopt(self, unit: Unit) -> None:
        """Takes over one more unit, whose parameters have their weights."""
        self.units.append(unit)
        self._nbytes[unit] = unit.nbytes
        for member in unit.members:
            member.memory, member.changes = member.tensor.untyped_storage(), member.tensor._version
            self._by_storage[member.memory._cdata] = member
            self._fetcher.keep(member)
            _unit_tensors.hide(member.tensor, member, self)
            self._present.add(member)
        self._make_room(0)
        self.peak = max(self.peak, self.here)

    def kept(self, member: Member) -> Tensor:
        """The copy in the host's memory of a frozen member, or of one that no server has yet."""
        return self._fetcher.kept(member)

    def member_of(self, tensor: Tensor) -> Member | None:
        """The member whose memory this is, or is a part of."""
        try:
            return self._by_storage.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors, and others without memory
            return None

    @property
    def here(self) -> int:
        """Bytes of weights on the device now."""
        return self._present.nbytes

    # Uses

    def use(self, unit: Unit, *, alone: bool = False) -> None:
        """Has the unit's weights here, and those that are used next on their way.

        Args:
            alone: the other ranks may not use it now, also where all of them train on the same modules.
        """
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            if not is_in_backward():
                self._nodes.end()
            trains = (unit.module is None or unit.module.training) and (self.may_train or is_in_backward())
            is_next = self._order.note(unit, counts=trains)
            # One rank may evaluate while the others do something else.
            together = trains and not alone
            under_way = self._under_way.pop(unit, None)
            if under_way is None and not self._under_way and not self._fetcher.is_at_hand:
                under_way = self._begin_first(unit, shared=together, ahead_shared=trains)
            if under_way is not None:
                with contextlib.suppress(CancelledError):  # the optimizer was closed, and it comes from elsewhere
                    self._finish(unit, under_way, together)
            missing = self._missing(unit)
            if missing:
                self._make_room(sum(member.nbytes for member in missing), unit)
                self._finish(unit, self._begin_fetch(missing, ahead=False, shared=together), together)
            waits = under_way is not None or bool(missing)
            self._streams.use(unit, waits=waits)
            for fetch in self._under_way.values():
                fetch.advance()
            if (is_next or waits) and not self._fetcher.is_at_hand:
                self._fetch_ahead(shared=trains)

    def pin(self, unit: Unit, *, alone: bool = False) -> None:
        """Has the unit stay, as plain parameters, until it is unpinned as often. ``alone`` is that of :meth:`use`."""
        with self._lock:
            unit.pins += 1
            try:
                self.use(unit, alone=alone)
                check_here(unit.members)
            except BaseException:
                unit.pins -= 1
                raise
            unit.runs += 1
            if unit.runs == 1:
                for member in unit.members:
                    _unit_tensors.show(member.tensor)

    def still_uses(self, units: list[Unit]) -> bool:
        """Whether all of these are here. If so, what this thread's streams do from now on may use them, while they are pinned."""
        if not all(self._present.has_all(unit) for unit in units):
            return False
        with self._lock:
            for unit in units:
                self._streams.use(unit, waits=False)
        return True

    def unpin(self, *units: Unit) -> None:
        """Does so for each of them, whatever :meth:`changed` raises; the first of that is raised."""
        # Callbacks run from the last to the first, and the error of the one that runs last is raised.
        with self._lock, contextlib.ExitStack() as changes:
            for unit in units:
                unit.pins -= 1
                unit.runs -= 1
                for member in unit.members if unit.runs == 0 else ():
                    # Before it is hidden, since torch asks us for whatever it reads of what is.
                    if member.is_here and member.tensor._version != member.changes:
                        changes.callback(self.changed, member)
                    _unit_tensors.hide(member.tensor, member, self)

    @contextlib.contextmanager
    def using(self, members: list[Member]) -> Iterator[None]:
        """Has the units of these stay for an operation of somebody else's."""
        units = list(dict.fromkeys(member.unit for member in members))
        for unit in units:
            unit.pins += 1
        try:
            for unit in units:
                self.use(unit, alone=True)
            check_here(members)
            with self.saving():
                yield
        finally:
            for unit in units:
                unit.pins -= 1

    def give(self, member: Member) -> None:
        """Has a member here for the node of backward that runs, and until that has run."""
        with self._lock:
            self._nodes.give(member.unit)
            self.use(member.unit)
            check_here([member])

    def mark(self, result: Any) -> None:
        """Has views of members be asked for as the members are."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if type(tensor) is Tensor:
                member = self.member_of(tensor)
                if member is not None:
                    _unit_tensors.hide(tensor, member, self)

    def changed(self, member: Member) -> None:
        """Somebody wrote to a member.

        Raises:
            UsageError: where that would be lost.
        """
        member.changes = member.tensor._version
        if not member.is_trained:
            self._fetcher.keep(member)
            return
        if member.is_here:
            self._free(member)
        raise UsageError(
            f"{member.name} of unit {member.unit.name} was changed in place, and its weights are the servers': write to weights before "
            "shard(), or freeze those that you write to"
        )

    # Memory

    def renew(self) -> None:
        """New weights come for the trained parameters: those that are here are old."""
        with self._lock:
            self.unwind()
            self._nodes.end()
            self._order.end()
            self.epoch += 1
            self.give_up_all()  # servers may have let go of the older weights
            for unit in self.units:
                check_same(unit)
                for member in unit.members:
                    if member.is_trained and member.is_here:
                        self._free(member)

    def let_go_of(self, members: list[Member]) -> None:
        """The weights of these are old."""
        with self._lock:
            self.give_up_all()
            for member in members:
                if member.is_here:
                    self._free(member)

    def give_up_all(self) -> None:
        """Gives up what is under way. It is fetched when it is used."""
        with self._lock:
            while self._under_way:
                _, fetch = self._under_way.popitem()
                self._give_up(fetch)

    def release(self) -> None:
        """Lets go of all weights that nothing uses now."""
        with self._lock:
            self.unwind()
            if not is_in_backward():
                self._nodes.end()  # of a backward that raised, which ends nothing itself
            for unit in self.units:
                if unit.pins == 0:
                    self._let_go(unit)

    def _missing(self, unit: Unit) -> list[Member]:
        if self._present.has_all(unit):
            return []
        return [member for member in unit.members if not member.is_here and not self._fetcher.is_gone(member)]

    def _make_room(self, nbytes: int, wanted: Unit | None = None) -> None:
        if self.room is None:
            return
        while self.here + nbytes > self.room:
            free = [unit for unit in self._present.unpinned() if unit is not wanted]
            if not free:
                raise self._shortage(nbytes, wanted)
            self._let_go(max(free, key=self._order.distance))

    def _shortage(self, nbytes: int, wanted: Unit | None) -> Exception:
        pinned = ", ".join(unit.name for unit in self.units if unit.pins and unit is not wanted)
        what = f"unit {wanted.name}" if wanted is not None else "the model"
        return invalid(
            "budget",
            f"{self.room} bytes for weights, of which {self.here} are in use by {pinned}",
            f"at least {self.here + nbytes} while {what} is used beside these",
            "raise the budget, or name smaller units",
            ShortageError,
        )

    def _let_go(self, unit: Unit) -> None:
        under_way = self._under_way.pop(unit, None)
        if under_way is not None:
            self._give_up(under_way)
        for member in unit.members:
            if member.is_here:
                self._free(member)

    def _free(self, member: Member) -> None:
        if member.tensor._version != member.changes:
            self.changed(member)
        self._streams.leave(member.unit)
        self._present.remove(member)
        size(member, 0)
        if not self._present.has(member.unit):
            self._streams.forget(member.unit)

    def _begin_first(self, unit: Unit, *, shared: bool, ahead_shared: bool) -> Fetch | None:
        """Asks for a unit before which nothing was asked for, and for those behind it: requests that leave together take one round trip."""
        missing = self._missing(unit)
        if not missing:
            return None
        self._make_room(sum(member.nbytes for member in missing), unit)
        fetch = self._begin_fetch(missing, ahead=True, shared=shared)
        unit.pins += 1  # what comes behind it does not take its memory
        try:
            self._fetch_ahead(shared=ahead_shared)
        except BaseException:
            self._give_up(fetch)
            raise
        finally:
            unit.pins -= 1
        return fetch

    def _begin_fetch(self, missing: list[Member], *, ahead: bool, shared: bool = False) -> Fetch:
        try:
            for member in missing:
                size(member, member.nbytes)
                self._present.add(member)
                self.fetched += member.nbytes
            self.peak = max(self.peak, self.here)
            fetch = self._fetcher.begin(missing, ahead=ahead, shared=shared)
            self._streams.begin(missing[0].unit, fetch.owners())
            return fetch
        except BaseException:
            self._take_back(missing)
            raise

    def _give_up(self, fetch: Fetch) -> None:
        """Nobody needs what is under way."""
        has_come = fetch.has_come()
        fetch.give_up()
        self._take_back(fetch.members, have_come=has_come)

    def _take_back(self, members: list[Member], *, have_come: bool = False) -> None:
        """These are not wanted, or did not come, so they are not here."""
        for member in members:
            size(member, 0)
            if member.is_here:
                self._present.remove(member)
                self.fetched -= 0 if have_come else member.nbytes

    def _finish(self, unit: Unit, fetch: Fetch, together: bool) -> None:
        """Waits for what was fetched. What did not come is not here."""
        try:
            if not fetch.shared:
                fetch.finish()
            elif together:
                is_backward, number = is_in_backward(), self._numbers[unit]
                place = len(self.units) - number if is_backward else number
                if fetch.finish_together(unit.name, place, is_backward=is_backward):
                    self._streams.gathered(unit)
            else:
                fetch.finish_alone()
        except BaseException:
            self._take_back(fetch.members)
            raise
        for member in fetch.members:
            member.changes = member.tensor._version

    def _fetch_ahead(self, *, shared: bool) -> None:
        """Begins to fetch what is used next, as far as there is room beside what is used before it."""
        seen = 0
        for place, unit in enumerate(self._order.upcoming(_FARTHEST), 1):
            seen += self._nbytes[unit]
            if place > _AHEAD and seen > _AHEAD_BYTES:
                return
            missing = [] if unit in self._under_way else self._missing(unit)
            if not missing:
                continue
            if not self._room_before(unit, sum(member.nbytes for member in missing), place):
                return
            self._under_way[unit] = self._begin_fetch(missing, ahead=True, shared=shared)

    def _room_before(self, wanted: Unit, nbytes: int, place: int) -> bool:
        """Lets go of units whose next use comes after a place, until there is room. Returns whether there is."""
        if self.room is None:
            return True
        if self.here + nbytes <= self.room:
            return True
        distances = {unit: self._order.distance(unit) for unit in self._present.unpinned() if unit is not wanted}
        later = [unit for unit, distance in distances.items() if distance > place]
        if self.here + nbytes - sum(map(self._present.nbytes_of, later)) > self.room:
            return False
        later.sort(key=distances.__getitem__)
        while self.here + nbytes > self.room:
            self._let_go(later.pop())
        return True
