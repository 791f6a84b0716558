"""What ranks find out together by torch.distributed, so that what fails on one of them fails on all of them."""

import pickle
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from longshore import _collectives, _device, _waits
from longshore._waits import Failure
from longshore.errors import UsageError, invalid

T = TypeVar("T")

#: Settings that ranks need not share: the way to the servers, and those that no server hears of.
_OWN = {"rank", "servers", "transport", "partition", "reduce_dtype", "streaming", "layerwise", "frozen", "written_weights", "nonfinite"}


def place() -> tuple[int, int]:
    """This process's rank and the world size, as the process group has them.

    Raises:
        UsageError: where there is none.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError(
            "ranks that reduce gradients among themselves need a process group: call torch.distributed.init_process_group() "
            "before the optimizer is built, or let the servers sum (partition=None)"
        )
    return distributed.get_rank(), distributed.get_world_size()


#: The default process group, and one of gloo beside it; None where that has not been needed.
_beside: tuple[Any, Any] | None = None


def group_of(device: torch.device) -> Any:
    """The process group in which ranks gather tensors of a device: the default one, or one of gloo where that has no backend for
    them, as nccl has none for the CPU's. All ranks ask for the same one at the same time.

    Raises:
        UsageError: where there can be none.
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
    """That of the default group, which a new one would not take over."""
    group: Any = distributed.distributed_c10d._get_default_group()
    return group._get_backend(group._device_types[0]).options._timeout


def can_meet(world_size: int) -> bool:
    """Whether there are other ranks that this one can wait for."""
    has_group = distributed.is_available() and distributed.is_initialized()
    return world_size > 1 and has_group and distributed.get_world_size() == world_size


def together(act: Callable[[], T]) -> list[T]:
    """Does something on every rank.

    Returns:
        What each rank's ``act`` returned, which pickles.

    Raises:
        Exception: this rank's own, whatever it is.
        LongshoreError: one of the same class, or of this one, that names a rank that failed and why.
    """
    failure: Exception | None = None
    answer: tuple[T | None, Failure | None]
    with _waits.telling():
        try:
            answer = act(), None
        except Exception as error:
            failure, answer = _waits.known(error), (None, _waits.of_error(error))
        answers = _everyones(answer)
    if failure is not None:
        raise failure
    for rank, (_, why) in enumerate(answers):
        if why is not None:
            raise _waits.elsewhere(rank, why)
    return [returned for returned, _ in answers]


def _everyones(answer: object) -> list[Any]:
    """By rank, what it has to say."""
    what, world_size = "a meeting of all ranks", distributed.get_world_size()
    group = group_of(torch.device("cpu"))
    mine = torch.frombuffer(bytearray(pickle.dumps(answer)), dtype=torch.uint8)
    sizes = torch.empty(world_size, dtype=torch.int64)
    _waits.wait(distributed.all_gather_into_tensor(sizes, torch.tensor([len(mine)]), group, async_op=True), what)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    whole = torch.empty(world_size * longest, dtype=torch.uint8)
    _waits.wait(distributed.all_gather_into_tensor(whole, padded, group, async_op=True), what)
    parts = zip(whole.view(world_size, longest), sizes.tolist(), strict=True)
    return [pickle.loads(part[:size].numpy().tobytes()) for part, size in parts]


def check_same(settings: Any) -> None:
    """Refuses settings that differ between ranks, on all ranks.

    Raises:
        InvalidError: naming the first setting that differs, and both ranks' values.
    """
    mine = {field: value for field, value in asdict(settings).items() if field not in _OWN}
    everyones = together(lambda: mine)
    for rank, theirs in enumerate(everyones):
        for field, value in everyones[0].items():
            if theirs[field] != value:
                ours, others = _difference(value, theirs[field])
                raise invalid(field, f"{others} on rank {rank}", f"{ours}, as on rank 0", "give all ranks the same settings and model")


def _difference(ours: Any, others: Any) -> tuple[str, str]:
    """Two values that differ, or the first items in which they do."""
    if isinstance(ours, list) and isinstance(others, list):
        if len(ours) != len(others):
            return f"{len(ours)} of them", f"{len(others)} of them"
        ours, others = next((a, b) for a, b in zip(ours, others, strict=True) if a != b)
    return repr(ours), repr(others)


def present(has: list[bool], where: Tensor) -> list[int]:
    """How many ranks have each of these. They find that out where a tensor lies."""
    counts = torch.tensor(has, dtype=torch.int32, device="cpu")
    accelerator, is_there = _device.accelerator, _device.accelerator.has(where)
    if is_there:
        host = accelerator.locked(counts.shape, counts.dtype).copy_(counts)
        counts = accelerator.empty(counts.shape, counts.dtype, where.device)
        accelerator.copy(counts, host, accelerator.current_stream(where.device))
    _collectives.all_reduce(counts).wait("the end of a backward pass")
    return [int(count) for count in (accelerator.to_host(counts) if is_there else counts).tolist()]
