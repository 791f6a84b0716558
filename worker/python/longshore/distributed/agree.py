"""Agreements of ranks by torch.distributed: an error on one rank is raised on all of them.

Rank 0 alone opens and fills a job. The other ranks poll the process group's store before they wait for servers. An upload may take longer
than a collective's timeout, and a store has none.
"""

import contextlib
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from longshore.distributed import collectives
from longshore.distributed.collectives import Failure
from longshore.errors import UsageError, WaitError, invalid, warn
from longshore.transfer import device as _device

T = TypeVar("T")

#: Settings that may differ between ranks: the way to the servers, and settings that no server receives.
_OWN = {"rank", "servers", "transport", "streaming", "layerwise", "frozen", "written_weights", "nonfinite"}


def place() -> tuple[int, int]:
    """Returns the process group's rank and world size.

    Raises:
        UsageError: without a process group.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError(
            "ranks that reduce gradients among themselves need a process group: call torch.distributed.init_process_group() "
            "before the optimizer is built, or let the servers sum (partition=None)"
        )
    return distributed.get_rank(), distributed.get_world_size()


#: The default process group, and a gloo group beside it; None until it is needed.
_beside: tuple[Any, Any] | None = None


def group_of(device: torch.device) -> Any:
    """Returns the process group for gathers of a device's tensors: the default one, or gloo if the default lacks a backend. For example
    nccl has none for CPU tensors. All ranks call this together for the same device.

    Raises:
        UsageError: if no group can serve the device.
    """
    global _beside
    group: Any = distributed.distributed_c10d._get_default_group()
    if _beside is not None and _beside[0] is group and device.type == "cpu":
        return _beside[1]
    if any(has.type == device.type for has in group._device_types):
        return group
    if device.type != "cpu" or not distributed.is_gloo_available():
        raise invalid(
            "init_process_group(backend=)",
            f"without one for weights on {device.type}",
            f"one that has {device.type} as well",
            "call init_process_group() without backend=, or move the model to the device that the backend is for before the optimizer is built",
            UsageError,
        )
    _beside = group, distributed.new_group(backend="gloo", timeout=timeout())
    return _beside[1]


def timeout() -> Any:
    """Returns the default group's timeout, which a new group does not inherit."""
    group: Any = distributed.distributed_c10d._get_default_group()
    return group._get_backend(group._device_types[0]).options._timeout


def can_meet(world_size: int) -> bool:
    """Returns whether a process group of all ranks exists, in which this rank can wait for others."""
    has_group = distributed.is_available() and distributed.is_initialized()
    return world_size > 1 and has_group and distributed.get_world_size() == world_size


def together(act: Callable[[], T]) -> list[T]:
    """Calls ``act`` on every rank.

    Returns:
        Each rank's result of ``act``, which must pickle.

    Raises:
        Exception: this rank's own error, of any class.
        LongshoreError: another rank's failure, of the same class if it is one of this package, with the rank and the reason.
    """
    failure: Exception | None = None
    answer: tuple[T | None, Failure | None]
    with collectives.telling():
        try:
            answer = act(), None
        except Exception as error:
            failure, answer = collectives.known(error), (None, collectives.of_error(error))
        answers = _everyones(answer)
    if failure is not None:
        raise failure
    for rank, (_, why) in enumerate(answers):
        if why is not None:
            raise collectives.elsewhere(rank, why)
    return [returned for returned, _ in answers]


def _everyones(answer: object) -> list[Any]:
    """Returns every rank's answer, by rank."""
    what, world_size = "a meeting of all ranks", distributed.get_world_size()
    group = group_of(torch.device("cpu"))
    mine = torch.frombuffer(bytearray(pickle.dumps(answer)), dtype=torch.uint8)
    sizes = _device.host_empty([world_size], torch.int64)
    size = torch.tensor([len(mine)], dtype=torch.int64, device="cpu")
    collectives.wait(distributed.all_gather_into_tensor(sizes, size, group, async_op=True), what)
    longest = int(sizes.max())
    padded = _device.host_empty([longest], torch.uint8).zero_()
    padded[: len(mine)] = mine
    whole = _device.host_empty([world_size * longest], torch.uint8)
    collectives.wait(distributed.all_gather_into_tensor(whole, padded, group, async_op=True), what)
    parts = zip(whole.view(world_size, longest), sizes.tolist(), strict=True)
    return [pickle.loads(part[:size].numpy().tobytes()) for part, size in parts]


def check_same(settings: Any) -> None:
    """Refuses settings that differ between ranks, on all ranks."""
    given = asdict(settings)
    given |= given.pop("hyper")
    mine = {field: value for field, value in given.items() if field not in _OWN}
    everyones = together(lambda: mine)
    for rank, theirs in enumerate(everyones):
        for field, value in everyones[0].items():
            if theirs[field] != value:
                ours, others = _difference(value, theirs[field])
                raise invalid(field, f"{others} on rank {rank}", f"{ours}, as on rank 0", "give all ranks the same settings and model")


def _difference(ours: Any, others: Any) -> tuple[str, str]:
    """Returns both values as text, or their first differing items."""
    if isinstance(ours, list) and isinstance(others, list):
        if len(ours) != len(others):
            return f"{len(ours)} of them", f"{len(others)} of them"
        ours, others = next((a, b) for a, b in zip(ours, others, strict=True) if a != b)
    return repr(ours), repr(others)


def ranks_with(has: list[bool], where: Tensor) -> list[int]:
    """Returns for each item the number of ranks that have it. The ranks count on the device of ``where``."""
    counts = torch.tensor(has, dtype=torch.int32, device="cpu")
    accelerator, is_there = _device.accelerator, _device.accelerator.has(where)
    if is_there:
        host = accelerator.locked(counts.shape, counts.dtype).copy_(counts)
        counts = accelerator.empty(counts.shape, counts.dtype, where.device)
        accelerator.copy(counts, host, accelerator.current_stream(where.device))
    collectives.all_reduce(counts).wait("the end of a backward pass")
    return [int(count) for count in (accelerator.to_host(counts) if is_there else counts).tolist()]


#: Most seconds that ranks wait for rank 0: the worker's ``slow_deadline``, in which it may upload.
_LONGEST = 1800.0
#: Seconds after which waiting ranks warn, and the longest pause between two polls.
_LONG = 60.0
_PAUSE = 0.1

#: By job, the number of rank 0's openings that this process has seen the end of. All ranks run the same program, so the next number belongs
#: to the current opening.
_known: dict[str, int] = {}


def rank_0_first(job: str, rank: int, world_size: int, act: Callable[[], T], *, is_shared: bool) -> T:
    """Opens a job on this rank; ranks other than 0 wait for rank 0's opening first. Without a process group of all ranks no rank waits.

    Args:
        is_shared: whether a failure here fails on all ranks, which then open the job again together.

    Raises:
        LongshoreError: rank 0's failure, on all ranks, or this one's own.
        WaitError: if rank 0 reports nothing in time, or has ended.
    """
    store = distributed.distributed_c10d._get_default_store() if can_meet(world_size) else None
    if store is None:
        return act()
    if rank != 0:
        _hear(store, job)
        try:
            return act()
        except BaseException:
            # Only this rank repeats its opening; rank 0 has done its own.
            _known[job] -= not is_shared
            raise
    try:
        opened = act()
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store is gone; the caller's own error is raised
            _say(store, job, collectives.of_error(error))
        raise
    _say(store, job, None)
    return opened


def _say(store: Any, job: str, failure: collectives.Failure | None) -> None:
    _known[job] = _known.get(job, 0) + 1
    store.set(_key(job, _known[job]), json.dumps(failure))


def _hear(store: Any, job: str) -> None:
    """Waits for the outcome of rank 0's opening with this rank's next number."""
    number = _known.get(job, 0) + 1
    try:
        _wait(store, job, number)
        failure = json.loads(store.get(_key(job, number)))
    except RuntimeError as error:
        if isinstance(error, WaitError):
            raise
        raise WaitError(f"rank 0 has ended before it opened job {job}: look at its error. torch.distributed says: {error}") from error
    _known[job] = number
    if failure is not None:
        raise collectives.elsewhere(0, failure)


def _wait(store: Any, job: str, number: int) -> None:
    start, pause, said = time.monotonic(), 0.001, False
    while not store.check([_key(job, number)]):
        waited = time.monotonic() - start
        if waited >= _LONGEST:
            raise WaitError(f"waited {_LONGEST:.0f} s for rank 0 to open job {job} and to fill it: see what it does, and call open() on all ranks")
        if waited >= _LONG and not said:
            warn(f"still waiting for rank 0 to open job {job} and to fill it, for {_LONGEST:.0f} s at most", RuntimeWarning)
            said = True
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)


def _key(job: str, number: int) -> str:
    return collectives.key(f"opened/{job}/{number}")
