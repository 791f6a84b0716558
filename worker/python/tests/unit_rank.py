"""A rank of test_shard_ranks.py: a model in units, among ranks. Starts like a process of torchrun."""

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import rank_program
import torch
from models import Transformer
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from units import Deep, Lora, Recomputing

import longshore
from longshore import _longshore, errors
from longshore.distributed import collectives

JOB = _longshore.Job
RANKS = 4
STEPS = 4
#: Four ranks cannot share weights of this width evenly.
WIDTH = 193


class LeavesOut(Deep):
    """Ranks 1 and 3 leave a layer out in each second batch, and rank 2 in each third. Rank 3 leaves out the last layer."""

    def forward(self, hidden: Tensor) -> Tensor:
        rank = distributed.get_rank()
        for number, layer in enumerate(self.layers):
            is_left_out = (rank, number) == (1, 2) and self.batch % 2 or (rank, number) == (2, 4) and self.batch % 3 == 0
            if is_left_out or ((rank, number) == (3, 5) and self.batch % 2):
                continue
            hidden = hidden + functional.gelu(layer(hidden))
        return hidden

    def loss(self, step: int) -> Tensor:
        self.batch = step // RANKS
        return super().loss(step)


class Counted:
    """A rank's job, and the bytes of frozen weights that it has asked the servers for."""

    def __init__(self, settings: Any) -> None:
        self._job, self._first_frozen, self.frozen_bytes = JOB(settings), settings.frozen_from, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def fetch(self, version: int, parts: Any) -> Any:
        self._count([place for place, _ in parts])
        return self._job.fetch(version, parts)

    def pull(self, version: int, places: Any) -> None:
        self._count(places)
        self._job.pull(version, places)

    def _count(self, places: list[tuple[int, int, int, str]]) -> None:
        for param, _, elements, wire in places:
            if self._first_frozen is not None and param >= self._first_frozen:
                self.frozen_bytes += elements * (4 if wire == "fp32" else 2)


def deep(kind: type[Deep] = Deep) -> Deep:
    return kind(depth=6, width=WIDTH, dtype=torch.float32)


def adapted(kind: type[Deep] = Deep) -> Deep:
    model = deep(kind)
    model.layers = nn.ModuleList(Lora(layer, 128) for layer in model.layers)
    return model


def transformer(**options: bool) -> Transformer:
    """Returns a model whose backward recomputes each block, where ``use_reentrant`` says how."""
    model = Transformer(depth=2, width=192, words=401, tied=options.pop("tied", False))
    if options:
        model.call = lambda block, *args: checkpoint(block, *args, **options)
    return model


#: Functions that make a model, by name. The model is the same on all ranks.
MODELS: dict[str, Callable[[], Any]] = {
    "deep": deep,
    "leaves out": lambda: deep(LeavesOut),
    "tied": lambda: transformer(tied=True),
    "checkpoint": lambda: transformer(use_reentrant=False),
    "reentrant": lambda: transformer(use_reentrant=True),
    "adapters": adapted,
    "adapters checkpoint": lambda: adapted(Recomputing),
    "adapters leaves out": lambda: adapted(LeavesOut),
}


def model_of(name: str, rounds: bool = False, room: int | None = None) -> Any:
    """Returns a model with the same weights on all ranks. With ``room``, that many bytes of them are in memory, and a file has the rest."""
    torch.manual_seed(0)
    with longshore.Init(budget=room or "1GiB", enabled=room is not None):
        model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.requires_grad and rounds:
            # Rounded to few bits, gradients have exact sums in any order of ranks.
            parameter.register_hook(lambda gradient: (gradient * 2.0**20).round() / 2.0**20)
    return model


def batch(step: int, micro_step: int, micro_steps: int, rank: int) -> int:
    """Returns a rank's batch number. A single rank takes the same batches in the order of ranks."""
    return (step * micro_steps + micro_step) * RANKS + rank


def optimizer_of(model: nn.Module, options: dict[str, Any]) -> longshore.AdamW:
    return longshore.AdamW(model.named_parameters(), **{"lr": 1e-2, "streaming": True, **options})


def job_of(optimizer: longshore.AdamW) -> Any:
    assert optimizer._connection is not None
    return optimizer._connection.job


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def differences(model: nn.Module, expected: dict[str, Tensor]) -> list[str]:
    state = model.state_dict()
    return [name for name, value in expected.items() if not torch.equal(state[name], value)]


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Trains, and returns the results. Without ``weights`` the model is in one piece."""
    rank, micro_steps = distributed.get_rank(), options.get("accumulate", 1)
    weights, budget, room = (options.pop(name, None) for name in ("weights", "budget", "room"))
    alone, keep, writes = (options.pop(name, False) for name in ("alone", "keep", "writes"))
    model = model_of(options.pop("model", "deep"), rounds="partition" in options, room=room)
    kept: dict[int, Tensor] = {}
    for parameter in model.parameters() if keep else ():
        parameter.register_post_accumulate_grad_hook(lambda tensor: kept.update({id(tensor): tensor.grad.clone()}))
    optimizer = optimizer_of(model, options)
    sharded = None
    if weights is not None:
        sharded = longshore.shard(model, optimizer, budget, weights=None if weights == "default" else weights)
    else:
        optimizer.open()
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "pulled": 0, "way": sharded and sharded.weights}
    for step in range(STEPS):
        if alone and rank == step % RANKS:
            use_alone(model)
        if writes and (rank, step) == (1, 2):
            with torch.no_grad():
                model.layers[0].base.weight.mul_(0.5)
        for micro_step in range(micro_steps):
            loss = model.loss(batch(step, micro_step, micro_steps, rank)) / micro_steps
            loss.backward()
            found["losses"].append(loss.item())
        optimizer.step()
        found["gradients"].append([mean(kept[id(parameter)]) for parameter in model.parameters() if keep])
        report = optimizer.last_report
        assert report is not None
        if "delay" not in options:  # a delayed step is reported some time later
            found["norms"].append(report.grad_norm)
        found["pulled"] += report.pulled_bytes
    job = job_of(optimizer)
    found["frozen"] = job.frozen_bytes
    if sharded is not None:
        found |= {"asked": sharded.pulled_bytes, "fetched": sharded.fetched_bytes}
    optimizer.flush()
    found["norms"].append(optimizer.grad_norm)
    found |= {"hash": job.state_hash(), "state": copied(model)}
    distributed.barrier()
    frozen, asked = job.frozen_bytes, sharded and sharded.pulled_bytes
    optimizer.close()
    found |= {"closing frozen": job.frozen_bytes - frozen, "closing": sharded and sharded.pulled_bytes - asked}
    return {**found, "closed": differences(model, found["state"])}


def mean(gradient: Tensor) -> Tensor:
    """Returns the mean over all ranks."""
    distributed.all_reduce(gradient)
    return gradient / RANKS


def use_alone(model: Any) -> None:
    """A rank's uses while the others train: evaluations with and without eval(), and a copy of all weights."""
    values = []
    for is_training in (False, True):
        model.train(is_training)
        with torch.inference_mode():  # as generate uses it, token by token
            values += [model.loss(0).item() for _ in range(3)]
        with torch.no_grad():
            values.append(model.loss(0).item())
    assert values == values[:1] * 8
    assert len(model.state_dict()) == len(list(model.named_parameters()))


def refused(case: str, options: dict[str, Any]) -> str:
    """Returns the error of an unsupported case, on each rank."""
    rank = distributed.get_rank()
    model = model_of("adapters" if case == "loaded" else "deep")
    budget = 3_000_000 + (rank == 2 and case == "budget")
    units = "layers" if case == "units" and rank == 1 else None
    if case == "fsdp":
        fully_shard(model)
    weights = options.pop("weights", None)
    try:
        optimizer = optimizer_of(model, options)
        if case == "loaded":
            # Once the job is open, rank 1 loads other weights of trained layers.
            optimizer.open()
            if rank == 1:
                model.load_state_dict({name: value if ".base." in name else value + 1.0 for name, value in model.state_dict().items()})
        longshore.shard(model, optimizer, budget, units=units, weights=weights)
    except errors.LongshoreError as error:
        distributed.barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def back(options: dict[str, Any]) -> dict[str, Any]:
    """Trains, goes back to a checkpoint, and takes the same batches again."""
    rank, model = distributed.get_rank(), model_of(options.pop("model", "deep"))
    optimizer = optimizer_of(model, options)
    sharded = longshore.shard(model, optimizer, 3_000_000, weights="gathered")

    def losses(steps: range) -> list[float]:
        found = []
        for step in steps:
            loss = model.loss(batch(step, 0, 1, rank))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    losses(range(2))
    optimizer.flush()
    distributed.barrier()
    if rank == 0:
        optimizer.checkpoint("kept")
    distributed.barrier()
    state = optimizer.state_dict()
    first = losses(range(2, 5))
    if "frozen" in options:
        with torch.no_grad():
            model.layers[rank].base.weight.zero_()  # the checkpoint has another base
    optimizer.load_state_dict(state)
    return {"version": optimizer.version, "first": first, "again": losses(range(2, 5)), "way": sharded.weights}


def left_alone(options: dict[str, Any]) -> str:
    """Rank 0 trains on, and the other ranks do something else."""
    store = distributed.distributed_c10d._get_default_store()
    model = model_of("deep")
    optimizer = optimizer_of(model, options)
    # Only rounds of collectives get this timeout, since ranks that start slowly must still find each other.
    collectives.timeout = lambda: datetime.timedelta(seconds=5)
    longshore.shard(model, optimizer, 2_000_000, weights="gathered")
    told = "nothing"
    if distributed.get_rank() == 0:
        with contextlib.suppress(errors.WaitError):
            try:
                model.loss(0)
            except errors.WaitError as error:
                told = str(error)
                raise
        store.set("told", told)
    store.wait(["told"], datetime.timedelta(seconds=120))
    return told


def loaded(options: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 loads another base between the job's opening and ``shard``. Returns the losses of a model in one piece with these weights, of
    training and of evaluation, and the names of weights that differ from the loaded ones."""
    budget, factor = options.pop("budget"), 2.0 if distributed.get_rank() == 1 else 1.0
    model = model_of("adapters")
    optimizer = optimizer_of(model, options)
    optimizer.open()
    model.load_state_dict({name: value * (factor if ".base." in name else 1.0) for name, value in model.state_dict().items()})
    expected, base = model.loss(0).item(), {name: value for name, value in copied(model).items() if ".base." in name}
    longshore.shard(model, optimizer, budget, weights="gathered")
    trained = model.loss(0).item()
    model.eval()
    with torch.no_grad():
        evaluated = model.loss(0).item()
    model.train()
    differ = differences(model, base)
    model.loss(1).backward()
    optimizer.step()
    distributed.barrier()
    optimizer.close()
    return {"losses": [expected, trained, evaluated], "differ": differ}


def ended(options: dict[str, Any]) -> dict[str, Any]:
    """Closes the model on all ranks. Before that, a rank has an error and cannot tell the others. Returns the differences in a rank's
    model, and the bytes of frozen weights that the rank requested at the end and in a later evaluation."""
    rank = distributed.get_rank()
    model = model_of("adapters")
    optimizer = optimizer_of(model, options)
    sharded = longshore.shard(model, optimizer, 3_000_000, weights="gathered")
    model.loss(rank).backward()
    optimizer.step()
    state, job = copied(model), job_of(optimizer)
    distributed.barrier()
    asked = job.frozen_bytes
    try:
        if rank == 2:
            raise ValueError("a batch is broken")
        optimizer.close()
    except ValueError:
        optimizer.close()
    at_the_end = job.frozen_bytes - asked
    sharded.release()
    return {"differ": differences(model, state), "asked": at_the_end, "later": job.frozen_bytes - asked - at_the_end}


#: Uses of a rank by name, without the refused ones.
USES: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{"train": train, "left alone": left_alone, "back": back},
    **{"loaded": loaded, "ended": ended},
}


def make(what: str, options: dict[str, Any]) -> Any:
    """Runs the use of this name. After "!" stands a case that must be refused."""
    _longshore.Job = Counted  # type: ignore[assignment,misc]
    return refused(what[1:], options) if what.startswith("!") else USES[what](options)


if __name__ == "__main__":
    rank_program.main(make)
