"""Python's own share of a step of small tensors: ``python benchmarks/overhead.py [--tensors N] [--streaming]``."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import longshore
from longshore.transfer.weights import Weights


def _parameters(tensors: int) -> list[tuple[str, nn.Parameter]]:
    """Returns fp32 parameters of 1024 elements, with gradients."""
    made = []
    generator = torch.Generator().manual_seed(0)
    for index in range(tensors):
        parameter = nn.Parameter(torch.randn(1024, generator=generator) * 0.02)
        parameter.grad = torch.randn(1024, generator=generator) * 0.01
        made.append((f"layer{index}", parameter))
    return made


class _Clocked:
    """A job that sums the CPU time of its calls on this thread, unaffected by other processes."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._job, name)

        def call(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return inner(*args)
            finally:
                self.seconds += time.thread_time() - start

        return call


def _streamed(optimizer: longshore.AdamW, params: list[tuple[str, nn.Parameter]]) -> Callable[[], None]:
    """Returns a step whose gradients come one after the other, as backward's hooks take them."""
    stream = optimizer._stream
    assert stream is not None
    gradients = [parameter.grad for _, parameter in params]

    def step() -> None:
        for _, parameter in params:
            parameter.data_ptr()  # as forward does: the use reads awaited weights
        for (_, parameter), gradient in zip(reversed(params), reversed(gradients), strict=True):
            parameter.grad = gradient
            stream._take(parameter)
        optimizer.step()

    return step


def overhead(tensors: int = 400, rounds: int = 50, *, streaming: bool = False) -> float:
    """Prints the time of a step of small tensors. Returns Python's own share in seconds: the median CPU time of this thread outside of the
    Rust half. In streaming mode the share covers backward's hooks, the first uses of parameters and ``step``, without autograd."""
    params = _parameters(tensors)
    optimizer = longshore.AdamW(params, lr=1e-4, streaming=streaming)
    step = _streamed(optimizer, params) if streaming else optimizer.step
    step()
    connection = optimizer._connection
    assert connection is not None and isinstance(connection.weights, Weights)
    clocked: Any = _Clocked(connection.job)
    connection.job = connection.weights._job = clocked
    whole, own = [], []
    for _ in range(rounds):
        clocked.seconds = 0.0
        start = time.thread_time()
        began = time.perf_counter()
        step()
        whole.append(time.perf_counter() - began)
        own.append(time.thread_time() - start - clocked.seconds)
    share = statistics.median(own)
    mode = "streaming" if streaming else "safe"
    print(f"{tensors} tensors, {mode} mode: a step takes {statistics.median(whole) * 1e3:.2f} ms, of which Python's own {share * 1e3:.2f} ms")
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--streaming", action="store_true", help="gradients are taken one by one, and weights are read as they are used")
    args = parser.parse_args()
    overhead(args.tensors, streaming=args.streaming)


if __name__ == "__main__":
    main()
