"""``python -m longshore.bench``: what steps take here, beside torch's and DeepSpeed's.

``peers`` takes whole optimizer steps and whole training steps by turns in one run. What is not installed is left out, and said.
``overhead`` takes apart what Python adds to a step.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import longshore
from longshore._peers import BASE, Ways, optimizer_steps, server, stage_3_steps, training_steps
from longshore._weights import Weights

_LARGEST = 4 * 1024 * 1024
#: Of the linear layers at stage 3.
_WIDTH = 1024
#: Rounds that are not counted: the first ones open jobs and allocate.
_WARMUP = 2


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


def _timed(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _by_turns(ways: dict[str, Callable[[], Any]], rounds: int, in_a_row: int) -> dict[str, list[float]]:
    """Seconds of each way's steps. Each round takes so many of all, in another order, so that what disturbs the host disturbs all. Where
    there are several, the one before them is not counted: it has what the way before has left to do, and nothing left of its own."""
    order = list(ways)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(_WARMUP + rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            if in_a_row > 1:
                ways[name]()
            taken = statistics.mean(_timed(ways[name]) for _ in range(in_a_row))
            if number >= _WARMUP:
                times[name].append(taken)
    return times


def _print_table(ways: Ways, times: dict[str, list[float]]) -> None:
    base = times.get(BASE)
    print(f"{'':34} {'ms a step':>10} {'min..max':>16} {'times ours':>11}")
    for name, taken in times.items():
        milliseconds = sorted(value * 1e3 for value in taken)
        span = f"{milliseconds[0]:.1f}..{milliseconds[-1]:.1f}"
        ratio = f"{statistics.median(t / b for t, b in zip(taken, base, strict=True)):.2f}" if base else ""
        loss = ways.loss(name)
        last = "" if loss is None else f"   loss {loss:.3f}"
        print(f"{name:34} {statistics.median(milliseconds):10.1f} {span:>16} {ratio:>11}{last}")
    for name, why in ways.missing.items():
        print(f"{name:34} not measured: {why}")


def _conditions(rounds: int, in_a_row: int, device: torch.device) -> str:
    load = os.getloadavg()[0]
    steps = f" of {in_a_row} steps" if in_a_row > 1 else ""
    where = "" if device.type == "cpu" else f", device {_name(device)}"
    return f"{rounds} rounds{steps} by turns, torch on {torch.get_num_threads()} threads, {os.cpu_count()} cores, load {load:.1f}{where}"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def peers(
    elements: int,
    training_elements: int,
    layers: int,
    batch: int,
    length: int,
    rounds: int,
    wanted: str,
    *,
    device: str = "cpu",
    in_a_row: int = 1,
) -> dict[str, list[float]]:
    """Prints the median times of whole optimizer steps and of whole training steps by each way, and the median over the rounds of
    how many times ours by shared memory each takes. With 0 elements or layers a part is left out.

    Returns:
        Seconds by part and way, as in ``"training: longshore, TCP"``.
    """
    found = {}
    where = torch.device(device)
    for part, size in (("step", elements), ("training", training_elements), ("stage 3", layers)):
        if not size:
            continue
        with server() as address:
            if part == "step":
                print(f"\nOptimizer step, {size / 1e6:.0f} M parameters, 16-bit gradients in, 16-bit weights out, clipping")
                ways = optimizer_steps(size, wanted, address, where)
            elif part == "stage 3":
                print(f"\nTraining step of {size} linear layers of {_WIDTH}, batch {batch}, bf16, clipping; ours: stage 3, and stage 2")
                ways = stage_3_steps(size, _WIDTH, batch, wanted, address, where)
            else:
                print(f"\nTraining step of a GPT, {size / 1e6:.0f} M parameters, batch {batch} of {length} tokens, bf16, clipping")
                ways = training_steps(size, batch, length, wanted, address, where)
            print(_conditions(rounds, in_a_row, where))
            times = _by_turns(ways.steps, rounds, in_a_row)
            _print_table(ways, times)
            found.update({f"{part}: {name}": taken for name, taken in times.items()})
            ways.close()
            # Their memory goes back before the next part.
            del ways
    return found


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


def _streamed(optimizer: longshore.AdamW, params: list[tuple[str, nn.Parameter]]) -> Callable[[], None]:
    """A step whose gradients come one after the other, as backward's hooks take them."""
    stream = optimizer._stream
    assert stream is not None
    gradients = [parameter.grad for _, parameter in params]

    def step() -> None:
        for _, parameter in params:
            parameter.view(-1)  # as forward does, which reads what is awaited
        for (_, parameter), gradient in zip(reversed(params), reversed(gradients), strict=True):
            parameter.grad = gradient
            stream._take(parameter)
        optimizer.step()

    return step


def overhead(tensors: int = 400, rounds: int = 50, *, streaming: bool = False) -> float:
    """Prints what a step of small tensors takes, and returns Python's own share in seconds: the median of the CPU time of
    this thread outside of the Rust half. In streaming mode that is what the hooks of backward, the first uses of parameters and
    ``step`` do together, without autograd."""
    params = _parameters(tensors * 1024, tensors, torch.float32)
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
        whole.append(_timed(step))
        own.append(time.thread_time() - start - clocked.seconds)
    share = statistics.median(own)
    mode = "streaming" if streaming else "safe"
    print(f"{tensors} tensors, {mode} mode: a step takes {statistics.median(whole) * 1e3:.2f} ms, of which Python's own {share * 1e3:.2f} ms")
    return share


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m longshore.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    whole = commands.add_parser("peers", help="whole steps beside torch's and DeepSpeed's")
    whole.add_argument("--elements", type=float, default=50e6, help="parameters of the optimizer step (default 50e6; 0: none)")
    whole.add_argument("--training", type=float, default=25e6, help="parameters of the training step (default 25e6; 0: none)")
    whole.add_argument("--layers", type=int, default=24, help="linear layers of the training step at stage 3 (default 24; 0: none)")
    whole.add_argument("--batch", type=int, default=8, help="sequences of a training step (default 8)")
    whole.add_argument("--length", type=int, default=8, help="tokens of each (default 8)")
    whole.add_argument("--rounds", type=int, default=9)
    whole.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch's threads (default: one a core)")
    whole.add_argument(
        "--ways",
        default="longshore,torch,deepspeed,alone",
        help="words of the ways' names. Each of ours takes 24 bytes a parameter, of torch and DeepSpeed 16",
    )
    whole.add_argument("--device", default="cpu", help="where the models are, as cuda (default cpu)")
    whole.add_argument(
        "--in-a-row",
        type=int,
        help="steps of a way in each turn: several show what it does while the next step computes (default 1, and 4 on a device)",
    )
    part = commands.add_parser("overhead", help="Python's share of a step")
    part.add_argument("--tensors", type=int, default=400)
    part.add_argument("--streaming", action="store_true", help="gradients are taken one by one, and weights are read as they are used")
    given = parser.parse_args()
    if given.command == "peers":
        torch.set_num_threads(given.threads)
        sizes = int(given.elements), int(given.training), given.layers
        in_a_row = given.in_a_row or (1 if given.device == "cpu" else 4)
        peers(*sizes, given.batch, given.length, given.rounds, given.ways, device=given.device, in_a_row=in_a_row)
    else:
        overhead(given.tensors, streaming=given.streaming)


if __name__ == "__main__":
    main()
