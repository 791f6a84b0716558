"""A rank of test_order_of_ranks.py, which trains on a simulated accelerator. Starts like a process of torchrun."""

import contextlib
import faulthandler
import functools
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import rank_program
import torch
import torch._dynamo  # the first optimizer would import it
from accelerator import Immediate, Layers, Linear, Loss, Simulated
from ranks_on_a_device import Late, LateInUnits, Mail
from torch import Tensor, distributed
from units import weight_bytes
from units_on_a_device import Cut, advance, ended, on

import longshore
from longshore.distributed import collectives, gathered
from longshore.transfer import device as _device
from longshore.transfer import partitions
from longshore.units import fetch

STEPS = 4
DEPTH = 5
#: Elements that fill a bucket: two of the larger weights.
BUCKET = 1000

mail: list[Mail] = []
runs = itertools.count()


class Towers(Layers):
    """Three towers of two layers each. A bucket of gradients has parts of two towers."""

    def __init__(self, device: Simulated) -> None:
        super().__init__(device, depth=6)
        del self.head, self.head_bias

    def in_order(self) -> list[tuple[str, Tensor]]:
        """Returns parameters, each layer's together."""
        return sorted(self.named_parameters(), key=lambda named: named[0].split(".")[1])

    def tower(self, first: int, batch: int) -> Tensor:
        hidden = self.batch(batch)
        for weight, bias in zip(self.weights[first::3], self.biases[first::3], strict=True):
            hidden = Linear.apply(self.device, hidden, weight, bias)
        return hidden

    def loss_of(self, first: int, batch: int) -> Tensor:
        return Loss.apply(self.device, self.tower(first, batch), self.batch(batch, outputs=True))


def put_gradients(model: Towers, loss: Tensor) -> None:
    """Puts gradients of the last layer's parameters there without a hook."""
    layer = [model.weights[4], model.biases[4]]
    for parameter, gradient in zip(layer, torch.autograd.grad(loss, layer), strict=True):
        parameter.grad = gradient


def train(device: Simulated, **options: Any) -> list[Any]:
    """Trains towers on two streams, ordered by the caller as torch requires. In every other step the first layer has no gradient, so its
    bucket is reduced at the end of the step. In one step the caller puts gradients there directly. Returns the results of each step, and
    the last weights."""
    model = Towers(device)
    optimizer = longshore.AdamW(model.in_order(), lr=1e-2, missing_gradients="zeros", **options)
    optimizer.open()
    other = device.new_stream(torch.device("cpu"))
    results = []
    for step in range(STEPS):
        batch = step if options["partition"] == "all-reduced" else step * distributed.get_world_size() + distributed.get_rank()
        device.let_wait(other, device.record(device.main))
        with device.on(other), torch.no_grad():
            results.append(model.tower(0, batch))
        first, second = (device.main, other) if step % 2 == 0 else (other, device.main)
        for tower, stream in [(3 * (step % 2), first), (1, second), (2, first)]:
            with device.on(stream):
                loss = model.loss_of(tower, batch)
                if (step, tower) == (2, 1):
                    put_gradients(model, loss)
                else:
                    loss.backward()
                results.append(device.to_device(torch.full((model.width,), float(step))))
        device.let_wait(device.main, device.record(other))
        optimizer.step()
        optimizer.zero_grad()
        with device.on(other):
            results.append(device.to_device(torch.full((model.width,), float(step))))
    optimizer.flush()
    device.synchronize()
    found = [device.alias(result).clone() for result in [*results, *(parameter.detach() for parameter in model.parameters())]]
    optimizer.close()
    return found


def train_units(device: Simulated, part: float | None, **options: Any) -> list[Any]:
    """Trains a model in units with a share of its bytes as budget, or in one piece. Another stream uses some layers, too."""
    model = Cut(device, DEPTH)
    model.last.requires_grad_(False)
    device.synchronize()
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, missing_gradients="zeros", streaming=True, **options)
    if part is not None:
        longshore.shard(model, optimizer, int(part * weight_bytes(model)), weights="gathered")
    optimizer.open()
    other = device.new_stream(torch.device("cpu"))
    results = []
    for step in range(STEPS):
        batch = step * distributed.get_world_size() + distributed.get_rank()
        device.let_wait(other, device.record(device.main))
        loss = model.loss(batch)
        with device.on(other):
            results.append(model.part(batch, slice(-2, None)))
        loss.backward()
        device.let_wait(device.main, device.record(other))
        optimizer.step()
    return ended(device, model, optimizer, results, in_units=part is not None)


@contextlib.contextmanager
def taken_for_one(device: Simulated, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the block the package uses this accelerator."""
    if isinstance(device, LateInUnits):
        patch.setattr(fetch.Fetch, "advance", advance)
        with on(device, patch):
            yield
    else:
        patch.setattr(_device, "accelerator", device)
        yield


def forget_tensors(patch: pytest.MonkeyPatch) -> None:
    """Lets a collective's memory go back to its allocator before the collective may have begun."""
    init = collectives.Collective.__init__

    def forgetful(self: Any, *given: Any) -> None:
        init(self, *given)
        del self._tensors[1:]

    patch.setattr(collectives.Collective, "__init__", forgetful)


def make(way: str, options: dict[str, Any]) -> list[Any]:
    """Returns a run of towers, or of units. With ``seed`` it runs on a late accelerator, otherwise on the host. ``without`` names a dropped
    wait: a call of the accelerator, or "tensors"."""
    if not mail:
        mail.append(Mail())
        gc.freeze()  # imported objects are not scanned each time
    seed, without, part = (options.pop(name, None) for name in ("seed", "without", "part"))
    if without is not None:
        options["written_weights"] = "drop"  # wrong weights would otherwise be found before their use
    act = train if way == "towers" else functools.partial(train_units, part=None if seed is None else part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions, "_BLOCKS", 1)
        patch.setattr(partitions, "_BLOCK_ELEMENTS", BUCKET / distributed.get_world_size())
        patch.setattr(gathered, "LEAST_SHARED", 1000)
        number = next(runs)
        if seed is None:
            return act(Immediate(0), **options)
        device = (Late if way == "towers" else LateInUnits)(mail[0], number, seed, without)
        if without == "tensors":
            forget_tensors(patch)
        with taken_for_one(device, patch):
            found = act(device, **options)
            gc.collect()
            return found


def end() -> None:
    distributed.barrier()
    for box in mail:
        box.close()


if __name__ == "__main__":
    # The stacks of a rank that hangs.
    faulthandler.dump_traceback_later(220, exit=True)
    rank_program.main(make, end)
