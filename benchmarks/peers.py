"""Compares whole optimizer steps and training steps with torch's and DeepSpeed's: ``python benchmarks/peers.py``.

All ways take steps by turns in one run. A way whose package is not installed is left out, and named.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from peer_ways import BASE, Ways, optimizer_steps, server, stage_3_steps, training_steps

#: Width of the linear layers at stage 3.
_WIDTH = 1024
#: Uncounted rounds: the first ones open jobs and allocate.
_WARMUP = 2


def _timed(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _by_turns(ways: dict[str, Callable[[], Any]], rounds: int, in_a_row: int) -> dict[str, list[float]]:
    """Returns the seconds of each way's steps. Each round takes ``in_a_row`` steps of every way, in rotating order, so that a
    disturbance of the host affects all ways. An uncounted step precedes several steps in a row, since the previous way's leftover work
    falls into it."""
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
    """Prints each way's median times of whole optimizer steps and training steps. Prints also the median ratio over the rounds to
    Longshore's time by shared memory. A part with 0 elements or layers is left out.

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
            # Frees the ways' memory before the next part.
            del ways
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=float, default=50e6, help="parameters of the optimizer step (default 50e6; 0: none)")
    parser.add_argument("--training", type=float, default=25e6, help="parameters of the training step (default 25e6; 0: none)")
    parser.add_argument("--layers", type=int, default=24, help="linear layers of the training step at stage 3 (default 24; 0: none)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a training step (default 8)")
    parser.add_argument("--length", type=int, default=8, help="tokens of each (default 8)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch's threads (default: one a core)")
    parser.add_argument(
        "--ways",
        default="longshore,torch,deepspeed,alone",
        help="words of the ways' names. Each of ours takes 24 bytes a parameter, of torch and DeepSpeed 16",
    )
    parser.add_argument("--device", default="cpu", help="where the models are, as cuda (default cpu)")
    parser.add_argument(
        "--in-a-row",
        type=int,
        help="steps of a way in each turn: several show what it does while the next step computes (default 1, and 4 on a device)",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = int(args.elements), int(args.training), args.layers
    in_a_row = args.in_a_row or (1 if args.device == "cpu" else 4)
    peers(*sizes, args.batch, args.length, args.rounds, args.ways, device=args.device, in_a_row=in_a_row)


if __name__ == "__main__":
    main()
