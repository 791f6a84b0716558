"""Writes arriving weights into the parameters: at once, or each before its first use, on the training thread.

The connection of an optimizer owns one :class:`Weights`. A job's first weights are rank 0's. Other ranks read them when the job is opened,
possibly within a step. A forward has used the model's own weights then, and autograd refuses a backward whose weights were written since.
So :func:`read_in_step` leaves equal weights unwritten.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from longshore.errors import LongshoreError, UsageError
from longshore.transfer import device as _device
from longshore.transfer import tensors as _tensors
from longshore.transfer.device import is_plain
from longshore.transfer.params import Columns, Param, Place, check_unchanged, is_image, is_sharded
from longshore.transfer.pinned import Lending, Slabs, buckets, host_of

if TYPE_CHECKING:
    from longshore._longshore import Job


#: Largest relative error of a master weight in 16 bits. A weight in bf16 has 8 significant bits, of which random
#: rounding changes less than one unit of the last.
_MASTER_APART = 2.0**-7


@dataclass(frozen=True, slots=True)
class Rounding:
    """The servers' rounding of weights before workers read them.

    Attributes:
        image: the type of the rounded weights.
        is_master: whether servers also keep master weights in fewer bits than fp32.
    """

    image: torch.dtype
    is_master: bool

    def changes(self, dtype: torch.dtype) -> bool:
        """Returns whether rounding can change weights of this type."""
        return self.is_master or dtype != self.image

    def may_give(self, own: Tensor, theirs: Tensor) -> bool:
        """Returns whether ``theirs`` can be ``own`` after rounding."""
        if self.is_master:
            return torch.allclose(theirs, own.to(self.image).to(own.dtype), rtol=2 * _MASTER_APART, atol=0.0)
        return is_image(own, theirs, self.image)


@torch.no_grad()
def read_in_step(params: list[Param], rounding: Rounding, read: Callable[[], None]) -> list[Param]:
    """Reads a job's weights within a step. Where servers have merely rounded a parameter's own weights, the parameter
    gets these back, unnoticed by autograd: the step's forward has used them. A copy of all weights takes host memory
    meanwhile.

    Args:
        params: the job's parameters. Shards simply get the job's weights, since forward has used a copy of them.
        read: writes the job's weights into the parameters.

    Returns:
        The parameters that had other weights, and now have the job's.
    """
    whole = [param for param in params if not is_sharded(param.tensor)]
    tensors = [param.tensor for param in whole]
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    with contextlib.ExitStack() as counts:
        for tensor in tensors:
            counts.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
        read()
        others = [param for param, own in zip(whole, before, strict=True) if not _put_back(param.tensor, own, rounding)]
    torch.autograd.graph.increment_version([param.tensor for param in others])
    return others


def _put_back(tensor: Tensor, own: Tensor, rounding: Rounding) -> bool:
    """Restores a tensor's own weights, and returns True, if the weights read from the servers are these, rounded."""
    if not rounding.may_give(own.reshape(-1), tensor.to("cpu").reshape(-1)):
        return False
    if rounding.changes(tensor.dtype):
        tensor.copy_(own)
    return True


@torch.no_grad()
def read_rounded(params: list[Param], rounding: Rounding, read: Callable[[Param, Tensor], None]) -> None:
    """Rounds the weights of a model that filled a job, since all other ranks read rounded weights.

    Args:
        params: the job's parameters. A single rank's DTensors stay unchanged.
        read: writes the servers' weights of a parameter into memory of its shape.
    """
    for param in params:
        if rounding.changes(param.dtype) and not is_sharded(param.tensor):
            theirs = _device.host_empty(param.shape, param.dtype)
            read(param, theirs)
            param.tensor.copy_(theirs)


#: Largest group of parameters that are read together, in bytes: as large as a chunk of weights.
GROUP_BYTES = 1024 * 1024
#: Largest group on a device in bytes: as large as a default shard's weights, which become readable together. On the
#: host of an H200 such a group takes the interpreter 0.4 ms, and the link 0.15 ms.
DEVICE_GROUP_BYTES = 8 * 1024 * 1024
#: Factor by which groups are larger in a delayed job. Weights of such a job arrive before their first use, so none
#: waits for the rest of its group.
DELAYED = 8


class JobWeights:
    """Weights of a job in this process, as its connection uses them. :class:`Weights` documents the methods; here each does nothing.

    :class:`Weights` are of a model in memory, :class:`Unplaced` of a model that is being built, and
    :class:`longshore.units.shard.UnitWeights` of a model in units.
    """

    #: Indices of parameters that lack the newest weights. No gradient can come from them, unless some code reached
    #: their memory past torch's functions.
    awaited: set[int]
    #: Servers' lent memory; None if all weights are copied out of it.
    lending: Lending | None = None

    def values(self) -> tuple[list[Place], list[Tensor]]:
        return [], []

    def expect(self) -> None: ...

    def read(self) -> None: ...

    def read_frozen(self) -> set[int]:
        """Gives frozen parameters their weights. Returns the indices of those that the connection need not read."""
        return set()

    def meet(self) -> None:
        """Waits until all ranks have come here, if ranks read weights together within a step."""

    def settle(self) -> None: ...

    def give_up(self) -> None: ...

    def abandon(self) -> None: ...

    def forget(self) -> None: ...

    def finish_copies(self) -> None:
        """Waits until no device copies weights from a server's memory. Called before a step's last gradient has left.

        Raises:
            LongshoreError: if the server has overwritten the weights earlier.
        """
        if self.lending is not None:
            self.lending.finish()

    def release(self) -> None:
        """Ends all copies from a server's memory, once the job is closed."""
        if self.lending is not None:
            self.lending.release()


class WeightsInUnits(Protocol):
    """Weights of a model in units, which go on to another job of the same parameters."""

    def check_unused(self) -> None: ...

    def belong_to(self, job: Any, held: int | None) -> JobWeights: ...


class Weights(JobWeights):
    """Writes weights into the parameters of a job.

    Args:
        lending: servers' lent memory; None if all weights are copied out of it.
        is_delayed: whether a step computes with weights that were made during the step before, as with ``delay=1``.
    """

    def __init__(self, params: list[Param], job: "Job", lending: Lending | None = None, *, is_delayed: bool = False) -> None:
        self._params, self._columns = params, Columns(params)
        self._job = job
        self.lending = lending
        self._staged: dict[int, Tensor] = {}
        self._slabs = Slabs()
        #: The event after the last copy that reads a parameter's staging memory, by the parameter's index.
        self._copies: dict[int, Any] = {}
        #: The stream of copies to a device.
        self._streams = _device.Streams()
        #: By device, the stream that requested the weights and an event after its work until then, which may read older
        #: weights.
        self._before: dict[torch.device, tuple[Any, Any]] = {}
        self.awaited = set()
        #: Called with parameters that have got their weights.
        self.when_read: Callable[[list[Param]], None] | None = None
        most = DEVICE_GROUP_BYTES * (DELAYED if is_delayed else 1) if _device.has_any(self._columns.tensors) else GROUP_BYTES
        groups = map(Columns, groups_of(params, most))
        #: Groups of parameters that are read together, each with a function that reads it.
        self._readers = [(group, functools.partial(self.read_group, group)) for group in groups]
        #: Held while weights are read, since two threads may use parameters at a time.
        self._lock = threading.RLock()

    def has(self, index: int) -> bool:
        """Returns whether a parameter has the newest weights. Waits for a thread that reads weights: parameters of its group are plain
        before they leave ``awaited``."""
        with self._lock:
            return index not in self.awaited

    def values(self) -> tuple[list[Place], list[Tensor]]:
        """Returns the places of the current weights, and the tensors that hold their memory."""
        held = [_tensors.on_host(param.tensor) for param in self._params]
        return [param.place(memory) for param, memory in zip(self._params, held, strict=True)], held

    def expect(self) -> None:
        """Makes all parameters awaited. Parameters whose use cannot be noticed are read at once."""
        with self._lock:
            self._note_what_came_before()
            at_once: list[Param] = []
            for group, read in self._readers:
                expected, tensors = group.params, group.tensors
                if not _tensors.can_await_all(tensors):
                    expected = [param for param in group.params if _tensors.can_await(param.tensor)]
                    tensors = [param.tensor for param in expected]
                    others = [param for param in group.params if not _tensors.can_await(param.tensor)]
                    at_once += [param for param in others if param.index not in self.awaited]
                self.awaited.update(group.indices if expected is group.params else [param.index for param in expected])
                _tensors.begin(tensors, read)
            if at_once:
                self._read(Columns(at_once))

    def read(self) -> None:
        """Waits for new weights, and writes them into all parameters that lack them."""
        with self._lock:
            # Parameters that were read at their use are left alone: a running backward may need them unwritten.
            lacking = set(self._job.unread_params())
            if lacking:
                is_whole = self._columns.indices <= lacking
                columns = self._columns if is_whole else Columns([param for param in self._params if param.index in lacking])
                self._read(columns, is_asked_now=True)
            self.forget()

    def settle(self) -> None:
        """Reads all awaited parameters."""
        with self._lock:
            if self.awaited:
                self.read()

    give_up = settle

    def abandon(self) -> None:
        """Gives a model that outlives its optimizer the newest weights, if servers can send them."""
        with contextlib.suppress(LongshoreError):
            self.settle()
        with contextlib.suppress(LongshoreError):
            self.finish_copies()
        self.forget()

    def read_group(self, group: Columns) -> None:
        """Waits for the new weights of a group's awaited parameters, and writes them."""
        with self._lock:
            if group.indices <= self.awaited:
                self._read(group)
            elif not group.indices.isdisjoint(self.awaited):
                self._read(Columns([param for param in group.params if param.index in self.awaited]))

    def forget(self) -> None:
        """Makes all parameters plain again, with the weights that they have."""
        with self._lock:
            self._arrived(self._columns)

    def _arrived(self, columns: Columns) -> None:
        """Ends the wait of parameters that have their weights. After Ctrl-C the remaining ones are read again."""
        if self.awaited:
            _tensors.end(columns.tensors)
            self.awaited -= columns.indices

    def _read(self, columns: Columns, *, is_asked_now: bool = False) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            params, tensors = columns.params, columns.tensors
            places, staged = columns.places(tensors), []
            if places is None:
                # A tensor that became smaller is refused: weights are written by address, and would overflow it.
                check_unchanged(params, [])
                if is_asked_now:
                    self._note_what_came_before()
                lending = self.lending
                fit = [] if lending is None else [param for param in params if lending.fits(param.tensor)]
                if fit and self._copy_lent(Columns(fit)):
                    indices = {param.index for param in fit}
                    params = [param for param in params if param.index not in indices]
                    columns = Columns(params)
                if not params:
                    return
                staged = [param for param in params if not is_plain(param.tensor)]
                for param in staged:
                    self._free(param)
                indices = {param.index for param in staged}
                memory = [self._staged[param.index] if param.index in indices else param.tensor for param in params]
                places = [param.place(at) for param, at in zip(params, memory, strict=True)]
                tensors = [param.tensor for param in params if param.index not in indices]
            if self._job.read_weights(places) is not None:
                if staged:
                    self._copy(staged)
                torch.autograd.graph.increment_version(tensors)  # autograd learns of the change
                if self.when_read is not None:
                    self.when_read(params)
            self._arrived(columns)

    @torch.no_grad()
    def _copy_lent(self, columns: Columns) -> bool:
        """Has devices copy weights from servers' memory. Returns False if the weights lie where no device can copy them."""
        assert self.lending is not None
        params = columns.params
        lent = self._job.lent_weights([param.index for param in params])
        runs = None if lent is None else lent.runs()
        if runs is None:
            return False
        devices: list[torch.device] = []
        for device in dict.fromkeys(tensor.device for tensor in columns.tensors):
            self._ordered(device, devices)
        self.lending.copy(lent, runs, [param.tensor.detach().view(-1) for param in params], self._streams)
        for device in devices:
            self._show(device)
        self._job.have_weights([param.index for param in params])
        if self.when_read is not None:
            self.when_read(params)
        self._arrived(columns)
        return True

    def _free(self, param: Param) -> None:
        """Gives a parameter staging memory that no copy reads any more."""
        copy = self._copies.pop(param.index, None)
        if copy is not None:
            _device.accelerator.wait(copy)
        if param.index not in self._staged:
            self._staged[param.index] = self._slabs.take(param.tensor)

    def _note_what_came_before(self) -> None:
        """Records the devices' current work, which may read the older weights."""
        has = _device.accelerator.has
        if not _device.has_any(self._columns.tensors):
            return
        for device in {param.tensor.device for param in self._params if has(param.tensor)}:
            stream = _device.accelerator.current_stream(device)
            self._before[device] = (stream, _device.accelerator.record(stream))

    @torch.no_grad()
    def _copy(self, staged: list[Param]) -> None:
        """Copies staged weights into parameters. Later work on the devices waits for the copies."""
        devices: list[torch.device] = []
        places: list[tuple[int, Tensor]] = []
        copied: list[int] = []
        for param in staged:
            source, tensor = self._staged[param.index], param.tensor
            if not _device.accelerator.has(tensor):
                tensor.copy_(source)
                continue
            stream = self._ordered(tensor.device, devices)
            copied.append(param.index)
            if tensor.is_contiguous():
                places.append((source.data_ptr(), tensor.view(-1)))
            else:
                _device.accelerator.copy(tensor, source, stream)
        for address, bucket in buckets(places):
            _device.copy_together_in(bucket, host_of(address, bucket), self._streams[bucket[0].device])
        ends = {device: self._show(device) for device in devices}
        self._copies.update((index, ends[self._params[index].tensor.device]) for index in copied)

    def _ordered(self, device: torch.device, devices: list[torch.device]) -> Any:
        """Returns a device's stream for copies. On the first call for a device, which ``devices`` notes, the stream
        waits for the device's work that may read older weights."""
        stream = self._streams[device]
        if device not in devices:
            devices.append(device)
            _device.accelerator.let_wait(stream, self._before[device][1])
        return stream

    def _show(self, device: torch.device) -> Any:
        """Makes the current stream wait for the weights' copies, and also the stream that called ``step``. Returns the copies' event."""
        copied = _device.accelerator.record(self._streams[device])
        current = _device.accelerator.current_stream(device)
        asked = self._before[device][0]
        for stream in [current] if current == asked else [current, asked]:
            _device.accelerator.let_wait(stream, copied)
        return copied


class Unplaced(JobWeights):
    """Stands for the weights of a job whose model :class:`Init` built, until ``shard``: no tensor has them. Units are fetched at their use."""

    @property
    def awaited(self) -> set[int]:  # type: ignore[override]
        self.expect()
        return set()

    def expect(self) -> None:
        raise UsageError("the model was built within longshore.Init: call longshore.shard(model, optimizer, budget) before it trains")


def groups_of(params: list[Param], most: int) -> list[list[Param]]:
    """Returns groups of consecutive parameters of at most ``most`` bytes. A larger parameter is alone."""
    groups: list[list[Param]] = []
    room = 0
    for param in params:
        taken = param.elements * param.dtype.itemsize
        if not groups or taken > room:
            groups.append([])
            room = most
        groups[-1].append(param)
        room -= taken
    return groups


def is_compiling() -> bool:
    """Returns whether ``torch.compile`` has made code in this process: compiled code reads parameters past torch's functions."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
