"""Python's own share of a step of small tensors: ``python benchmarks/overhead.py [--tensors N] [--streaming] [--device]``."""

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import longshore
from longshore.transfer import device
from longshore.transfer.weights import Weights


def _parameters(tensors: int, where: str) -> list[tuple[str, nn.Parameter]]:
    """Returns fp32 parameters of 1024 elements on a device, with gradients."""
    made = []
    generator = torch.Generator().manual_seed(0)
    for index in range(tensors):
        parameter = nn.Parameter((torch.randn(1024, generator=generator) * 0.02).to(where))
        parameter.grad = (torch.randn(1024, generator=generator) * 0.01).to(where)
        made.append((f"layer{index}", parameter))
    return made


class _Clocked:
    """A job that sums the CPU time of its calls on their threads, without calls back into Python, unaffected by other processes."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._lock = threading.Lock()
        self.seconds = 0.0

    def _count(self, act: Callable[..., Any], args: Sequence[Any], sign: int) -> Any:
        start = time.thread_time()
        try:
            return act(*args)
        finally:
            with self._lock:
                self.seconds += sign * (time.thread_time() - start)

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._job, name)

        def call(*args: Any) -> Any:
            return self._count(inner, [self._back(arg) if callable(arg) else arg for arg in args], 1)

        return call

    def _back(self, act: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self._count(act, args, -1)


class OnHost(device.Accelerator):
    """A device in the host's memory that does everything at once."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._addresses = {tensor.data_ptr() for tensor in tensors if tensor is not None}

    def has(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self._addresses

    def current_stream(self, device: torch.device) -> Any:
        return "main"

    def new_stream(self, device: torch.device) -> Any:
        return "copies"

    def record(self, stream: Any) -> Any:
        return stream

    def let_wait(self, stream: Any, event: Any) -> None:
        pass

    wait = register = unregister = lambda self, *_, **__: None  # type: ignore[assignment]

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, stream: Any = None) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def run(self, stream: Any, act: Callable[..., object], tensors: Sequence[Tensor | None]) -> None:
        act(*tensors)


def _python_seconds() -> float:
    """Returns the CPU time of all threads that Python started."""
    clocks = (time.pthread_getcpuclockid(thread.ident) for thread in threading.enumerate() if thread.ident is not None)
    return sum(map(time.clock_gettime, clocks))


def _streamed(optimizer: longshore.AdamW, params: list[tuple[str, nn.Parameter]]) -> Callable[[], None]:
    """Returns a step whose gradients come one after the other, as backward's hooks take them."""
    stream = optimizer._stream
    assert stream is not None
    gradients = [parameter.grad for _, parameter in params]

    def step() -> None:
        for _, parameter in params:
            parameter.data_ptr()  # as forward does: the use reads awaited weights
        stream._step.running.add(-1)  # as a backward's first gradient does: the others take the short way
        for (_, parameter), gradient in zip(reversed(params), reversed(gradients), strict=True):
            parameter.grad = gradient
            stream._take(parameter)
        optimizer.step()

    return step


def overhead(tensors: int = 400, rounds: int = 50, *, streaming: bool = False, where: str = "cpu") -> float:
    """Prints the time of a step of small tensors. Returns Python's own share in seconds: the median CPU time of Python's threads outside of
    the Rust half. In streaming mode the share covers backward's hooks, the first uses of parameters and ``step``, without autograd.
    Parameters and gradients are on the device ``where``, or on a simulated one."""
    params = _parameters(tensors, "cpu" if where == "simulated" else where)
    before, threads = device.accelerator, torch.get_num_threads()
    if where == "simulated":
        torch.set_num_threads(1)  # a device's work takes no threads of the host
        device.accelerator = OnHost([*(parameter for _, parameter in params), *(parameter.grad for _, parameter in params)])
    try:
        return _overhead(params, rounds, streaming, where)
    finally:
        vars(device.accelerator).pop("wait", None)
        device.accelerator = before
        torch.set_num_threads(threads)


def _overhead(params: list[tuple[str, nn.Parameter]], rounds: int, streaming: bool, where: str) -> float:
    optimizer = longshore.AdamW(params, lr=1e-4, streaming=streaming)
    step = _streamed(optimizer, params) if streaming else optimizer.step
    step()
    connection = optimizer._connection
    assert connection is not None and isinstance(connection.weights, Weights)
    clocked: Any = _Clocked(connection.job)
    connection.job = connection.weights._job = clocked
    wait = device.accelerator.wait
    # A thread that waits for a GPU spins without the interpreter.
    device.accelerator.wait = lambda event: clocked._count(wait, [event], 1)  # type: ignore[method-assign]
    stream = optimizer._stream
    if stream is not None and stream._pusher is not None:
        stream._pusher._job = clocked
    whole, own = [], []
    for _ in range(rounds):
        clocked.seconds = 0.0
        start = _python_seconds()
        began = time.perf_counter()
        step()
        whole.append(time.perf_counter() - began)
        own.append(_python_seconds() - start - clocked.seconds)
    optimizer.close()
    share, tensors = statistics.median(own), len(params)
    mode = f"{'streaming' if streaming else 'safe'} mode, device {where}"
    print(
        f"{tensors} tensors, {mode}: a step takes {statistics.median(whole) * 1e3:.2f} ms, of which Python's own {share * 1e3:.2f} ms, "
        f"{share / tensors * 1e6:.1f} us a tensor"
    )
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--streaming", action="store_true", help="gradients are taken one by one, and weights are read as they are used")
    parser.add_argument("--device", action="store_true", help="parameters and gradients are on a GPU, or without one on a simulated device")
    args = parser.parse_args()
    where = "cpu" if not args.device else "cuda" if torch.cuda.is_available() else "simulated"
    overhead(args.tensors, streaming=args.streaming, where=where)


if __name__ == "__main__":
    main()
