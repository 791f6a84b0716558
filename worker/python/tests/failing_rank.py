"""A rank of test_failing_ranks.py: rank 1 fails where the others come to a collective. Starts like a process of torchrun."""

import datetime
import time
from collections.abc import Callable
from typing import Any

import rank_program
from rank import loss, net
from torch import distributed

import longshore
from longshore.distributed import ranks
from longshore.errors import WaitError

#: Timeout of torch.distributed in seconds. An error that comes earlier was not caused by the timeout.
TIMEOUT = 60
FAILS = 1
#: The optimizer, once it has been made.
MADE: list["Optimizer"] = []


class Optimizer:
    """A model that ranks train, and its optimizer."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.model = net()
        self.optimizer = longshore.AdamW(self.model.named_parameters(), lr=1e-3, partition="reduce-scatter", **options)
        self.optimizer.open()
        MADE.append(self)

    def backward(self, step: int, **options: Any) -> None:
        self.optimizer.zero_grad()
        loss(self.model, step, distributed.get_rank()).backward(**options)

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()


def patched(place: Any, name: str, error: BaseException) -> None:
    """Makes a function fail on one rank from now on."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    if distributed.get_rank() == FAILS:
        setattr(place, name, fail)


def reads(options: dict[str, Any], error: BaseException) -> Callable[[], None]:
    """A rank gathers some weights and then fails to get its part of others."""
    made = Optimizer(options)
    made.step(0)
    made.backward(1)
    patched(ranks.Reduced, "_targets", error)
    return made.optimizer.step


def waits(options: dict[str, Any]) -> Callable[[], None]:
    return reads(options, WaitError("the server of shard 3 did not answer"))


def interrupted(options: dict[str, Any]) -> Callable[[], None]:
    return reads(options, KeyboardInterrupt())


def streams(options: dict[str, Any]) -> Callable[[], None]:
    """A rank fails to send its gradients."""
    made = Optimizer({**options, "streaming": True})
    made.step(0)

    def act() -> None:
        made.backward(1, create_graph=distributed.get_rank() == FAILS)
        made.optimizer.step()

    return act


def pushes(options: dict[str, Any]) -> Callable[[], None]:
    """In safe mode a gradient is refused after later layers' gradients were reduced."""
    made = Optimizer(options)
    made.step(0)
    made.backward(1)
    if distributed.get_rank() == FAILS:
        first = made.model.first.weight
        first.grad = first.grad.to_sparse()
    return made.optimizer.step


def opens(options: dict[str, Any]) -> Callable[[], None]:
    """The error is not one of this package."""
    patched(ranks._longshore, "Job", MemoryError("no memory for a job"))  # type: ignore[attr-defined]

    def act() -> None:
        Optimizer(options)

    return act


def said(act: Callable[[], None]) -> dict[str, Any]:
    kind, message, start = None, "", time.monotonic()
    try:
        act()
    except BaseException as error:
        kind, message = type(error).__name__, str(error)
    return {"kind": kind, "message": message, "seconds": time.monotonic() - start}


WAYS = {"waits": waits, "interrupted": interrupted, "streams": streams, "pushes": pushes, "opens": opens}


def make(what: str, options: dict[str, Any]) -> dict[str, Any]:
    act = WAYS[what](options)
    found = {"first": said(act)}
    if MADE:
        # After an interrupted step or a wait, the user calls flush(). After other failures the step begins anew.
        found["then"] = said(MADE[0].optimizer.flush if what in ("waits", "interrupted") else act)
    return found


def end() -> None:
    """Waits for all ranks: the end of a process would break the other ranks' connections, and reveal the failure that way."""
    store = distributed.distributed_c10d._get_default_store()
    store.set(f"told/{distributed.get_rank()}", "")
    store.wait([f"told/{rank}" for rank in range(distributed.get_world_size())], datetime.timedelta(seconds=3 * TIMEOUT))


if __name__ == "__main__":
    rank_program.main(make, end, TIMEOUT)
