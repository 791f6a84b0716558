"""Gradients on their way out of Python: collected one by one, and handed to the Rust half in groups.

Training and autograd threads collect, and check each gradient once. A contiguous CPU gradient is read in place. An
accelerator copies the gradients of a group together, behind their computation, into page-locked memory of the job or of
torch. Small gradients are packed on the device first, and a bucket of them takes one copy. :class:`Pusher` waits for
copies on a thread of its own. Backward waits only for memory: until a parameter's earlier gradient is read, and until a
device has room beside unsent gradients.
"""

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.transfer import device as _device
from longshore.transfer.params import Columns, Param, Place, check_gradient
from longshore.transfer.pinned import LockedMemory, Slabs, buckets, host_of, part_of

#: Gradients leave in groups of at least this many elements. Grouping does not delay servers: a chunk of 1 MiB has more
#: elements, and is sent only once it is complete.
ENOUGH = 128 * 1024
#: A device's gradients leave in groups of at least this many elements. On the host of an H200 such a group takes the
#: interpreter 0.3 ms, and in 16 bits the link 0.15 ms. Smaller groups would leave the link idle for longer.
ENOUGH_ON_DEVICE = 4 * 1024 * 1024


class Group:
    """Gradients that leave together, and the tensors that keep their memory until then.

    Attributes:
        elements: number of all elements; nbytes: bytes on devices.
        scale: the factor with which all of them leave.
        places: gradients in the host's memory.
        straight: gradients that their device copies straight into the memory from which they are sent.
        staged: pairs of staging memory and a gradient that the device copies there.
        streams: streams that make the gradients, by device.
    """

    def __init__(self) -> None:
        self.elements = self.nbytes = 0
        self.scale = 1.0
        self.places: list[Place] = []
        self.held: list[Tensor] = []
        self.straight: list[tuple[Param, Tensor]] = []
        self.staged: list[tuple[Tensor, Tensor]] = []
        self.streams: dict[torch.device, list[Any]] = {}
        self._locked: LockedMemory | None = None
        #: Events after which devices have made the gradients, or have copied them to staging memory.
        self._events: list[Any] = []
        #: The package's stream for copies, by device.
        self._copiers: dict[torch.device, Any] = {}

    @torch.no_grad()
    def begin_copies(self, locked: LockedMemory | None, copiers: dict[torch.device, Any]) -> None:
        """Enqueues the copies to staging memory on the package's streams, behind the gradients' computation."""
        self._locked, self._copiers, accelerator = locked, copiers, _device.accelerator
        for device, streams in self.streams.items():
            copier = copiers[device]
            made = [accelerator.record(stream) for stream in streams]
            staged = [pair for pair in self.staged if pair[1].device == device]
            if not staged:
                self._events += made
                continue
            for event in made:
                accelerator.let_wait(copier, event)
            places = []
            for target, source in staged:
                if source.is_contiguous():
                    places.append((target.data_ptr(), source.view(-1)))
                else:
                    accelerator.copy(target, source, copier)
            for address, bucket in buckets(places):
                _device.copy_together_out(host_of(address, bucket), bucket, copier)
            self._events.append(accelerator.record(copier))

    def push(self, job: Any) -> None:
        """Pushes the gradients once they can be read. The wait for that leaves the job free for other threads."""
        for event in self._events:
            _device.accelerator.wait(event)
        if self.places or self.straight:
            job.begin_step()
        if self.places:
            job.push(self.places, self.scale)
        if self.straight:
            job.push_together([(param.index, param.elements) for param, _ in self.straight], self._copy)

    @torch.no_grad()
    def _copy(self, slots: Sequence[tuple[int, int, int, int]]) -> None:
        """Copies parts of gradients to their addresses. Parts with neighbouring addresses share a copy. All copies are
        over when the call ends, even with an error, since the memory may go to other gradients then.

        Args:
            slots: a part's gradient as index in ``straight``, its first element, number of elements and address.
        """
        assert self._locked is not None
        accelerator, copiers = _device.accelerator, set()
        try:
            parts = ((slot[3], part_of(self.straight[slot[0]][1].view(-1), slot[1], slot[2])) for slot in slots)
            for address, bucket in buckets(parts):
                target, device = host_of(address, bucket), bucket[0].device
                if self._locked.holds(address, target.nbytes, device):
                    copiers.add(device)
                    _device.copy_together_out(target, bucket, self._copiers[device])
                else:
                    torch.cat([accelerator.to_host(part) for part in bucket], out=target)
        finally:
            for device in copiers:
                accelerator.wait(accelerator.record(self._copiers[device]))


class Gradients:
    """Collects gradients of a step into groups.

    Attributes:
        locked: page-locked memory of the job, if a device may copy gradients there.
        may_be_on_device: False if each parameter is in the host's memory.
        group: gradients that were taken and have not left.
    """

    def __init__(self) -> None:
        self.locked: LockedMemory | None = None
        self.may_be_on_device = True
        self.group = Group()
        self._staging: dict[int, Tensor] = {}
        self._slabs = Slabs()
        self._streams = _device.Streams()

    def take(self, param: Param, gradient: Tensor, scale: float = 1.0) -> Group:
        """Checks a gradient, and adds it to the group, whose gradients share ``scale``. The parameter's earlier gradient must have left.

        Returns:
            The group.
        """
        if gradient.dtype is not param.dtype or gradient.layout is not torch.strided or gradient.shape != param.shape:
            check_gradient(param, gradient)
        group, memory = self.group, gradient
        if (self.may_be_on_device or not gradient.is_cpu) and _device.accelerator.has(gradient):
            gradient = gradient.resolve_neg()  # a device copies memory as it is
            self.note_stream(gradient)
            group.nbytes += gradient.nbytes
            if self.locked is not None and self.locked.takes(gradient, scale):
                group.straight.append((param, gradient))
                group.elements += param.elements
                return group
            memory = self._staging_of(param, gradient)
            group.staged.append((memory, gradient))
        elif not gradient.is_contiguous() or gradient.is_neg():
            memory = self._staging_of(param, gradient).copy_(gradient)
        group.elements += param.elements
        group.scale = scale
        group.places.append(param.place(memory))
        group.held.append(memory)
        return group

    def take_together(self, columns: Columns, gradients: Sequence[Any], scale: float = 1.0) -> list[Param]:
        """Takes gradients, and returns the parameters that lack one. Gradients in the host's memory pass without the
        interpreter between them."""
        places = columns.places(gradients) if set(map(type, gradients)) == {Tensor} else None
        if places is not None:
            self.group.places += places
            self.group.held += gradients
            self.group.scale = scale
            return []
        missing = []
        for param, gradient in zip(columns.params, gradients, strict=True):
            if gradient is None:
                missing.append(param)
            else:
                self.take(param, gradient, scale)
        return missing

    def note_stream(self, gradient: Tensor) -> None:
        """Notes that this thread's stream makes a gradient of the group, if it lies on a device."""
        if _device.accelerator.has(gradient):
            stream, streams = _device.accelerator.current_stream(gradient.device), self.group.streams.setdefault(gradient.device, [])
            if stream not in streams:
                streams.append(stream)

    def _staging_of(self, param: Param, gradient: Tensor) -> Tensor:
        staging = self._staging.get(param.index)
        if staging is None or staging.dtype is not gradient.dtype:
            staging = self._staging[param.index] = self._slabs.take(gradient)
        return staging

    def leave(self) -> Group:
        """Ends the group, begins its copies, and begins the next group."""
        group, self.group = self.group, Group()
        group.begin_copies(self.locked, self._streams)
        return group

    def push(self, job: Any) -> None:
        """Pushes the group. After a failure or an interrupt it stays."""
        group = self.leave()
        try:
            group.push(job)
        except BaseException:
            self.group = group
            raise


class _Work:
    """State shared by the pusher and its thread."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Group, Callable[[], None]] | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.left = 0
        #: Bytes that unsent gradients take on devices.
        self.nbytes = 0
        #: Parameters with an unsent gradient that is read from its own memory, on the host.
        self.params: set[int] = set()
        self.failure: BaseException | None = None

    def run(self) -> None:
        while (item := self.queue.get()) is not None:
            group, act = item
            params, nbytes = [place[0] for place in group.places], group.nbytes
            try:
                if self.failure is None:
                    act()
            except BaseException as failure:
                self.failure = failure
            # A waiting thread may count on the gradients' memory, so references to them end before the notification.
            del item, act, group
            with self.changed:
                self.left -= 1
                self.nbytes -= nbytes
                self.params.difference_update(params)
                self.changed.notify_all()


class Pusher:
    """Runs pushes in the order given, on a thread of its own. After a failure, the next call of a method raises the
    failure."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._work = _Work()
        threading.Thread(target=self._work.run, name="longshore-push", daemon=True).start()
        self.close = weakref.finalize(self, self._work.queue.put, None)

    def push(self, group: Group) -> None:
        """Pushes a group once its gradients can be read."""
        self._give(group, functools.partial(group.push, self._job))

    def then(self, act: Callable[[], None]) -> None:
        """Runs ``act`` after all earlier work."""
        self._give(Group(), act)

    def _give(self, group: Group, act: Callable[[], None]) -> None:
        self._raise()
        with self._work.changed:
            self._work.left += 1
            self._work.nbytes += group.nbytes
            self._work.params.update(place[0] for place in group.places)
        self._work.queue.put((group, act))

    def wait_for(self, param: int) -> None:
        """Waits until the memory of a parameter's gradient of the previous micro-step has been read."""
        if self._work.failure is None and param not in self._work.params:
            return
        with self._work.changed:
            self._work.changed.wait_for(lambda: param not in self._work.params)
        self._raise()

    def wait_for_room(self, nbytes: int, room: int) -> None:
        """Waits until gradients of ``nbytes`` fit into ``room`` bytes, beside unsent gradients that a device still holds."""
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
            with self._work.changed:
                self._work.changed.wait_for(lambda: self._work.left == 0)
            self._work.failure = None
            raise failure


class Outgoing:
    """Gradients of one micro-step that leave group by group. A group leaves while the next one is made."""

    def __init__(self) -> None:
        self.gradients = Gradients()
        self._copying: Group | None = None

    def send(self, job: Any, param: Param, gradient: Tensor, scale: float) -> None:
        """Sends a gradient multiplied by ``scale``, with the next ones."""
        self.gradients.take(param, gradient, scale)
        if self.gradients.group.elements >= ENOUGH:
            self._leave(job)

    def push_rest(self, job: Any) -> None:
        """Sends the gradients that have not left."""
        self._leave(job)
        self._leave(job)

    def _leave(self, job: Any) -> None:
        group, self._copying = self._copying, self.gradients.leave()
        if group is not None:
            group.push(job)
