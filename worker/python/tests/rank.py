"""A rank of test_ranks.py. Starts like a process of torchrun."""

import tempfile
from pathlib import Path
from typing import Any

import rank_program
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import longshore
from longshore import checkpoint

WIDTH = 512
STEPS = 6
#: By job: all state, for ways that keep it.
KEPT: dict[str, dict[str, Any]] = {}


class Net(nn.Module):
    """Large enough that padding to whole blocks is small. Four ranks cannot share the second layer's rows evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.odd = nn.Linear(WIDTH, 4 * WIDTH + 1)
        self.last = nn.Linear(4 * WIDTH + 1, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(inputs))
        return self.head(functional.gelu(self.last(functional.gelu(self.odd(hidden)))))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(4, 64, generator=generator)
    return functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[attr-defined,no-any-return]


def prepare(way: str, *, alike: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model and the optimizer's options for it. Unless ``alike``, each rank has its own weights."""
    model = net()
    if distributed.get_rank() and not alike:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)  # rank 0's weights count
    if way.startswith("fsdp"):
        if distributed.get_rank():
            model = net()
        fully_shard(model)
        return model, {}
    if way == "ddp":
        return DistributedDataParallel(net()), {"partition": "all-reduced"}
    for parameter in model.parameters():
        # Numbers of few bits have exact sums, in any order of ranks or servers.
        parameter.register_hook(lambda gradient: (gradient * 2.0**22).round() / 2.0**22)
    return model, {"partition": "reduce-scatter"} if way == "scatter" else {}


def mean_gradients(model: nn.Module, way: str) -> list[Tensor]:
    """Returns the mean over the ranks of gradients that no rank has reduced yet."""
    gradients = []
    for parameter in model.parameters():
        assert parameter.grad is not None
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


def train(way: str, options: dict[str, Any]) -> dict[str, Any]:
    rank, opens = distributed.get_rank(), options.pop("opens", True)
    model, own = prepare(way, alike=not opens)
    saves, saves_at = options.pop("saves", None), options.pop("saves_at", None)
    steps, keep, resume = options.pop("steps", STEPS), options.pop("keep", False), options.pop("resume", None)
    if way == "engine":
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": options.pop("max_grad_norm"),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "longshore": {"partition": "reduce-scatter", **options},
        }
        optimizer = longshore.initialize(model=model, config=config)[1]
        options = {"streaming": True, **options}
    else:
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-3, **own, **options)
    if resume is not None:
        give(model, KEPT[resume])
        optimizer.load_state_dict(KEPT[resume])
    if opens:
        optimizer.open()
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "bytes": [], "version": optimizer.version}
    while optimizer.version < steps:
        if optimizer._connection is not None and optimizer._connection.made == saves_at:
            save_alone(optimizer)
        value = loss(model, optimizer.version, rank)
        mean = value.detach().clone()
        distributed.all_reduce(mean)
        found["losses"].append(mean.item() / distributed.get_world_size())
        optimizer.zero_grad()
        value.backward()
        if not options.get("streaming"):
            found["gradients"].append(mean_gradients(model, way))
        optimizer.step()
        report = optimizer.last_report
        assert report is not None
        found["norms"].append(report.grad_norm)
        found["bytes"].append((report.pushed_bytes, report.pulled_bytes))
        if "deadly" in options["job"]:
            print(optimizer.version, found["losses"][-1].hex(), flush=True)
    optimizer.flush()
    if saves is not None:
        save(optimizer, Path(saves["folder"]), everyone=saves["everyone"])
    found["weights"] = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    found["handle"] = optimizer.state_dict()["longshore"]
    if keep:
        KEPT[options["job"]] = found["state"] = optimizer.state_dict(full=True)
    optimizer.close()
    return found


def save(optimizer: longshore.AdamW, folder: Path, *, everyone: bool) -> None:
    """Writes other programs' files, on rank 0 alone or by a call of all ranks."""
    if everyone or distributed.get_rank() == 0:
        checkpoint.save_torch(optimizer, folder / "adamw.pt")
        assert checkpoint.save_deepspeed(optimizer, folder / "universal") == f"global_step{STEPS}_universal"
        checkpoint.save_safetensors(optimizer, folder / "model", dtype="fp32")
    distributed.barrier()


def save_alone(optimizer: longshore.AdamW) -> None:
    """Rank 0 writes a file after a flush of all ranks, and no other rank waits."""
    optimizer.flush()
    if distributed.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_safetensors(optimizer, Path(folder) / "model", dtype="fp32")


def opens(options: dict[str, Any]) -> dict[str, Any]:
    """Opens a job on servers that lack drives for it, and then a job that they can have."""
    found: dict[str, Any] = {"told": []}
    for tier in ("nvme", "nvme", "memory"):
        model = net()
        try:
            optimizer = longshore.AdamW(model.named_parameters(), tier=tier, **options)
            optimizer.open()
            loss(model, 0, distributed.get_rank()).backward()
            optimizer.step()
            found["version"] = optimizer.version
        except longshore.errors.LongshoreError as error:
            found["told"].append(f"{type(error).__name__}: {error}")
    return found


class Half(nn.Module):
    """Rank 0 alone uses one layer, and no rank uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.always(inputs)
        return self.sometimes(hidden) if distributed.get_rank() == 0 else hidden


def refused(case: str, options: dict[str, Any]) -> str:
    """Returns the optimizer's refusal of a case, on every rank."""
    rank = distributed.get_rank()
    model: nn.Module = Half() if case.startswith("missing") else net()
    if case == "settings" and rank == 2:
        options = {**options, "warmup_steps": 7}
    if case == "world":
        options = {**options, "rank": rank % 2, "world_size": 2}
    if case in ("ddp", "ddp streaming"):
        model = DistributedDataParallel(model)
    if case == "fsdp layer":
        fully_shard(model.odd)
    if case == "fsdp written":
        fully_shard(model)
    if case == "first weights":
        model = prepare("sum")[0]
    if case == "short":
        model = nn.Linear(2, 1, bias=False)
    try:
        optimizer = longshore.AdamW(model.named_parameters(), **options)
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
        model(inputs[:, :2] if case == "short" else inputs).sum().backward()
        optimizer.step()
        # Factor 1.0 writes the same values, which is permitted. Other factors are refused.
        for factor in (1.0, 1.5) if "written" in case else ():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            optimizer.step()
    except longshore.errors.LongshoreError as error:
        distributed.barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def make(way: str, options: dict[str, Any]) -> Any:
    """Runs a way. A way of "!" and a case is refused."""
    if way == "opens":
        return opens(options)
    return refused(way[1:], options) if way.startswith("!") else train(way, options)


if __name__ == "__main__":
    rank_program.main(make)
