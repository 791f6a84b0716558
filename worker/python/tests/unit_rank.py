"""A rank of test_shard_ranks.py: a model in units, among ranks. Starts like a process of torchrun."""

import contextlib
import datetime
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from test_shard_on_a_device import Late
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from units import Deep, Transformer

import longshore
from longshore import _longshore
from longshore.distributed import agree
from longshore.transfer import device

ACCELERATOR = device.accelerator
JOB = _longshore.Job
RANKS = 4
STEPS = 5
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


class Built(Deep):
    """Converts nothing, so that it can be built without weights."""

    def __init__(self, depth: int, width: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(depth))
        self.dtype = dtype


class Checkpointed(Deep):
    """Backward recomputes each layer."""

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + functional.gelu(checkpoint(layer, hidden, use_reentrant=False))
        return hidden


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


class Lora(nn.Module):
    """A frozen layer with trained layers of lower rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 128, bias=False)
        self.up = nn.Linear(128, base.out_features, bias=False)

    @property
    def in_features(self) -> int:
        return self.base.in_features

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def adapted(kind: type[Deep] = Deep) -> Deep:
    model = deep(kind)
    model.layers = nn.ModuleList(Lora(layer) for layer in model.layers)
    return model


def deep(kind: type[Deep] = Deep) -> Deep:
    return kind(depth=6, width=WIDTH, dtype=torch.float32)


def transformer(tied: bool) -> Transformer:
    return Transformer(depth=2, width=192, words=401, tied=tied)


def checkpointed(use_reentrant: bool) -> Transformer:
    model = transformer(tied=False)
    model.call = lambda block, *args: checkpoint(block, *args, use_reentrant=use_reentrant)
    return model


#: By name: functions that make a model, the same one on all ranks.
MODELS: dict[str, Callable[[], Any]] = {
    "deep": deep,
    "built": lambda: deep(Built),
    "leaves out": lambda: deep(LeavesOut),
    "tied": lambda: transformer(tied=True),
    "checkpoint": lambda: checkpointed(use_reentrant=False),
    "reentrant": lambda: checkpointed(use_reentrant=True),
    "adapters": adapted,
    "adapters checkpoint": lambda: adapted(Checkpointed),
    "adapters leaves out": lambda: adapted(LeavesOut),
}


def model_of(name: str, rounds: bool = False, made: int | None = None, room: int | None = None) -> Any:
    """Returns a model with the same weights on all ranks. With ``room``, that many bytes of them are in memory, and a file has the rest.
    ``made`` is the seed of its random numbers."""
    torch.manual_seed(made or 0)
    with longshore.Init(budget=room or "1GiB", enabled=made is not None or room is not None):
        model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.requires_grad and rounds:
            # Numbers of few bits have exact sums, in any order of ranks.
            parameter.register_hook(lambda gradient: (gradient * 2.0**20).round() / 2.0**20)
    return model


def batch(step: int, micro_step: int, micro_steps: int, rank: int) -> int:
    """Returns a rank's batch number. A single rank takes the same batches in the order of ranks."""
    return (step * micro_steps + micro_step) * RANKS + rank


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Trains, and returns the results. Without ``weights`` the model is in one piece."""
    rank = distributed.get_rank()
    name, weights, budget = options.pop("model", "deep"), options.pop("weights", None), options.pop("budget", None)
    if options.pop("late", False):
        device.accelerator = Late()
    alone, keep, micro_steps = options.pop("alone", False), options.pop("keep", False), options.get("accumulate", 1)
    writes, files, given = options.pop("writes", False), options.pop("files", None), options.pop("given", None)
    model = model_of(name, rounds="partition" in options, made=options.pop("made", None), room=options.pop("room", None))
    if given:
        model.load_state_dict(torch.load(given))
    kept: dict[int, Tensor] = {}
    for parameter in model.parameters() if keep else ():
        parameter.register_post_accumulate_grad_hook(lambda tensor: kept.update({id(tensor): tensor.grad.clone()}))
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, **options)
    if files:
        longshore.checkpoint.load_safetensors(optimizer, files, strict=True)
    sharded = None
    if weights is not None:
        sharded = longshore.shard(model, optimizer, budget, weights=None if weights == "default" else weights)
    else:
        optimizer.open()
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "pulled": 0, "way": sharded and sharded.weights}
    for step in range(STEPS):
        if alone and rank == step % RANKS:
            found["losses"].append(use_alone(model))
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
    assert optimizer._connection is not None
    found["frozen"] = optimizer._connection.job.frozen_bytes
    if sharded is not None:
        found |= {"asked": sharded.pulled_bytes, "fetched": sharded.fetched_bytes}
    optimizer.flush()
    found["norms"].append(optimizer.grad_norm)
    found["hash"] = optimizer._connection.job.state_hash()
    found["state"] = {name: value.clone() for name, value in model.state_dict().items()}
    distributed.barrier()
    frozen, asked = optimizer._connection.job.frozen_bytes, sharded and sharded.pulled_bytes
    optimizer.close()
    found["closing frozen"] = optimizer._connection.job.frozen_bytes - frozen
    found["closing"] = sharded and sharded.pulled_bytes - asked
    found["closed"] = [name for name, value in model.state_dict().items() if not torch.equal(value, found["state"][name])]
    device.accelerator = ACCELERATOR
    return found


def mean(gradient: Tensor) -> Tensor:
    """Returns the mean over all ranks."""
    distributed.all_reduce(gradient)
    return gradient / RANKS


def use_alone(model: Any) -> float:
    """A rank's uses while the others train: an evaluation, and a copy of all weights."""
    model.eval()
    with torch.inference_mode():  # as generate uses it, token by token
        values = [model.loss(0).item() for _ in range(3)]
    with torch.no_grad():
        value = model.loss(0).item()
    assert values == [value] * 3
    model.train()
    assert len(model.state_dict()) == len(list(model.named_parameters()))
    return float(value)


def refused(case: str, options: dict[str, Any]) -> str:
    """Returns the error of an unsupported case, on each rank."""
    rank = distributed.get_rank()
    model = model_of("deep")
    budget = 3_000_000 + (rank == 2 and case == "budget")
    units = "layers" if case == "units" and rank == 1 else None
    if case == "fsdp":
        fully_shard(model)
    weights = options.pop("weights", None)
    try:
        optimizer = longshore.AdamW(model.named_parameters(), streaming=True, **options)
        longshore.shard(model, optimizer, budget, units=units, weights=weights)
    except longshore.errors.LongshoreError as error:
        distributed.barrier()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def back(options: dict[str, Any]) -> dict[str, Any]:
    """Trains, goes back to a checkpoint, and takes the same batches again."""
    model = model_of(options.pop("model", "deep"))
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, **options)
    sharded = longshore.shard(model, optimizer, 3_000_000, weights="gathered")

    def losses(steps: range) -> list[float]:
        found = []
        for step in steps:
            loss = model.loss(batch(step, 0, 1, distributed.get_rank()))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    losses(range(2))
    optimizer.flush()
    distributed.barrier()
    if distributed.get_rank() == 0:
        optimizer.checkpoint("kept")
    distributed.barrier()
    state = optimizer.state_dict()
    first = losses(range(2, 5))
    if "frozen" in options:
        with torch.no_grad():
            model.layers[distributed.get_rank()].base.weight.zero_()  # the checkpoint has another base
    optimizer.load_state_dict(state)
    return {"version": optimizer.version, "first": first, "again": losses(range(2, 5)), "way": sharded.weights}


def engine(options: dict[str, Any]) -> dict[str, Any]:
    """Trains a model built within Init, in an engine of stage 3."""
    rank = distributed.get_rank()
    model = model_of(options.pop("model"), rounds=True, made=options.pop("made"))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": options.pop("max_grad_norm"),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": 3},
        "longshore": options,
    }
    trained, optimizer, *_ = longshore.initialize(model=model, config=config)
    losses = []
    for step in range(STEPS):
        loss = model.loss(batch(step, 0, 1, rank))
        trained.backward(loss)
        trained.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    trained.destroy()
    return {"losses": losses, "state": state, "in units": optimizer.is_in_units}


def left_alone(options: dict[str, Any]) -> str:
    """Rank 0 trains on, and the other ranks do something else."""
    rank = distributed.get_rank()
    store = distributed.distributed_c10d._get_default_store()
    model = model_of("deep")
    optimizer = longshore.AdamW(model.named_parameters(), streaming=True, **options)
    # The timeout of rounds alone: ranks that start slowly must still find each other.
    agree.timeout = lambda: datetime.timedelta(seconds=5)
    longshore.shard(model, optimizer, 2_000_000, weights="gathered")
    told = "nothing"
    if rank == 0:
        with contextlib.suppress(longshore.errors.WaitError):
            try:
                model.loss(0)
            except longshore.errors.WaitError as error:
                told = str(error)
                raise
        store.set("told", told)
    store.wait(["told"], datetime.timedelta(seconds=120))
    return told


#: By name: uses of a rank beside training and refusals.
OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {"left alone": left_alone, "back": back, "engine": engine}


def main() -> None:
    """Arguments: a folder for results, and a JSON list of [function, options]."""
    torch.set_num_threads(1)
    # The stacks of a rank that hangs.
    faulthandler.dump_traceback_later(float(os.environ.get("LONGSHORE_TEST_SECONDS", "220")), exit=True)
    _longshore.Job = Counted  # type: ignore[assignment,misc]
    runs = json.loads(sys.argv[2])
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    found: list[Any] = []
    for what, options in runs:
        # The last message of a rank that hangs.
        print(f"{time.monotonic():.1f} {options['job']}", file=sys.stderr, flush=True)
        if what in OTHERS:
            found.append(OTHERS[what](options))
        else:
            found.append(refused(what[1:], options) if what.startswith("!") else train(options))
    torch.save(found, Path(sys.argv[1]) / f"{os.environ['RANK']}.pt")


def run() -> None:
    """Runs main, and ends the process."""
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: the others wait for this rank, and torch's exit waits for them
    os._exit(0)  # a group with a rank's expired wait cannot be ended


if __name__ == "__main__":
    run()
