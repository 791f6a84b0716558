"""A rank of test_placed_ranks.py: parameters on meshes of several dimensions. Starts like a process of torchrun."""

import math
import random
from pathlib import Path
from typing import Any

import rank_program
import torch
from rank import give, whole
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

import longshore
from longshore import checkpoint
from longshore.distributed import dtensor
from longshore.transfer.params import Param

STEPS = 4
WIDTH = 8192
#: By way: the kept full state.
KEPT: dict[str, dict[str, Any]] = {}


class Net(nn.Module):
    """The scales have sizes that ranks cannot share evenly, and a bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, WIDTH)
        self.down = nn.Linear(WIDTH, 64)
        self.last = nn.LayerNorm(64)
        self.head = nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.rand(3))
        self.gain = nn.Parameter(torch.rand(1))
        self.up.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.down(functional.gelu(self.up(self.norm(inputs))))
        return self.head(self.last(hidden)) * self.scale.sum() * self.gain


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def tensor_parallel(model: Net, mesh: DeviceMesh) -> None:
    """Parallelizes the model over the mesh. Each rank's norms see a part of the sequence, so gradients of norms are partial sums."""
    given = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    parallelize_module(model.norm, mesh, given)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def prepare(way: str, seed: int) -> tuple[nn.Module, int]:
    """Returns a model, and the number of this rank's data."""
    rank = distributed.get_rank()
    if way == "hybrid" and rank >= 2:
        seed += 7  # the weights of the first ranks that hold them count
    model = net(seed)
    if way == "tensor":
        tensor_parallel(model, init_device_mesh("cpu", (4,)))
        return model, 0
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if way == "hybrid":
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(1) if param.shape == (WIDTH, 64) else None)
        return model, rank
    tensor_parallel(model, mesh["inner"])
    fully_shard(model, mesh=mesh["outer"])
    return model, rank // 2


def loss(model: nn.Module, step: int, data: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + data)
    inputs = torch.randn(2, 8, 64, generator=generator)
    return functional.mse_loss(model(inputs), inputs[:, :, :16].sin())


def train(way: str, options: dict[str, Any]) -> dict[str, Any]:
    model, data = prepare(way, options.pop("seed", 0))
    steps, keep, resume = options.pop("steps", STEPS), options.pop("keep", False), options.pop("resume", None)
    folder = options.pop("folder", None)
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-3, frozen="keep", **options)
    if resume is not None:
        give(model, KEPT[resume])
        optimizer.load_state_dict(KEPT[resume])
    optimizer.open()
    found: dict[str, Any] = {"norms": [], "gradients": [], "bytes": [], "version": optimizer.version}
    while optimizer.version < steps:
        optimizer.zero_grad()
        loss(model, optimizer.version, data).backward()
        if not options.get("streaming"):
            found["gradients"].append([whole(param.grad).clone() for param in model.parameters() if param.grad is not None])
        optimizer.step()
        report = optimizer.last_report
        if report is not None:  # a delayed step's report comes later
            found["norms"].append(report.grad_norm)
            found["bytes"].append(report.pushed_bytes)
    optimizer.flush()
    found["weights"] = {name: whole(param.detach()).clone() for name, param in model.named_parameters()}
    found["own"] = [dtensor.local_shard(param).clone() for param in model.parameters()]
    if folder is not None:
        checkpoint.save_torch(optimizer, Path(folder) / "adamw.pt")
        checkpoint.save_safetensors(optimizer, Path(folder) / "model", dtype="fp32")
    if keep:
        KEPT[way] = found["state"] = optimizer.state_dict(full=True)
    optimizer.close()
    return found


def placements(chance: random.Random, dims: int, mesh: DeviceMesh) -> list[Any]:
    """Returns a placement for each dimension of the mesh, strided where FSDP2 cuts shards of tensor parallelism."""
    if mesh.ndim == 2 and chance.random() < 0.3:
        dim = chance.randrange(dims)
        return [_StridedShard(dim, split_factor=mesh.size(1)), Shard(dim)]
    return [chance.choice([Replicate(), *map(Shard, range(dims))]) for _ in range(mesh.ndim)]


def placed(values: Tensor, mesh: DeviceMesh, given: list[Any]) -> DTensor:
    """Returns this rank's part of a tensor. Strided shards are cut here, since ``distribute_tensor`` does not accept them."""
    if not isinstance(given[0], _StridedShard):
        return distribute_tensor(values, mesh, given)
    shape, offset = compute_local_shape_and_global_offset(values.shape, mesh, given)
    part = values[tuple(slice(first, first + length) for first, length in zip(offset, shape, strict=True))]
    return DTensor.from_local(part.reshape(shape), mesh, given, run_check=False, shape=values.shape, stride=values.stride())


def fills(seed: int) -> str:
    """Compares this rank's parts of tensors, of many sizes and placements, with torch's. Returns the differences."""
    chance = random.Random(seed)
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for _ in range(40):
        mesh = chance.choice(meshes)
        shape = [chance.choice([1, 2, 3, 5, 8, 12]) for _ in range(chance.randint(1, 3))]
        given, values = placements(chance, len(shape), mesh), torch.arange(math.prod(shape)).float().view(shape)
        expected = placed(values, mesh, given)
        model = nn.Parameter(torch.zeros_like(expected))
        param = Param(0, "it", 0, model, torch.Size(shape), values.dtype, "fp32", values.numel())
        dtensor.fill(param, values)
        pieces = dtensor.cuts([param], 4)[0]
        # The pieces cover the tensor, each element once.
        whole_again = torch.zeros_like(values)
        for piece in pieces:
            piece.part_of(whole_again).add_(piece.part_of(values) + 1)
        if given == [Shard(0)] and [(piece.name, piece.rank) for piece in pieces] != [(f"it#{rank}/4", rank) for rank in range(len(pieces))]:
            return f"{shape} {given} has other names than jobs have that are there: {pieces}"
        if not torch.equal(dtensor.local_shard(model), expected.to_local()) or not torch.equal(whole_again, values + 1):
            return f"{shape} {given}: {pieces}"
    return ""


def refused(case: str, options: dict[str, Any]) -> str:
    """Returns the optimizer's refusal of a case, on every rank."""
    model = nn.Linear(8, 8, bias=False)
    if case == "absent":
        mesh = DeviceMesh("cpu", [0, 1])
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    if case == "partial":
        model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), init_device_mesh("cpu", (4,)), [Partial()]))
    if case in ("few", "written", "unreduced"):
        mesh = init_device_mesh("cpu", (2, 2))
        tensors = 1 if case == "few" else 4
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(tensors)))
        for layer in model:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Shard(0)]))
    try:
        optimizer = longshore.AdamW(model.named_parameters(), **options)
        for step in range(3):
            for param in model.parameters():
                values = torch.ones_like(param) * (1 + (distributed.get_rank() if case == "unreduced" else 0))
                param.grad = values.detach()
            optimizer.step()
            # Factor 1.0 writes the same values, which is permitted. Other factors are refused.
            for param in model.parameters() if case == "written" else ():
                with torch.no_grad():
                    param.mul_(1.0 + step / 2)
    except longshore.errors.LongshoreError as error:
        distributed.barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def make(way: str, options: dict[str, Any]) -> Any:
    """Runs a way. A way of "!" and a case is refused."""
    if way == "fills":
        return fills(**options)
    return refused(way[1:], options) if way.startswith("!") else train(way, options)


if __name__ == "__main__":
    rank_program.main(make)
