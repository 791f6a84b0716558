"""A rank of test_order_of_ranks.py, which trains on a simulated accelerator. Starts like a process of torchrun."""

import functools
import itertools
from typing import Any

import pytest
import rank_program
import torch
import torch._dynamo  # the first optimizer would import it
from accelerator import Immediate, Layers, Loss, Simulated, ended, on
from ranks_on_a_device import AmongRanks, Mail
from torch import Tensor, distributed
from units import weight_bytes

import longshore
from longshore.distributed import collectives
from longshore.transfer import partitions

STEPS = 4
DEPTH = 5
#: Elements that fill a bucket. Two of the larger weights suffice.
BUCKET = 1000

mail: list[Mail] = []
runs = itertools.count()


class Towers(Layers):
    """Three towers of two layers each. A bucket of gradients has parts of two towers."""

    def __init__(self, device: Simulated) -> None:
        super().__init__(device, depth=6)
        del self.last

    def tower(self, first: int, batch: int) -> Tensor:
        hidden = self.batch(batch)
        for layer in self.layers[first::3]:
            hidden = layer(hidden)
        return hidden

    def loss_of(self, first: int, batch: int) -> Tensor:
        return Loss.apply(self.device, self.tower(first, batch), self.batch(batch, outputs=True))


def put_gradients(model: Towers, loss: Tensor) -> None:
    """Puts gradients of the last layer's parameters there without a hook."""
    layer = list(model.layers[4].parameters())
    for parameter, gradient in zip(layer, torch.autograd.grad(loss, layer), strict=True):
        parameter.grad = gradient


def train(device: Simulated, **options: Any) -> list[Any]:
    """Trains towers on two streams, ordered by the caller as torch requires. In every other step the first layer has no gradient, so its
    bucket is reduced at the end of the step. In one step the caller puts gradients there directly. Returns the results of each step, and
    the last weights."""
    model = Towers(device)
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, missing_gradients="zeros", **options)
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
    return ended(device, model, optimizer, results)


def train_units(device: Simulated, part: float | None, **options: Any) -> list[Any]:
    """Trains a model in units with a share of its bytes as budget, or in one piece. Another stream uses some layers, too."""
    model = Layers(device, depth=DEPTH)
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
    return ended(device, model, optimizer, results)


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
    seed, without, part = (options.pop(name, None) for name in ("seed", "without", "part"))
    if without is not None:
        options["written_weights"] = "drop"  # wrong weights would otherwise be found before their use
    act = train if way == "towers" else functools.partial(train_units, part=None if seed is None else part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions, "_BLOCKS", 1)
        patch.setattr(partitions, "_BLOCK_ELEMENTS", BUCKET / distributed.get_world_size())
        patch.setattr(partitions, "LEAST_SHARED", 1000)
        number = next(runs)
        if seed is None:
            return act(Immediate(0), **options)
        device = AmongRanks(mail[0], number, seed, without)
        if without == "tensors":
            forget_tensors(patch)
        with on(device):
            return act(device, **options)


def end() -> None:
    distributed.barrier()
    for box in mail:
        box.close()


if __name__ == "__main__":
    rank_program.main(make, end)
