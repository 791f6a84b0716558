"""Resident units: as many as the budget holds, fetched before their use in the learned order.

:class:`Residency` decides on the training thread and on autograd's threads which units are fetched and released. A unit that backward needs
stays until its node has run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable

from longshore.errors import ShortageError, UsageError, invalid, warn
from longshore.transfer import tensors
from longshore.transfer.tensors import is_in_backward
from longshore.units.model import Member, Order, Unit
from longshore.units.rounds import UnitStreams

if TYPE_CHECKING:
    from longshore.units.fetching import Fetch, Fetcher


class _End:
    """Calls a function at the end of a backward pass. The pass has the only reference to this object, and drops it also
    if the pass raises."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end()

    __del__ = __call__


class Nodes:
    """Units pinned for the nodes of running backward passes, which may be nested. Callers hold the lock of pins."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        #: By the backward pass's number: the sequence number of its current node, and the units pinned for that node.
        self._given: dict[int, tuple[int | None, list[Unit]]] = {}

    def give(self, unit: Unit) -> None:
        """Pins a unit for the running node."""
        backward, number = self.follow()
        if backward not in self._given and backward != -1:
            Variable._execution_engine.queue_callback(_End(functools.partial(self._end_backward, backward)))
        _, given = self._given.setdefault(backward, (number, []))
        if unit not in given:
            unit.pins += 1
            given.append(unit)

    def follow(self) -> tuple[int, int | None]:
        """Unpins the units of nodes that have run: the pass's earlier node, and nodes outside of any pass.

        Returns:
            This thread's backward pass, or -1, and the sequence number of its running node.
        """
        backward, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        if backward in self._given and self._given[backward][0] != number:
            self._unpin(backward)
        self._unpin(-1)
        return backward, number

    def end(self) -> None:
        """Unpins all units."""
        for backward in list(self._given):
            self._unpin(backward)

    def _end_backward(self, backward: int) -> None:
        with self._lock:
            self._unpin(backward)

    def _unpin(self, backward: int) -> None:
        _, given = self._given.pop(backward, (None, []))
        for unit in given:
            unit.pins -= 1


class Resident:
    """Counts the resident members, so that a use of a unit needs no search of all units.

    Attributes:
        nbytes: bytes of all resident members.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        #: Number and bytes of resident members, by unit.
        self._of: dict[Unit, tuple[int, int]] = {}

    def add(self, member: Member) -> None:
        """Notes that a member has memory."""
        members, nbytes = self._of.get(member.unit, (0, 0))
        self._of[member.unit] = members + 1, nbytes + member.nbytes
        self.nbytes += member.nbytes
        member.is_here = True

    def remove(self, member: Member) -> None:
        """Notes that a member's memory was released."""
        members, nbytes = self._of.pop(member.unit)
        if members > 1:
            self._of[member.unit] = members - 1, nbytes - member.nbytes
        self.nbytes -= member.nbytes
        member.is_here = False

    def has(self, unit: Unit) -> bool:
        """Returns whether a part of the unit is resident."""
        return unit in self._of

    def has_all(self, unit: Unit) -> bool:
        """Returns whether the whole unit is resident."""
        return self._of.get(unit, (0, 0))[0] == len(unit.members)

    def nbytes_of(self, unit: Unit) -> int:
        """Returns the bytes of the unit's resident members."""
        return self._of.get(unit, (0, 0))[1]

    def unpinned(self) -> list[Unit]:
        """Returns the units with resident members and no pin."""
        return [unit for unit in self._of if unit.pins == 0]


def size(member: Member, nbytes: int) -> None:
    """Resizes a member's storage. Memory that forward code gave to an array of NumPy stays, since torch cannot resize
    it."""
    if member.memory.resizable():
        member.memory.resize_(nbytes)
    elif not nbytes:
        warn(
            f"an array of NumPy has the memory of {member.name} of unit {member.unit.name}, which stays on the device beside the budget, and new "
            "weights are written there: copy the weights with .clone() before .numpy()"
        )


def check_here(members: list[Member]) -> None:
    """Refuses to use members that could not be fetched."""
    for member in members:
        if not member.is_here:
            raise UsageError(
                f"{member.name} of unit {member.unit.name} is used after its gradient has left, and with delay=1 servers do not keep "
                "the weights that it was computed with: call step() of the optimizer or engine first, or its zero_grad(), which gives the step up"
            )


def check_same(unit: Unit) -> None:
    """Refuses a unit whose parameters or their memory were replaced after shard()."""
    for member in unit.members:
        for module, name in member.owners:
            if module._parameters.get(name) is not member.tensor:
                raise invalid(
                    member.name,
                    "another parameter now",
                    f"the one that unit {unit.name} had when shard() was called",
                    "change the model first, then build the optimizer and call shard()",
                    UsageError,
                )
        with torch._C.DisableTorchFunctionSubclass():
            memory = member.tensor.untyped_storage()._cdata
        if memory != member.memory._cdata:
            raise invalid(
                member.name,
                "in other memory now",
                f"in that which unit {unit.name} had when shard() was called",
                "move and cast the model before the optimizer is built",
                UsageError,
            )


def _tensors_in(result: Any) -> Iterator[Tensor]:
    """Yields plain tensors in containers and dataclasses, which may contain themselves."""
    left, seen = [result], set[int]()
    while left:
        item = left.pop()
        if type(item) is Tensor:
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                left += item.values()
            elif isinstance(item, (tuple, list, set)):
                left += item
            elif dataclasses.is_dataclass(item) and not isinstance(item, type):
                left += [getattr(item, field.name, None) for field in dataclasses.fields(item)]


#: How far units are fetched ahead: those of the next 4 uses whatever their size. Further ones follow up to 64 MiB
#: together, so that small units hide a round trip too. The farthest is 128 uses ahead.
_AHEAD, _AHEAD_BYTES, _FARTHEST = 4, 64 * 1024 * 1024, 128


#: Residencies of this process.
_all: "weakref.WeakSet[Residency]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_all.clear)


def _end_fetches() -> None:
    """Ends all fetches before the interpreter waits for their threads at its end."""
    for residency in list(_all):
        residency.give_up_all()


_threading: Any = threading
_threading._register_atexit(_end_fetches)


class Residency:
    """The units of a model, and their resident parts.

    Attributes:
        units: in the model's order.
        room: bytes for weights; None for no limit.
        peak: most bytes of weights on the device so far; fetched: bytes fetched so far.
        epoch: number of times that new weights came for the trained parameters.
    """

    def __init__(self, units: list[Unit], fetcher: Fetcher, room: int | None) -> None:
        self.units = units
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._nbytes = {unit: unit.nbytes for unit in units}
        self.room = room
        self.peak = self.fetched = 0
        self._present = Resident()
        self.epoch = 0
        #: True while :class:`longshore.Init` builds the model, so that no server has its weights yet.
        self.is_building = False
        #: True if the outermost module of the running call was called with gradients enabled, so that the call may
        #: train. Gradients may be disabled further in, as in a block of a reentrant checkpoint.
        self.may_train = True
        #: Context in which autograd saves references to weights, which backward fetches at their use. See
        #: :mod:`longshore.units.hooks`.
        self.saving: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        #: Unpins the units of ended module calls whose hooks never ran.
        self.unwind: Callable[[], None] = lambda: None
        #: Returns whether a call of the model has not ended.
        self.is_called: Callable[[], bool] = lambda: False
        self._fetcher = fetcher
        self._order = Order()
        self._streams = UnitStreams(fetcher.streams)
        self._under_way: dict[Unit, Fetch] = {}
        self._by_storage = {member.tensor.untyped_storage()._cdata: member for unit in units for member in unit.members}
        self._lock = threading.RLock()
        self._nodes = Nodes(self._lock)
        #: The thread that used a unit last, outside of backward.
        self._thread = threading.get_ident()
        _all.add(self)

    def begin(self) -> None:
        """Takes over the parameters, and releases their weights."""
        for unit in self.units:
            for member in unit.members:
                member.is_here, member.changes = False, member.tensor._version
                member.memory = member.tensor.untyped_storage()
                member.memory.resize_(0)
                tensors.hide(member.tensor, member, self)

    def adopt(self, unit: Unit) -> None:
        """Takes over another unit, whose parameters have their weights."""
        self.units.append(unit)
        self._nbytes[unit] = unit.nbytes
        for member in unit.members:
            member.memory, member.changes = member.tensor.untyped_storage(), member.tensor._version
            self._by_storage[member.memory._cdata] = member
            self._fetcher.keep(member)
            tensors.hide(member.tensor, member, self)
            self._present.add(member)
        self._make_room(0)
        self.peak = max(self.peak, self.here)

    def kept(self, member: Member) -> Tensor:
        """Returns the host copy of a frozen member, or of a member that no server has yet."""
        return self._fetcher.kept(member)

    def member_of(self, tensor: Tensor) -> Member | None:
        """Returns the member whose memory the tensor shares."""
        try:
            return self._by_storage.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without memory
            return None

    @property
    def here(self) -> int:
        """Bytes of weights on the device now."""
        return self._present.nbytes

    # Uses

    def use(self, unit: Unit, *, alone: bool = False) -> None:
        """Makes the unit resident, and prefetches the next units.

        Args:
            alone: whether other ranks may not use the unit now, although all of them train on the same modules.
        """
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            trains = (unit.module is None or unit.module.training) and (self.may_train or is_in_backward())
            is_next = self._order.note(unit, counts=trains)
            # Only training is the same on all ranks: this one may evaluate while the others do something else.
            together = trains and not alone
            under_way = self._under_way.pop(unit, None)
            if under_way is None and not self._under_way and not self._fetcher.is_at_hand:
                under_way = self._begin_first(unit, shared=together, ahead_shared=trains)
            if under_way is not None:
                with contextlib.suppress(CancelledError):  # the optimizer was closed, so weights come from elsewhere
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
        """Pins the unit as resident, plain parameters. Each pin needs one unpin. ``alone`` is as in :meth:`use`."""
        with self._lock:
            self.check_thread()
            self._nodes.follow()
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
                    tensors.show(member.tensor)

    def still_uses(self, units: list[Unit]) -> bool:
        """Returns whether all these units are resident. If so, later work of this thread's streams may use them while they are pinned."""
        if not all(self._present.has_all(unit) for unit in units):
            return False
        with self._lock:
            for unit in units:
                self._streams.use(unit, waits=False)
        return True

    def unpin(self, *units: Unit) -> None:
        """Unpins each unit, even if :meth:`changed` raises; the first error is raised."""
        # The stack runs its callbacks in reverse order and raises the last one's error: the first member's.
        with self._lock, contextlib.ExitStack() as changes:
            for unit in units:
                unit.pins -= 1
                unit.runs -= 1
                for member in unit.members if unit.runs == 0 else ():
                    # The version is read before the member is hidden. Afterwards torch would call
                    # ``__torch_function__`` for the read.
                    if member.is_here and member.tensor._version != member.changes:
                        changes.callback(self.changed, member)
                    tensors.hide(member.tensor, member, self)

    @contextlib.contextmanager
    def using(self, members: list[Member]) -> Iterator[None]:
        """Pins the units of members during an operation outside of modules."""
        units = list(dict.fromkeys(member.unit for member in members))
        with self._lock:
            self.check_thread()
            self._nodes.follow()
            for unit in units:
                unit.pins += 1
        try:
            for unit in units:
                self.use(unit, alone=True)
            check_here(members)
            with self.saving():
                yield
        finally:
            with self._lock:
                for unit in units:
                    unit.pins -= 1

    def give(self, member: Member) -> None:
        """Makes a member resident for backward's running node, until that node has run."""
        with self._lock:
            self._nodes.give(member.unit)
            self.use(member.unit)
            check_here([member])

    def is_of_another_thread(self) -> bool:
        """Returns whether this thread is not the one that uses units. Autograd's threads may use them, too."""
        return threading.get_ident() != self._thread and not is_in_backward() and not self.is_building

    def check_thread(self) -> None:
        """Refuses a use while another thread uses units. Only one thread at a time may pin units and order their uses."""
        if not self.is_of_another_thread():
            return
        with self._lock:
            is_used = self.is_called() or any(unit.pins for unit in self.units)
            if is_used and any(other.ident == self._thread for other in threading.enumerate()):
                raise UsageError(
                    "the model is in units, and another thread uses it now: call it from one thread at a time, and wait with join() for the "
                    "other one"
                )
            self._thread = threading.get_ident()

    def check_unused(self) -> None:
        """Refuses new weights while units are in use: released memory would be read."""
        with self._lock:
            self.unwind()
            self.check_thread()
            self._nodes.follow()
            if is_in_backward():
                self._nodes.end()
            used = next((unit for unit in self.units if unit.pins), None)
            if used is not None:
                raise invalid(
                    f"unit {used.name}",
                    "in use",
                    "released before new weights come",
                    "call step(), flush() and zero_grad() after the module's forward, and after the block of GatheredParameters",
                    UsageError,
                )

    def mark(self, result: Any) -> None:
        """Hides views of members like the members themselves."""
        for tensor in _tensors_in(result):
            member = self.member_of(tensor)
            if member is not None:
                tensors.hide(tensor, member, self)

    def changed(self, member: Member) -> None:
        """Handles a write to a member: a frozen one is kept.

        Raises:
            UsageError: for a trained member, whose write would be lost.
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

    def renew(self, *, are_same: bool = False) -> None:
        """Releases the trained parameters' old weights, since new ones come. With ``are_same`` the new ones have the
        same bits."""
        with self._lock:
            self.check_unused()
            self._order.end()
            self.epoch += not are_same
            self.give_up_all()  # servers may have freed the older weights
            for unit in self.units:
                check_same(unit)
                for member in unit.members:
                    if member.is_trained and member.is_here:
                        self._free(member)

    def let_go_of(self, members: list[Member]) -> None:
        """Releases the outdated weights of members."""
        with self._lock:
            self.give_up_all()
            for member in members:
                if member.is_here:
                    self._free(member)

    def give_up_all(self) -> None:
        """Cancels all fetches under way. A later use fetches again."""
        with self._lock:
            while self._under_way:
                _, fetch = self._under_way.popitem()
                self._give_up(fetch)

    def release(self) -> None:
        """Releases all weights that are not in use."""
        with self._lock:
            self.unwind()
            self._nodes.follow()
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
        in_use, beside = (f", of which {self.here} are in use by {pinned}", " beside these") if pinned else ("", "")
        return invalid(
            "budget",
            f"{self.room} bytes for weights{in_use}",
            f"at least {self.here + nbytes} while {what} is used{beside}",
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
        """Fetches a unit together with the next ones if no fetch is under way: requests sent together take one round trip."""
        missing = self._missing(unit)
        if not missing:
            return None
        self._make_room(sum(member.nbytes for member in missing), unit)
        fetch = self._begin_fetch(missing, ahead=True, shared=shared)
        unit.pins += 1  # the prefetches must not take the unit's memory
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
        has_come = fetch.has_come()
        fetch.give_up()
        self._take_back(fetch.members, have_come=has_come)

    def _take_back(self, members: list[Member], *, have_come: bool = False) -> None:
        """Releases members that are not wanted or did not arrive."""
        for member in members:
            size(member, 0)
            if member.is_here:
                self._present.remove(member)
                self.fetched -= 0 if have_come else member.nbytes

    def _finish(self, unit: Unit, fetch: Fetch, together: bool) -> None:
        """Waits for a fetch. After an error its members are released."""
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
        """Prefetches the next units, as far as they fit beside the units used before them."""
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
        """Releases units whose next use is later than ``place``, until ``nbytes`` fit. Returns whether they do."""
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
