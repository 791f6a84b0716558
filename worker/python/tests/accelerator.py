"""A simulated accelerator, and models on it. A second thread does each stream's operations late, in a legal order drawn from a seed.
Unwritten and freed memory holds NaN.

An operation may begin after the previous one on its stream, and after the operations that its stream was told to wait for. Nothing else
orders it, so it stays pending until some operation is awaited. The predecessors of the awaited operation then run too. None, some or all of
the other operations run, in any legal order. Freed memory goes back to the stream for which it was allocated, as in torch's caching
allocators: later operations of that stream may write to it. Storages can change their size, like those of torch's devices.
"""

import collections
import ctypes
import functools
import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import longshore
from longshore.transfer import device as _device
from longshore.units import fetching as _fetching

NUMPY = {
    **{torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(np.int16), torch.float16: np.dtype(np.float16)},
    **{torch.int64: np.dtype(np.int64), torch.int32: np.dtype(np.int32), torch.uint8: np.dtype(np.uint8)},
}


class Operation:
    """An operation of a stream, and its predecessors."""

    def __init__(self, act: Callable[[], None], after: list["Operation"]) -> None:
        self.act: Callable[[], None] | None = act
        self.after = after


class Stream:
    """A queue of operations, done in order."""

    def __init__(self) -> None:
        self.last: Operation | None = None
        self.waits: list[Operation] = []


class Block(np.ndarray):
    """Memory that reports the end of its last tensor."""


class Simulated:
    """A simulated ``longshore.transfer.device.Accelerator``, with further methods for a model on it.

    Args:
        seed: Seed of the order.
        ignored: A call ``"function.method"`` that does nothing, to drop the wait that a function of the package asks for.
    """

    def __init__(self, seed: int, ignored: str | None = None) -> None:
        self.random = random.Random(seed)
        #: Ways in which other operations advance at a wait. Most seeds have one way; every fourth seed draws a way at
        #: each wait.
        kinds = ["late", "first", "everything"]
        self.ways = [kinds[seed % 4]] if seed % 4 < len(kinds) else [*kinds, "some"]
        self.ignored = ignored
        self.main = Stream()
        self.pending: list[Operation] = []
        #: The device's memory by its address. No block is ever freed, so that a late operation still finds it.
        self.blocks: dict[int, np.ndarray] = {}
        self.freed: collections.deque[tuple[int, Stream]] = collections.deque()
        #: Present memory and owning stream of each resized storage, by the storage's first address. None while the
        #: storage has no memory.
        self.resized: dict[int, tuple[np.ndarray, Stream] | None] = {}
        #: Memory that storages have released, by stream and number of elements. Allocations take from here first.
        self.released: dict[tuple[Stream, int], list[np.ndarray]] = collections.defaultdict(list)
        #: Streams that still use memory after its owner has let go, by the memory's address.
        self.kept: dict[int, list[Stream]] = {}
        self.lock = threading.RLock()
        #: Bytes by address of host memory that torch's allocator has page-locked. `registered` has the registered
        #: memory in the same way. None where registering fails, as for seeds 4 to 7 of every eight.
        self.locked_by_torch: dict[int, int] = {}
        self.registered: dict[int, int] | None = {} if seed // 4 % 2 == 0 else None
        #: Number of copies by kind of host memory: ``"to registered"``, ``"from torch's"`` and so on.
        self.copies: collections.Counter[str] = collections.Counter()
        self._touching: dict[int, list[Operation]] = collections.defaultdict(list)
        self.running = threading.Event()
        self.running.set()
        # torch computes in one thread there too, so that sums have a fixed order.
        self.thread = ThreadPoolExecutor(1, "accelerator", lambda: torch.set_num_threads(1))
        self.local = threading.local()

    # Memory

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None, stream: Stream | None = None
    ) -> Tensor:
        """Returns unwritten device memory."""
        count, stream = max(1, int(np.prod(shape))), stream or self.current_stream(torch.device("cpu"))
        released = self.released[stream, count] if dtype is torch.float32 else []
        if released:
            memory = released.pop()
            self.blocks[memory.ctypes.data] = memory
            return torch.from_numpy(memory).view(tuple(shape))
        memory = np.empty(count, NUMPY[dtype])
        fill_with_nan(memory)
        address = memory.ctypes.data
        with self.lock:
            self.blocks[address] = memory
        block = memory.view(Block)
        weakref.finalize(block, self._freed, address, stream).atexit = False
        tensor = torch.from_numpy(block)
        return (tensor.view(dtype) if dtype is torch.bfloat16 else tensor)[: int(np.prod(shape))].view(tuple(shape))

    def _freed(self, address: int, stream: Stream) -> None:
        # Finalizers call this function, which may interrupt any code, so nothing but a queue is changed.
        self.freed.append((address, stream))

    def _use_again(self) -> None:
        """Lets the streams of freed memory write to it."""
        while self.freed:
            address, stream = self.freed.popleft()
            kept = self.kept.pop(address, [])
            if kept:
                users, stream = [stream, *kept], Stream()
                stream.waits = [operation for user in users for operation in self.record(user)]
            self._append(stream, functools.partial(fill_with_nan, self.blocks[address]))

    def has(self, tensor: Tensor) -> bool:
        return self._address(tensor) in self.blocks

    @staticmethod
    def _address(tensor: Tensor) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage().data_ptr()

    def alias(self, tensor: Tensor) -> Tensor:
        """Returns the tensor's present memory for an operation, without keeping it alive."""
        base = self._address(tensor)
        if base in self.resized:
            found = self.resized[base]
            assert found is not None, "it is used while its memory is away"
            with torch._C.DisableTorchFunctionSubclass():
                address = tensor.data_ptr() - base + found[0].ctypes.data
        else:
            address = tensor.data_ptr()  # a use of the parameter, for the package
        count = tensor.numel() * tensor.element_size()
        raw = np.frombuffer((ctypes.c_char * count).from_address(address), NUMPY[tensor.dtype])
        made = torch.from_numpy(raw)
        return (made.view(tensor.dtype) if tensor.dtype is torch.bfloat16 else made).view(tensor.shape)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Takes a storage's memory, or gives it memory of this thread's stream that had another owner before. Released memory belongs to
        the stream that allocated it."""
        base = storage.data_ptr()
        before = self.resized.get(base, (self.blocks[base], self.main))
        if before is not None and not nbytes:
            self.resized[base] = None
            if before[0] is not self.blocks[base]:  # its address names the storage
                self.released[before[1], len(before[0])].append(before[0])
            self.give(before[1], functools.partial(fill_with_nan, before[0]))
        elif before is None and nbytes:
            stream, like = self.current_stream(torch.device("cpu")), self.blocks[base]
            released = self.released[stream, len(like)]
            memory = released.pop() if released else np.empty_like(like)
            self.resized[base] = memory, stream
            self.give(stream, functools.partial(fill_with_nan, memory))

    def to_device(self, tensor: Tensor) -> Tensor:
        made = self.empty(tensor.shape, tensor.dtype)
        target, source = self.alias(made), tensor.clone()
        self.give(self.current_stream(tensor.device), lambda: target.copy_(source))
        return made

    # The package's interface

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self.local, "stream", self.main)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """In the block, operations of this thread go to a stream."""
        before, self.local.stream = self.current_stream(torch.device("cpu")), stream
        try:
            yield
        finally:
            self.local.stream = before

    def new_stream(self, device: torch.device) -> Stream:
        return Stream()

    def record(self, stream: Stream) -> list[Operation]:
        with self.lock:
            # Earlier waits of the stream come before the operation recorded now.
            return stream.waits + ([] if stream.last is None else [stream.last])

    def let_wait(self, stream: Stream, event: list[Operation]) -> None:
        if not self._is_ignored():
            with self.lock:
                stream.waits.extend(event)

    def wait(self, event: list[Operation]) -> None:
        if self._is_ignored():
            return
        if threading.current_thread() is not threading.main_thread():
            self.running.wait()
        self._finish(event)

    def keep_for(self, tensor: Tensor, stream: Stream) -> None:
        if not self._is_ignored():
            with self.lock:
                self.kept.setdefault(self._address(tensor), []).append(stream)

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns page-locked host memory. Its copies do not keep it alive: torch's allocator would, but only for copies that it knows."""
        memory = torch.empty(shape, dtype=dtype)
        if dtype.is_floating_point:
            memory.fill_(float("nan"))
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        with self.lock:
            # Earlier memory at these addresses is gone, so its entries go too.
            before = self.locked_by_torch.items()
            self.locked_by_torch = {at: size for at, size in before if at + size <= start or end <= at} | {start: memory.nbytes}
        return memory

    def register(self, address: int, nbytes: int, device: torch.device, *, read_only: bool = False) -> None:
        if self.registered is None:
            raise _device.NotRegistered("it may lock 0 bytes: raise the limit")
        assert all(address + nbytes <= start or start + size <= address for start, size in self.registered.items()), "registered twice"
        self.registered[address] = nbytes

    def unregister(self, address: int, device: torch.device) -> None:
        assert self.registered is not None
        assert all(operation.act is None for operation in self._touching.pop(address, [])), "a copy is under way"
        del self.registered[address]

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        to, of = self.alias(target), self.alias(source)
        (way, start), operation = self._way(target, source), self.give(stream, lambda: to.copy_(of))
        with self.lock:
            self.copies[way] += 1
        if operation is not None:
            self._touching[start].append(operation)

    def _way(self, target: Tensor, source: Tensor) -> tuple[str, int]:
        """Returns the direction and memory kind of a copy, and the address of its host memory. On a real device a copy of memory that is
        not page-locked blocks the host."""
        if self.has(target) and self.has(source):
            return "on the device", 0
        for direction, tensor in (("to", target), ("from", source)):
            if self.has(tensor):
                continue
            address = self._address(tensor)
            for kind, memory in (("torch's", self.locked_by_torch), ("registered", self.registered or {})):
                for start, size in memory.items():
                    if start <= address < start + size:
                        assert address + tensor.nbytes <= start + size, "a copy reaches beyond its memory"
                        return f"{direction} {kind}", start
        raise AssertionError("a copy of memory that is not page-locked")

    def run(self, stream: Stream, act: Callable[..., None], tensors: Sequence[Tensor | None]) -> None:
        there = [None if tensor is None else self.alias(tensor) for tensor in tensors]
        self.give(stream, lambda: act(*there))

    def to_host(self, tensor: Tensor) -> Tensor:
        self._finish(self.record(self.current_stream(tensor.device)))
        return self.alias(tensor).clone()

    def _is_ignored(self) -> bool:
        frame = sys._getframe(1)
        caller = frame.f_back
        assert caller is not None
        return self.ignored == f"{caller.f_code.co_name}.{frame.f_code.co_name}"

    # Execution

    def give(self, stream: Stream, act: Callable[[], None]) -> Operation | None:
        """Queues an operation on a stream."""
        with self.lock:
            self._use_again()
            return self._append(stream, act)

    def _append(self, stream: Stream, act: Callable[[], None]) -> Operation:
        after = stream.waits + ([stream.last] if stream.last is not None else [])
        stream.waits = []
        stream.last = Operation(act, [operation for operation in after if operation.act is not None])
        self.pending.append(stream.last)
        return stream.last

    @contextmanager
    def held(self) -> Iterator[None]:
        """In the block only the main thread gets operations done, as on a very slow device."""
        self.running.clear()
        try:
            yield
        finally:
            self.running.set()

    def synchronize(self) -> None:
        with self.lock:
            everything = list(self.pending)
        self._finish(everything)

    def _finish(self, wanted: list[Operation]) -> None:
        self.thread.submit(self._do, wanted).result()

    def _do(self, wanted: list[Operation]) -> None:
        """Runs the wanted operations and their predecessors. ``ways`` decides which other operations run: none, some or all
        possible ones before, or all that are queued."""
        with self.lock:
            self._use_again()
            way = self.random.choice(self.ways)
            needed = needs(wanted)
            after_wanted = dependents(self.pending, wanted)
            if way != "late":
                others = [o for o in self.pending if o not in needed and o not in after_wanted]
                if way == "some":
                    others = [o for o in others if self.random.random() < 0.5]
                self._all(needs(others), needed)
            self._all(needed)
            if way == "everything":
                self._all(list(self.pending), [])

    def _is_ready(self, operation: Operation) -> bool:
        """Returns whether an operation can be done once its predecessors are."""
        return True

    def _wait_for_others(self, left: list[Operation]) -> None:
        """Waits until one of these operations may have become ready. Called when none is ready."""
        raise AssertionError("operations wait for each other")

    def _all(self, operations: list[Operation], awaited: list[Operation] | None = None) -> None:
        """Does all operations in a random legal order. Given ``awaited``, leaves operations that need another wait."""
        left = operations
        while left := [operation for operation in left if operation.act is not None]:
            ready = [o for o in left if all(before.act is None for before in o.after) and self._is_ready(o)]
            if not ready:
                worth_it = left if awaited is None else [operation for operation in left if operation in awaited]
                if not worth_it:
                    return
                self._wait_for_others(worth_it)
                continue
            chosen = self.random.choice(ready)
            act, chosen.act, chosen.after = chosen.act, None, []
            assert act is not None
            with torch.no_grad():
                act()
            self.pending.remove(chosen)


def needs(wanted: list[Operation]) -> list[Operation]:
    """Returns these operations and all their pending predecessors."""
    found: dict[int, Operation] = {}
    stack = list(wanted)
    while stack:
        operation = stack.pop()
        if operation.act is not None and id(operation) not in found:
            found[id(operation)] = operation
            stack.extend(operation.after)
    return list(found.values())


def dependents(pending: list[Operation], wanted: list[Operation]) -> list[Operation]:
    """Returns the pending successors of the wanted operations."""
    marked = {id(operation) for operation in wanted}
    found = []
    for operation in pending:  # in the order of queueing
        if id(operation) in marked or any(id(before) in marked for before in operation.after):
            marked.add(id(operation))
            found.append(operation)
    return found


def fill_with_nan(memory: np.ndarray) -> None:
    if memory.dtype in (np.float32, np.float16):
        memory.fill(np.nan)
    else:
        memory.fill(0x7FC0 if memory.dtype == np.int16 else -1)


class Immediate(Simulated):
    """Does everything at once, so that the host may read its memory. Reference for the late devices."""

    def give(self, stream: Stream, act: Callable[[], None]) -> Operation | None:
        self.thread.submit(torch.no_grad()(act)).result()
        return None

    def _use_again(self) -> None:
        pass


class Linear(torch.autograd.Function):
    """``x @ w.T + b`` on the simulated device. The stream computes the results late, so earlier reads find NaN."""

    @staticmethod
    def forward(ctx: Any, device: Simulated, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = device.empty((x.shape[0], w.shape[0]), w.dtype)
        out, of, by, plus = (device.alias(tensor) for tensor in (y, x, w, b))
        device.give(device.current_stream(w.device), lambda: out.copy_(of @ by.T + plus))
        ctx.device = device
        ctx.save_for_backward(x, w)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        device, (x, w) = ctx.device, ctx.saved_tensors
        gx, gw = device.empty(x.shape, x.dtype), device.empty(w.shape, w.dtype)
        gb = device.empty((w.shape[0],), w.dtype)
        to_x, to_w, to_b, of, by, g = (device.alias(tensor) for tensor in (gx, gw, gb, x, w, gradient))

        def act() -> None:
            to_w.copy_(g.T @ of)
            to_b.copy_(g.sum(0))
            to_x.copy_(g @ by)

        device.give(device.current_stream(w.device), act)
        return None, gx, gw, gb


class Loss(torch.autograd.Function):
    """The mean of squares of ``tanh`` less the target, on the simulated device."""

    @staticmethod
    def forward(ctx: Any, device: Simulated, y: Tensor, target: Tensor) -> Tensor:
        loss = device.empty((1,), y.dtype)
        out, of, goal = (device.alias(tensor) for tensor in (loss, y, target))
        device.give(device.current_stream(y.device), lambda: out.copy_((of.tanh() - goal).square().mean()))
        ctx.device = device
        ctx.save_for_backward(y, target)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        device, (y, target) = ctx.device, ctx.saved_tensors
        gy = device.empty(y.shape, y.dtype)
        out, of, goal = (device.alias(tensor) for tensor in (gy, y, target))
        scale = 2 / y.numel()
        device.give(
            device.current_stream(y.device),
            lambda: out.copy_((of.tanh() - goal) * (1 - of.tanh().square()) * scale),
        )
        return None, gy, None


class Layer(nn.Module):
    def __init__(self, device: Simulated, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.device = device
        self.weight, self.bias = (
            nn.Parameter(device.to_device(torch.randn(*shape, generator=generator) * 0.3)) for shape in ((width, width), (width,))
        )

    def forward(self, x: Tensor) -> Tensor:
        return Linear.apply(self.device, x, self.weight, self.bias)


class Layers(nn.Module):
    """Linear layers on the simulated device, and a layer for evaluations alone."""

    def __init__(self, device: Simulated, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.device, self.width = device, width
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(Layer(device, width, generator) for _ in range(depth))
        self.last = Layer(device, width, generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def batch(self, step: int, outputs: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(2 * step + outputs)
        return self.device.to_device(torch.randn(6, self.width, generator=generator).tanh())

    def loss(self, step: int) -> Tensor:
        return Loss.apply(self.device, self(self.batch(step)), self.batch(step, outputs=True))

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        return self.last(self(self.batch(step)))

    @torch.no_grad()
    def part(self, step: int, layers: slice) -> Tensor:
        """Returns the output of some of the layers for a batch."""
        x = self.batch(step)
        for layer in self.layers[layers]:
            x = layer(x)
        return x


def ended(device: Simulated, model: nn.Module, optimizer: longshore.AdamW, results: list[Tensor]) -> list[Tensor]:
    """Ends a run. Returns these results and the last weights, once the device has done everything."""
    optimizer.flush()
    for parameter in model.parameters():
        with longshore.GatheredParameters(parameter) if optimizer.is_in_units else nullcontext():
            results.append(parameter.detach())
            device.synchronize()
            results[-1] = device.alias(results[-1]).clone()
    device.synchronize()
    found = [device.alias(result).clone() for result in results]
    optimizer.close()
    return found


def advance(fetch: _fetching.Fetch) -> None:
    """Replaces the package's function of this name, and first waits until all weights are in the host's memory."""
    if fetch.read is not None:
        wait([fetch.read])
    fetch._copy()


@contextmanager
def on(device: Simulated) -> Iterator[pytest.MonkeyPatch]:
    """In the block the package uses the simulated accelerator, whose tensors' storages can change their size."""
    resize, resizable = torch.UntypedStorage.resize_, torch.UntypedStorage.resizable

    def is_there(storage: torch.UntypedStorage) -> bool:
        return storage.data_ptr() in device.blocks

    def resized(storage: torch.UntypedStorage, nbytes: int) -> None:
        (device.resize if is_there(storage) else resize)(storage, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device, "accelerator", device)
        patch.setattr(torch.UntypedStorage, "resize_", resized)
        patch.setattr(torch.UntypedStorage, "resizable", lambda storage: is_there(storage) or resizable(storage))
        patch.setattr(_fetching.Fetch, "advance", advance)
        yield patch
        gc.collect()


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Returns whether these are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
