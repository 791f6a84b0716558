"""A rank of test_train_later.py: gradual unfreezing. Starts like a process of torchrun."""

from typing import Any

import rank_program
import torch
from rank import whole
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import longshore

LAYERS, WIDTH, STEPS = 4, 144, 12
#: The bytes of a layer.
LAYER = 4 * WIDTH * (WIDTH + 1)
#: By step: the layers that train from then on. The last layer starts last, so that backward makes its gradients before any other's. In one
#: step all training layers are new.
TRAINS = {0: {2}, 2: {1, 2}, 4: {3}, 5: {0, 3}, 7: {0}, 9: {0, 1, 2, 3}}


class Net(nn.Module):
    """Linear layers in sequence: each depends on all layers before it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def loss(model: nn.Module, number: int) -> Tensor:
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
    return functional.cross_entropy(model(inputs), inputs.argmax(1))


def set_trained(model: nn.Module, step: int) -> None:
    """Sets requires_grad on the layers that train in a step."""
    trained = TRAINS[max(begin for begin in TRAINS if begin <= step)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(int(name.split("layers.")[1].split(".")[0]) in trained)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, passes: int = 1, first: int = 0, ranks: int = 1) -> None:
    for step in steps:
        set_trained(model, step)
        optimizer.zero_grad()
        for number in range(passes):
            (loss(model, (step * passes + number) * ranks + first) / passes).backward()
        optimizer.step()


def prepare(way: str, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model that requires gradients throughout, and the optimizer's options for it."""
    model = Net(seed)
    if way == "fsdp":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model, {}
    if way == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True), {"partition": "all-reduced"}
    return model, {"partition": "reduce-scatter"} if way == "scatter" else {}


def run(way: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains with a model frozen when the optimizer is built, or, with ``watched``, frozen after that."""
    model, own = prepare(way, options.pop("seed", 0))
    is_watched, first, steps = options.pop("watched", False), options.pop("first", 0), options.pop("steps", STEPS)
    budget = options.pop("budget", None)
    if not is_watched:
        set_trained(model, options.pop("frozen as in", first))
        own["frozen"] = "train-later"
    optimizer = longshore.AdamW(model.named_parameters(), lr=3e-4, **own, **options)
    optimizer.open()
    if budget is not None:
        longshore.shard(model, optimizer, budget=budget)
    train(model, optimizer, range(first, steps), first=distributed.get_rank(), ranks=distributed.get_world_size())
    optimizer.flush()
    optimizer.close()
    return {"weights": [whole(parameter.detach()).clone() for parameter in model.parameters()]}


def unreduced(options: dict[str, Any]) -> dict[str, Any]:
    """DistributedDataParallel does not know parameters that are frozen when it is built."""
    model = Net()
    set_trained(model, 0)
    wrapped = DistributedDataParallel(model)
    optimizer = longshore.AdamW(wrapped.named_parameters(), lr=3e-4, partition="all-reduced", frozen="train-later", **options)
    try:
        train(wrapped, optimizer, range(STEPS), first=distributed.get_rank(), ranks=2)
    except longshore.errors.GradientError as error:
        return {"error": str(error), "version": optimizer.version}
    return {"error": "none", "version": optimizer.version}


def make(way: str, options: dict[str, Any]) -> Any:
    return unreduced(options) if way == "unreduced" else run(way, options)


if __name__ == "__main__":
    rank_program.main(make)
