"""``python -m longshore.bench``: what an optimizer step takes here, beside torch's own.

``peers`` takes whole steps by turns in one run, on equal parameters: 16-bit gradients in, 16-bit weights out, clipping on.
``overhead`` takes apart what Python adds to a step.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import longshore

_LARGEST = 4 * 1024 * 1024


def _parameters(elements: int, tensors: int | None, dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    """Parameters with gradients: so many tensors, or as many as make none larger than a large layer's."""
    tensors = tensors or math.ceil(elements / _LARGEST)
    made = []
    generator = torch.Generator().manual_seed(0)
    for index in range(tensors):
        parameter = nn.Parameter((torch.randn(elements // tensors, generator=generator) * 0.02).to(dtype))
        parameter.grad = (torch.randn(elements // tensors, generator=generator) * 0.01).to(dtype)
        made.append((f"layer{index}", parameter))
    return made


class _Torch:
    """torch's fused AdamW on fp32 masters, with the casts that 16-bit weights and gradients need."""

    def __init__(self, params: list[tuple[str, nn.Parameter]]) -> None:
        self._params = [parameter for _, parameter in params]
        self._masters = [parameter.detach().float() for parameter in self._params]
        self._gradients = [torch.empty_like(master) for master in self._masters]
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-4, fused=True)

    def step(self) -> None:
        gradients: list[Tensor] = [parameter.grad for parameter in self._params if parameter.grad is not None]
        torch._foreach_copy_(self._gradients, gradients)
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._masters)


def _serve() -> tuple[subprocess.Popen[str], str]:
    code = "import sys; from longshore.__main__ import serve; sys.exit(serve())"
    command = [sys.executable, "-c", code, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def _timed(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def peers(elements: int, rounds: int) -> None:
    """Prints the median time of a whole step for each way, and the median of its rounds' ratios to torch's."""
    process, address = _serve()
    try:
        ways: dict[str, Any] = {"torch fused, with casts": _Torch(_parameters(elements, None, torch.bfloat16))}
        for name, options in {
            "longshore, in this process": {},
            "longshore, shared memory": {"servers": address, "job": "memfd", "transport": "memfd"},
            "longshore, TCP": {"servers": address, "job": "tcp", "transport": "tcp"},
        }.items():
            params = _parameters(elements, None, torch.bfloat16)
            ways[name] = longshore.AdamW(params, lr=1e-4, max_grad_norm=1.0, **options)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 2):
            for name, way in ways.items():
                taken = _timed(way.step)
                if number >= 2:  # the first ones open jobs and allocate
                    times[name].append(taken)
    finally:
        process.kill()
        process.wait()
    base = times["torch fused, with casts"]
    print(f"{elements / 1e6:.0f} M parameters, {rounds} rounds by turns, torch on {torch.get_num_threads()} threads")
    print(f"{'way':28} {'ms a step':>10} {'min..max':>15} {'times as fast':>14}")
    for name, taken in times.items():
        milliseconds = sorted(value * 1e3 for value in taken)
        ratio = statistics.median(b / t for b, t in zip(base, taken, strict=True))
        span = f"{milliseconds[0]:.1f}..{milliseconds[-1]:.1f}"
        print(f"{name:28} {statistics.median(milliseconds):10.1f} {span:>15} {ratio:14.2f}")


class _Clocked:
    """A job that sums up the CPU time of its calls on this thread, which other processes do not add to."""

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


def overhead(tensors: int = 400, rounds: int = 50) -> float:
    """Prints what a step of small tensors takes, and returns Python's own share in seconds: the median of the CPU time of
    this thread outside of the Rust half."""
    params = _parameters(tensors * 1024, tensors, torch.float32)
    optimizer = longshore.AdamW(params, lr=1e-4)
    optimizer.step()
    connection = optimizer._connection
    assert connection is not None
    clocked = _Clocked(connection.job)
    connection.job = clocked
    whole, own = [], []
    for _ in range(rounds):
        clocked.seconds = 0.0
        start = time.thread_time()
        whole.append(_timed(optimizer.step))
        own.append(time.thread_time() - start - clocked.seconds)
    share = statistics.median(own)
    print(f"{tensors} tensors: a step takes {statistics.median(whole) * 1e3:.2f} ms, of which Python's own {share * 1e3:.2f} ms")
    return share


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m longshore.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    whole = commands.add_parser("peers", help="whole optimizer steps beside torch's")
    whole.add_argument("--elements", type=float, default=50e6, help="parameters (default 50e6); each takes about 100 bytes here")
    whole.add_argument("--rounds", type=int, default=9)
    part = commands.add_parser("overhead", help="Python's share of a step")
    part.add_argument("--tensors", type=int, default=400)
    given = parser.parse_args()
    if given.command == "peers":
        peers(int(given.elements), given.rounds)
    else:
        overhead(given.tensors)


if __name__ == "__main__":
    main()
