"""A training run of `benchmarks/plan.py prefetch`: linear layers in units, each with a timed wait for its compute. Prints the times of its
steps.

Usage: benchmarks/plan_units.py SERVERS LINK UNITS COMPUTE DELAY

LINK is bytes a second; COMPUTE is the compute of each use of a unit, in forward and in backward, as a multiple of the unit's time on the link.
"""

import json
import statistics
import sys
import time

import torch
from torch import nn

import longshore

WIDTH, ROOM = 2048, 4


class Wait(torch.autograd.Function):
    """Sleeps for ``seconds`` in forward, and again in backward."""

    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class Block(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.seconds = seconds

    def forward(self, value):
        return Wait.apply(self.linear(value), self.seconds)


def main():
    servers, link, units, compute, delay = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    unit_bytes = 2 * WIDTH * WIDTH
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(compute * unit_bytes / link) for _ in range(units)))
    value = torch.randn(8, WIDTH, dtype=torch.bfloat16, requires_grad=True)  # a gradient for the input makes backward pass the first wait

    def passes():
        start = time.perf_counter()
        model(value).float().square().mean().backward()
        return time.perf_counter() - start

    alone = [passes() for _ in range(3)]
    model.zero_grad()
    optimizer = longshore.AdamW(
        model.named_parameters(), lr=1e-4, servers=servers, job=f"units-{units}-{compute}-{delay}", streaming=True, delay=delay, warmup_steps=0
    )
    # Holds ``ROOM`` units, and the gradients of one.
    longshore.shard(model, optimizer, budget=(ROOM + 1) * unit_bytes, units=list(model))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        passes()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    optimizer.close()
    # The first two steps learn the order, and pull resident units.
    print(json.dumps({"step_s": statistics.median(times[2:]), "alone_s": statistics.median(alone), "unit_bytes": unit_bytes, "room": ROOM}))


if __name__ == "__main__":
    main()
