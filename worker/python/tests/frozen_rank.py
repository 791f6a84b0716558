"""A rank of test_frozen_ranks.py: low-rank adapters over a frozen base. Starts like a process of torchrun."""

from typing import Any

import rank_program
import torch
from rank import whole
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import longshore

STEPS = 4


class Adapted(nn.Module):
    """A frozen linear layer with an adapter. Its scale has one row, which ranks cannot share."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.scale = nn.Parameter(torch.rand(1))
        self.base.requires_grad_(False)
        self.scale.requires_grad_(False)
        self.down = nn.Linear(inputs, 8, bias=False)
        self.up = nn.Linear(8, outputs, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        return self.base(given) * self.scale + self.up(self.down(given))


class Net(nn.Module):
    """The first layer has rows that ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Adapted(64, 257), nn.GELU(), Adapted(257, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(functional.gelu(self.layers(inputs)))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(4, 64, generator=generator)
    return functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))


def prepare(way: str, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model and the optimizer's options for it."""
    model = net(seed)
    if way == "fsdp":
        for layer in model.layers[::2]:
            fully_shard(layer)
        fully_shard(model)
        return model, {}
    if way == "ddp":
        return DistributedDataParallel(model), {"partition": "all-reduced"}
    for parameter in model.parameters():
        if distributed.get_rank():
            parameter.data.fill_(7.0)  # rank 0's weights count
        if parameter.requires_grad:
            # Numbers of few bits have exact sums, in any order of ranks.
            parameter.register_hook(lambda gradient: (gradient * 2.0**22).round() / 2.0**22)
    return model, {"partition": "reduce-scatter"}


def mean_gradients(model: nn.Module, way: str) -> list[Tensor]:
    """Returns the mean over the ranks, for each trained parameter."""
    gradients = []
    for parameter in model.parameters():
        assert (parameter.grad is not None) is parameter.requires_grad
        if parameter.grad is None:
            continue
        gradient = whole(parameter.grad).detach().clone()
        if way == "scatter":
            distributed.all_reduce(gradient)
            gradient /= distributed.get_world_size()
        gradients.append(gradient)
    return gradients


def train(way: str, options: dict[str, Any]) -> dict[str, Any]:
    model, own = prepare(way, options.pop("model_seed", 0))
    steps = options.pop("steps", STEPS)
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-3, frozen="keep", **own, **options)
    optimizer.open()
    found: dict[str, Any] = {"norms": [], "gradients": [], "bytes": [], "version": optimizer.version}
    while optimizer.version < steps:
        optimizer.zero_grad()
        loss(model, optimizer.version, distributed.get_rank()).backward()
        if not options.get("streaming"):
            found["gradients"].append(mean_gradients(model, way))
        optimizer.step()
        report = optimizer.last_report
        assert report is not None
        found["norms"].append(report.grad_norm)
        found["bytes"].append(report.pushed_bytes)
    optimizer.flush()
    for key, is_trained in (("trained", True), ("frozen", False)):
        parameters = (parameter for parameter in model.parameters() if parameter.requires_grad is is_trained)
        found[key] = [whole(parameter.detach()).clone() for parameter in parameters]
    optimizer.close()
    return found


if __name__ == "__main__":
    rank_program.main(train)
