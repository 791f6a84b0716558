"""Gradients as host memory: addresses for the Rust half, and copies of gradients without usable memory.

A contiguous CPU gradient is read in place. An accelerator's gradient is copied on a stream of the package, behind its computation, into
page-locked memory of the job or of torch. The training thread takes gradients. :class:`Pusher` pushes them from its own thread once copied,
so that backward never waits.
"""

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.transfer import device as _device
from longshore.transfer.params import Param, check_gradient
from longshore.transfer.pinned import LockedMemory, Straight

#: A gradient for the Rust half: parameter, address, elements, type.
Place = tuple[int, int, int, str]


def is_plain(tensor: Tensor) -> bool:
    """Returns whether the Rust half can use the tensor's own memory. Memory of a lazily negated tensor has the opposite signs."""
    return tensor.is_contiguous() and not tensor.is_neg() and not _device.accelerator.has(tensor)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A gradient on its way: its place once its copy is done, and the tensors that keep its memory until then."""

    place: Place
    held: tuple[Tensor, ...]
    copied: Any = None

    @property
    def on_device(self) -> int:
        """Bytes of the device's memory that the gradient holds."""
        return sum(tensor.nbytes for tensor in self.held[1:])

    def push(self, job: Any, scale: float = 1.0) -> None:
        """Waits until the gradient can be read, and pushes it."""
        self.wait()
        job.push([self.place], scale)

    def wait(self) -> None:
        """Blocks until the gradient can be read, without the GIL."""
        if self.copied is not None:
            _device.accelerator.wait(self.copied)


class Gradients:
    """Gradients of one step as host memory.

    Attributes:
        locked: page-locked memory of the job, if a device may copy gradients there.
    """

    def __init__(self) -> None:
        self.locked: LockedMemory | None = None
        self._staged: dict[int, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        #: Gradients taken by :meth:`take` whose copies are under way, or have not begun.
        self._leaving: list[Leaving] = []
        self._straight: list[Straight] = []

    def take(self, param: Param, gradient: Tensor, scale: float = 1.0) -> list[Place]:
        """Checks a gradient, and starts its copy if it needs one. The gradient leaves multiplied by ``scale``. Later work of this thread on
        the device is ordered behind the copy.

        Returns:
            Its place for :meth:`push`; empty if :meth:`push` has the device copy it.
        """
        if is_plain(gradient):
            check_gradient(param, gradient)
            return [(param.index, gradient.data_ptr(), param.elements, param.wire)]
        leaving = self.start(param, gradient, scale)
        if isinstance(leaving, Straight):
            self._straight.append(leaving)
            return []
        if leaving.copied is not None:
            self._leaving.append(leaving)
            _device.accelerator.let_wait(_device.accelerator.current_stream(gradient.device), leaving.copied)
        return [leaving.place]

    def start(self, param: Param, gradient: Tensor, scale: float = 1.0) -> Leaving | Straight:
        """Checks a gradient, and starts its copy if it needs one. The gradient leaves multiplied by ``scale``. The parameter's earlier
        gradient must have been read."""
        check_gradient(param, gradient)
        if is_plain(gradient):
            return Leaving((param.index, gradient.data_ptr(), param.elements, param.wire), (gradient,))
        if _device.accelerator.has(gradient):
            gradient = gradient.resolve_neg()  # a device copies memory as it is
        if self.locked is not None and _device.accelerator.has(gradient) and self.locked.takes(gradient, scale):
            made = _device.accelerator.record(_device.accelerator.current_stream(gradient.device))
            return Straight(param, gradient, made, self._stream(gradient.device), self.locked)
        staged = self._staging(param, gradient)
        place = (param.index, staged.data_ptr(), param.elements, param.wire)
        if not _device.accelerator.has(gradient):
            staged.copy_(gradient)
            return Leaving(place, (staged,))
        stream = self._stream(gradient.device)
        made = _device.accelerator.record(_device.accelerator.current_stream(gradient.device))
        _device.accelerator.let_wait(stream, made)
        _device.accelerator.copy(staged, gradient, stream)
        return Leaving(place, (staged, gradient), _device.accelerator.record(stream))

    def _staging(self, param: Param, gradient: Tensor) -> Tensor:
        staged = self._staged.get(param.index)
        if staged is None or staged.dtype is not gradient.dtype:
            if _device.accelerator.has(gradient):
                staged = _device.accelerator.locked(param.shape, gradient.dtype)
            else:
                staged = _device.host_empty(param.shape, gradient.dtype)
            self._staged[param.index] = staged
        return staged

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = _device.accelerator.new_stream(device)
        return self._streams[device]

    def push(self, job: Any, places: list[Place], scale: float = 1.0) -> None:
        """Pushes the taken gradients, whose places are ``places``."""
        for leaving in self._leaving:
            leaving.wait()
        job.push(places, scale)
        for straight in self._straight:
            straight.push(job)
        self.release()

    def release(self) -> None:
        """Drops the taken gradients."""
        self._leaving.clear()
        self._straight.clear()


class _Work:
    """State shared by the pusher and its thread."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[int | None, int, Callable[[], None]] | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.left = 0
        #: Bytes of unsent gradients.
        self.nbytes = 0
        #: Parameters with unsent gradients.
        self.params: set[int] = set()
        self.failure: BaseException | None = None

    def run(self) -> None:
        while (item := self.queue.get()) is not None:
            param, nbytes, act = item
            try:
                if self.failure is None:
                    act()
            except BaseException as failure:
                self.failure = failure
            # References held by the act, for example to a gradient, end before waiting threads are notified.
            del item, act
            with self.changed:
                self.left -= 1
                self.nbytes -= nbytes
                self.params.discard(-1 if param is None else param)
                self.changed.notify_all()


class Pusher:
    """Runs pushes in the order given, on a thread of its own. The next call of any method raises a failure."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._work = _Work()
        threading.Thread(target=self._work.run, name="longshore-push", daemon=True).start()
        self.close = weakref.finalize(self, self._work.queue.put, None)

    def push(self, param: int, leaving: Leaving | Straight) -> None:
        """Pushes a parameter's gradient once its copy is done."""
        self._give(param, functools.partial(leaving.push, self._job), leaving.on_device)

    def then(self, act: Callable[[], None]) -> None:
        """Runs ``act`` after all earlier work."""
        self._give(None, act)

    def _give(self, param: int | None, act: Callable[[], None], nbytes: int = 0) -> None:
        self._raise()
        with self._work.changed:
            self._work.left += 1
            self._work.nbytes += nbytes
            if param is not None:
                self._work.params.add(param)
        self._work.queue.put((param, nbytes, act))

    def wait_for(self, param: int) -> None:
        """Waits until a parameter's gradient of the previous micro-step has been read."""
        with self._work.changed:
            self._work.changed.wait_for(lambda: param not in self._work.params)
        self._raise()

    def wait_for_room(self, nbytes: int, room: int) -> None:
        """Waits until a gradient of ``nbytes`` fits into ``room`` bytes, beside unsent gradients that a device still holds."""
        with self._work.changed:
            self._work.changed.wait_for(lambda: not self._work.nbytes or self._work.nbytes + nbytes <= room)
        self._raise()

    def wait(self) -> None:
        """Waits until all given work is done. Raises its failure."""
        with self._work.changed:
            self._work.changed.wait_for(lambda: self._work.left == 0)
        self._raise()

    def _raise(self) -> None:
        failure = self._work.failure
        if failure is not None:
            self.wait_until_idle()
            self._work.failure = None
            raise failure

    def wait_until_idle(self) -> None:
        """Waits until no work is left, also after a failure."""
        with self._work.changed:
            self._work.changed.wait_for(lambda: self._work.left == 0)


class Outgoing:
    """Gradients of one micro-step that leave one after the other."""

    def __init__(self) -> None:
        self.gradients = Gradients()
        #: Gradients that an accelerator copies to the host, oldest first, with their factors.
        self._copying: list[tuple[Leaving | Straight, float]] = []

    def send(self, job: Any, param: Param, gradient: Tensor, scale: float) -> None:
        """Sends a gradient multiplied by ``scale``. An accelerator's gradient leaves with the next one, or at the end."""
        self.push_copied(job)
        leaving = self.gradients.start(param, gradient, scale)
        if isinstance(leaving, Leaving) and leaving.copied is None:
            leaving.push(job, scale)
        else:
            self._copying.append((leaving, scale))

    def push_copied(self, job: Any) -> None:
        """Waits for the copies under way, and sends their gradients."""
        for leaving, scale in self._copying:
            leaving.push(job, scale)
        self._copying.clear()
