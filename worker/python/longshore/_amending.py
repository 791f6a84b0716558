"""Weights of an accelerator that lack the last step, which is subtracted from them there (docs/delay.md, "worker-local").

Images and their rates come to the device before that step is decided: into the parameters' own memory, which nothing needs any
more once the gradients have left. What the decision says is then done on the stream that uses the weights, before it uses them.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longshore import _amend, _device
from longshore._coming import Coming, Copied
from longshore._held import Held
from longshore._params import DTYPES, Param, check_unchanged
from longshore._weights import Weights, groups_of

if TYPE_CHECKING:
    from longshore._longshore import Job


@dataclass(frozen=True, slots=True)
class _Room:
    """Where a parameter's image and rates come: page-locked memory of the host, and the device's."""

    staged: Tensor
    staged_rates: Tensor
    image: Tensor
    rates: Tensor


class Amending(Weights):
    """Weights that this worker amends, on the device where they lie there, and on the host elsewhere."""

    def __init__(self, params: list[Param], job: "Job", held: Held) -> None:
        super().__init__(params, job)
        self._held, self._image = held, held.image_dtype
        self._coming: Coming | None = None
        self._rooms: dict[int, _Room] = {}
        #: What the decision said of the images that come: once it is known, and None where they stay as they are.
        self._decided: list[tuple[float, list[float]] | None] = []

    def expect(self) -> None:
        with self._lock:
            self._begin()
            super().expect()

    def read(self) -> None:
        with self._lock:
            self._begin()
            super().read()

    def read_by(self, groups: Iterable[list[Param]]) -> Iterator[None]:
        """Does what :meth:`read` does, group by group: each time that it goes on, one more has its weights."""
        with self._lock:
            self._begin()
            self._note_what_came_before()
            for group in groups:
                self._read(group)
                yield
            self.forget()

    def forget(self) -> None:
        with self._lock:
            super().forget()
            self._end()

    def abandon(self) -> None:
        # Garbage collection may call this anywhere: on the thread of the images, for which a read would wait, or while another thread
        # has the lock and waits for that one.
        coming = self._coming
        is_waited_for = coming is not None and coming.is_here
        if is_waited_for or not self._lock.acquire(blocking=False):
            if coming is not None:
                coming.cancel()
            return
        try:
            super().abandon()
        finally:
            self._lock.release()

    def _end(self) -> None:
        """Ends what still comes, and lets go of the gradients."""
        if self._coming is not None:
            self._coming.give_up()
            self._coming = None
        self._held.last.clear()
        self._decided.clear()

    def _begin(self) -> None:
        """Has images come that were asked for, if they are to be amended."""
        version = self._job.unread_weights()
        if self._coming is not None and self._coming.version == version:
            return
        if self._coming is not None:
            self._coming.give_up()
            self._coming = None
        self._decided.clear()
        here = {param.index for param in self._params if _device.accelerator.has(param.tensor)}
        if version is None or not here or not self._start(version, here):
            self._held.last.clear()

    @torch.no_grad()
    def _start(self, version: int, which: set[int], *, again: bool = False) -> bool:
        """Has the images of some parameters come. Returns false where nothing is to be amended.

        Args:
            again: they were asked for before, and did not come.
        """
        groups = [[param for param in group if param.index in which] for group in groups_of(self._params)]
        groups = [group for group in groups if group]
        if self._job.images([]) is None:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            check_unchanged([param for group in groups for param in group], [])
            rooms = [[self._room(param) for param in group] for group in groups]
            # Device memory that was allocated just now may have been another's.
            if again:
                self._note_more_that_came_before()
            else:
                self._note_what_came_before()
            before = {device: event for device, (_, event) in self._before.items()}
            fetches = self._job.images(
                [
                    [(_place(param, room.staged), _place(param, room.staged_rates)) for param, room in zip(group, held, strict=True)]
                    for group, held in zip(groups, rooms, strict=True)
                ]
            )
        if fetches is None:
            return False

        def copy(group: list[Param]) -> Copied:
            return self._give(group, before)

        self._coming = Coming(version, list(zip(fetches, groups, strict=True)), copy)
        return True

    def _note_more_that_came_before(self) -> None:
        """Adds the work that the streams of this thread have got by now. The stream that asked for the weights stays the one that did."""
        accelerator = _device.accelerator
        for device, (asked, before) in self._before.items():
            current = accelerator.current_stream(device)
            accelerator.let_wait(current, before)
            self._before[device] = asked, accelerator.record(current)

    def _room(self, param: Param) -> _Room:
        """Memory for a parameter's image and rates that no copy reads any more. The image comes into the parameter itself, unless
        that has another type or order of elements."""
        accelerator, tensor = _device.accelerator, param.tensor.detach()
        self._free(param)
        is_own = param.dtype is self._image and tensor.is_contiguous()
        room = self._rooms.get(param.index)
        if room is None or room.rates.device != tensor.device or (is_own and room.image.data_ptr() != tensor.data_ptr()):
            rates = [_amend.rates_of(param.elements)]
            staged = self._staged[param.index].view(-1) if is_own else accelerator.locked([param.elements], self._image)
            image = tensor.view(-1) if is_own else accelerator.empty([param.elements], self._image, tensor.device)
            on_device = accelerator.empty(rates, torch.float32, tensor.device)
            room = _Room(staged, accelerator.locked(rates, torch.float32), image, on_device)
            self._rooms[param.index] = room
            self._stream(tensor.device)  # so that the thread of the images finds it
        return room

    def _give(self, group: list[Param], before: dict[torch.device, Any]) -> Copied:
        """Gives the copies of a group that has arrived to its devices."""
        copied: Copied = {}
        accelerator = _device.accelerator
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for param in group:
                room = self._rooms[param.index]
                device = room.rates.device
                stream = self._stream(device)
                if device not in copied:
                    accelerator.let_wait(stream, before[device])
                accelerator.copy(room.image, room.staged, stream)
                accelerator.copy(room.rates, room.staged_rates, stream)
                copied[device] = self._copies[param.index] = accelerator.record(stream)
        return copied

    @torch.no_grad()
    def _read(self, params: list[Param]) -> None:
        coming = self._coming
        if coming is not None and coming.failure is not None:
            # Nothing of these has come, or its copy was given up with the rest.
            coming.give_up()
            self._start(coming.version, coming.left, again=True)
            coming = self._coming
        ours = [param for param in params if coming is not None and param in coming]
        if coming is not None and ours:
            with torch._C.DisableTorchFunctionSubclass():
                check_unchanged(ours, [])
                self._amend(coming, ours)
            self._job.have_weights([param.index for param in ours])
            self._arrived(ours)
        others = [param for param in params if coming is None or param not in coming]
        if others:
            super()._read(others)

    def _amend(self, coming: Coming, params: list[Param]) -> None:
        accelerator = _device.accelerator
        copies = [coming.wait_for(param) for param in params]
        step = self._decision()
        for param, copied in zip(params, copies, strict=True):
            if param.index in coming.left:
                device = self._rooms[param.index].rates.device
                accelerator.let_wait(accelerator.current_stream(device), copied[device])
                self._amend_one(coming, param, step)
        self._show_amended(params)

    def _amend_one(self, coming: Coming, param: Param, step: tuple[float, list[float]] | None) -> None:
        """Gives the stream that uses the weights what makes them."""
        accelerator, room, kept = _device.accelerator, self._rooms[param.index], self._held.last.get(param.index)
        stream = accelerator.current_stream(room.rates.device)
        if param.index in coming.begun:
            # It was interrupted. The host still has the image.
            accelerator.copy(room.image, room.staged, stream)
        coming.begun.add(param.index)
        if step is not None or not _is_own(room, param):
            how = None if step is None else _amend.Step(step[0], step[1][param.group])
            sent = _amend.Sent(self._held.wire) if kept is None else kept.sent
            act = functools.partial(_amend.amend, sent=sent, step=how)
            accelerator.run(stream, act, [param.tensor.detach(), room.image, room.rates, None if kept is None else kept.gradient])
            if kept is not None:
                accelerator.keep_for(kept.gradient, stream)
        coming.left.remove(param.index)

    def _show_amended(self, params: list[Param]) -> None:
        """Lets the stream that asked for the weights wait for them, and lets go of the gradients."""
        accelerator = _device.accelerator
        for device in {self._rooms[param.index].rates.device for param in params}:
            current, asked = accelerator.current_stream(device), self._before[device][0]
            if asked != current:
                accelerator.let_wait(asked, accelerator.record(current))
        for param in params:
            self._held.last.pop(param.index, None)

    def _decision(self) -> tuple[float, list[float]] | None:
        """What was decided on the step that the images lack. It waits for that."""
        if not self._decided:
            self._decided.append(self._job.amendment())
        return self._decided[0]


def _is_own(room: _Room, param: Param) -> bool:
    """Whether the image comes into the parameter's own memory."""
    return room.image.data_ptr() == param.tensor.data_ptr()


def _place(param: Param, memory: Tensor) -> tuple[int, int, int, str]:
    return (param.index, memory.data_ptr(), memory.numel(), DTYPES[memory.dtype])
