"""A rank of test_ranks.py and test_frozen.py. Starts like a process of torchrun."""

import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank_program
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import longshore
from longshore import checkpoint
from longshore.distributed import dtensor
from longshore.transfer.params import Param

STEPS = 5
#: The inner width of :class:`Placed`.
WIDTH = 4096
#: For each job that keeps it, the whole state.
KEPT: dict[str, dict[str, Any]] = {}


class Net(nn.Module):
    """Several blocks for each rank. Four ranks cannot share the second layer's rows evenly, nor those of a frozen base and its scale."""

    shape = (4, 64)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(257, 256)
        self.odd = nn.Linear(256, 1025)
        self.last = nn.Linear(1025, 256)
        self.head = nn.Linear(256, 10)
        self.base = nn.Linear(64, 257).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(1), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(self.base(inputs) * self.scale))
        return self.head(functional.gelu(self.last(functional.gelu(self.odd(hidden)))))

    def error(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, inputs[:, : outputs.shape[1]].argmax(1))


class Placed(nn.Module):
    """A model for meshes. The scales have sizes that ranks cannot share evenly, and a bias is frozen."""

    shape = (2, 8, 64)

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

    def error(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        return functional.mse_loss(outputs, inputs[:, :, :16].sin())


class Later(Net):
    """Linear layers in sequence, which are unfrozen by steps. Each depends on all layers before it."""

    width, depth = 144, 4
    shape = (8, width)
    #: Bytes of one layer.
    layer = 4 * width * (width + 1)
    #: For each step named here, the layers that train from then on. The last layer begins last, so backward makes its
    #: new gradients first. In one step, all layers that train are new.
    trains = {0: {2}, 2: {1, 2}, 4: {3}, 5: {0, 3}, 7: {0}, 9: {0, 1, 2, 3}}

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(self.depth)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def loss(self, number: int) -> Tensor:
        return loss(self, number)

    def set_trained(self, step: int) -> None:
        """Sets requires_grad on the layers that train in a step."""
        trained = self.trains[max(begin for begin in self.trains if begin <= step)]
        for place, layer in enumerate(self.layers):
            layer.requires_grad_(place in trained)


MODELS: dict[str, Callable[[], nn.Module]] = {"net": Net, "placed": Placed, "later": Later}


def net(name: str = "net", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[name]()


def loss(model: nn.Module, step: int, data: int = 0) -> Tensor:
    plain: Any = getattr(model, "module", model)
    inputs = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1000 * step + data))
    found: Tensor = plain.error(model(inputs), inputs)
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined,no-any-return]


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Parallelizes a model over the mesh. Each rank's norms see a part of the sequence, so gradients of norms are partial sums."""
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


def prepare(way: str, name: str = "net", seed: int = 0, *, alike: bool = False) -> tuple[nn.Module, dict[str, Any], int]:
    """Returns a model, the optimizer's options for it, and the number of this rank's data. Unless ``alike``, ranks with whole parameters have
    their own weights."""
    rank = distributed.get_rank()
    if way in ("hybrid", "tensor", "both"):
        model = net("placed", seed + 7 if way == "hybrid" and rank >= 2 else seed)  # the weights of the first ranks that hold them count
        if way == "tensor":
            tensor_parallel(model, init_device_mesh("cpu", (4,)))
            return model, {}, 0
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        if way == "hybrid":
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(1) if param.shape == (WIDTH, 64) else None)
            return model, {}, rank
        tensor_parallel(model, mesh["inner"])
        fully_shard(model, mesh=mesh["outer"])
        return model, {}, rank // 2
    model = net(name, seed)
    if way == "fsdp":
        for layer in getattr(model, "layers", ()):
            fully_shard(layer)
        fully_shard(model)
        return model, {}, rank
    if way == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=name == "later"), {"partition": "all-reduced"}, rank
    for parameter in model.parameters():
        if rank and not alike:
            parameter.data.fill_(7.0)  # rank 0's weights count
        if parameter.requires_grad:
            # Rounded to few bits, gradients have exact sums in any order of ranks or servers.
            parameter.register_hook(lambda gradient: (gradient * 2.0**22).round() / 2.0**22)
    return model, {"partition": "reduce-scatter"} if way == "scatter" else {}, rank


def mean_gradients(model: nn.Module, way: str) -> list[Tensor]:
    """Returns the mean over the ranks, for each trained parameter. In some ways no rank has reduced the gradients yet."""
    gradients = []
    for parameter in model.parameters():
        assert (parameter.grad is not None) is parameter.requires_grad
        if parameter.grad is None:
            continue
        gradient = whole(parameter.grad).detach().clone()
        if way in ("scatter", "sum"):
            distributed.all_reduce(gradient)
            gradient /= distributed.get_world_size()
        gradients.append(gradient)
    return gradients


@torch.no_grad()
def give(model: nn.Module, state: dict[str, Any]) -> None:
    """Gives a model, sharded or whole, the master weights of a full state."""
    for number, parameter in enumerate(model.parameters()):
        if number in state["state"]:
            master = state["state"][number]["master"]
            is_sharded = isinstance(parameter, DTensor)
            parameter.copy_(distribute_tensor(master, parameter.device_mesh, parameter.placements) if is_sharded else master)


def optimizer_of(model: nn.Module, way: str, options: dict[str, Any]) -> Any:
    if way != "engine":
        return longshore.AdamW(model.named_parameters(), lr=1e-3, **options)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": options.pop("max_grad_norm"),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "longshore": {"partition": "reduce-scatter", **options},
    }
    return longshore.initialize(model=model, config=config)[1]


def train(way: str, options: dict[str, Any]) -> dict[str, Any]:
    opens, name, steps, seed = (options.pop(*given) for given in (("opens", True), ("model", "net"), ("steps", STEPS), ("seed", 0)))
    keep, resume, saves, saves_at = (options.pop(given, None) for given in ("keep", "resume", "saves", "saves_at"))
    as_in, budget = options.pop("as_in", 0), options.pop("budget", None)
    model, own, data = prepare(way, name, seed, alike=not opens)
    plain: Any = getattr(model, "module", model)
    if name == "later" and options.get("frozen", "leave") != "leave":
        plain.set_trained(as_in)
    is_streaming = options.get("streaming") or way == "engine"
    optimizer = optimizer_of(model, way, {"frozen": "keep", **own, **options})
    if resume is not None:
        give(model, KEPT[resume])
        optimizer.load_state_dict(KEPT[resume])
    if opens:
        optimizer.open()
    if budget is not None:
        longshore.shard(model, optimizer, budget=budget)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "bytes": [], "version": optimizer.version}
    while optimizer.version < steps:
        if optimizer._connection is not None and optimizer._connection.made == saves_at:
            save_alone(optimizer)
        if name == "later":
            plain.set_trained(optimizer.version)
        value = loss(model, optimizer.version, data)
        mean = value.detach().clone()
        distributed.all_reduce(mean)
        found["losses"].append(mean.item() / distributed.get_world_size())
        optimizer.zero_grad()
        value.backward()
        if not is_streaming and name == "net":
            found["gradients"].append(mean_gradients(model, way))
        optimizer.step()
        report = optimizer.last_report
        if report is not None:  # a delayed step's report comes later
            found["norms"].append(report.grad_norm)
            found["bytes"].append((report.pushed_bytes, report.pulled_bytes))
    optimizer.flush()
    if saves is not None:
        save(optimizer, Path(saves["folder"]), everyone=saves["everyone"])
    parameters = list(model.parameters())
    found["weights"] = [whole(parameter.detach()).clone() for parameter in parameters if parameter.requires_grad]
    found["frozen"] = [whole(parameter.detach()).clone() for parameter in parameters if not parameter.requires_grad]
    found["own"] = [dtensor.local_shard(parameter).clone() for parameter in parameters]
    if keep:
        KEPT[options["job"]] = found["state"] = optimizer.state_dict(full=True)
    optimizer.close()
    return found


def save(optimizer: longshore.AdamW, folder: Path, *, everyone: bool) -> None:
    """Writes other programs' files, on rank 0 alone or by a call of all ranks."""
    if everyone or distributed.get_rank() == 0:
        checkpoint.save_torch(optimizer, folder / "adamw.pt")
        checkpoint.save_deepspeed(optimizer, folder / "universal", tag="tag")
        checkpoint.save_safetensors(optimizer, folder / "model", dtype="fp32")
    distributed.barrier()


def save_alone(optimizer: longshore.AdamW) -> None:
    """Rank 0 writes a file after a flush of all ranks, and no other rank waits."""
    optimizer.flush()
    if distributed.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_safetensors(optimizer, Path(folder) / "model", dtype="fp32")


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
        # The pieces must cover each element of the tensor exactly once.
        whole_again = torch.zeros_like(values)
        for piece in pieces:
            piece.part_of(whole_again).add_(piece.part_of(values) + 1)
        if given == [Shard(0)] and [(piece.name, piece.rank) for piece in pieces] != [(f"it#{rank}/4", rank) for rank in range(len(pieces))]:
            return f"{shape} {given} has other names than jobs have that are there: {pieces}"
        if not torch.equal(dtensor.local_shard(model), expected.to_local()) or not torch.equal(whole_again, values + 1):
            return f"{shape} {given}: {pieces}"
    return ""


class Half(nn.Module):
    """Rank 0 alone uses one layer, and no rank uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.always(inputs)
        return self.sometimes(hidden) if distributed.get_rank() == 0 else hidden


def on_mesh() -> nn.Module:
    """Returns layers without biases on a mesh."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for layer in model:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]))
    return model


def partial() -> nn.Module:
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), init_device_mesh("cpu", (4,)), [Partial()]))
    return model


def fsdp_layer() -> nn.Module:
    model = net()
    fully_shard(model.odd)
    return model


#: For each refused case, the function that makes its model. Other cases have :class:`Net`.
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "missing": Half,
    "ddp": lambda: DistributedDataParallel(net()),
    "ddp streaming": lambda: DistributedDataParallel(net()),
    "fsdp layer": fsdp_layer,
    "first weights": lambda: prepare("sum")[0],
    "partial": partial,
    "placed written": on_mesh,
}


def refused(case: str, options: dict[str, Any]) -> str:
    """Returns the optimizer's refusal of a case, on every rank."""
    rank = distributed.get_rank()
    model = REFUSED.get(case, net)()
    if case == "settings" and rank == 2:
        options = {**options, "warmup_steps": 7}
    if case == "world":
        options = {**options, "rank": rank % 2, "world_size": 2}
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
    try:
        optimizer = longshore.AdamW(model.named_parameters(), **options)
        # Factor 1.0 writes the same values, which is permitted. Other factors are refused.
        for factor in (1.0, 1.5, 1.0):
            optimizer.zero_grad()
            if case.startswith(("partial", "placed")):
                for param in model.parameters():
                    param.grad = torch.ones_like(param).detach()
            else:
                model(inputs).sum().backward()
            optimizer.step()
            with torch.no_grad():
                for param in model.parameters() if "written" in case else ():
                    param.mul_(factor)
    except longshore.errors.LongshoreError as error:
        distributed.barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def make(way: str, options: dict[str, Any]) -> Any:
    """Runs a way. A way of "!" and a case is refused."""
    if way == "fills":
        return fills(options["seed"])
    return refused(way[1:], options) if way.startswith("!") else train(way, options)


if __name__ == "__main__":
    rank_program.main(make)
