"""What ranks find out together by torch.distributed, so that what fails on one of them fails on all of them."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import distributed

from longshore import errors
from longshore.errors import LongshoreError, UsageError, invalid

T = TypeVar("T")

#: Settings that ranks need not share.
_OWN = {"rank", "servers", "transport"}


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


def can_meet(world_size: int) -> bool:
    """Whether there are other ranks that this one can wait for."""
    has_group = distributed.is_available() and distributed.is_initialized()
    return world_size > 1 and has_group and distributed.get_world_size() == world_size


def together(act: Callable[[], T]) -> list[T]:
    """Does something on every rank.

    Returns:
        What each rank's ``act`` returned, which pickles.

    Raises:
        LongshoreError: this rank's own, or one of the same class that names a rank that failed and why. A file that cannot be
            written is told as well.
    """
    failure: LongshoreError | OSError | None = None
    answer: tuple[T | None, tuple[str, str, str | None] | None]
    try:
        answer = act(), None
    except (LongshoreError, OSError) as error:
        failure, answer = error, (None, (type(error).__name__, str(error), getattr(error, "field", None)))
    answers: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(answers, answer)
    if failure is not None:
        raise failure
    for rank, (_, why) in enumerate(answers):
        if why is not None:
            kind, message, field = why
            raise getattr(errors, kind, LongshoreError)(f"rank {rank} failed, so that no rank can go on: {message}", field=field)
    return [returned for returned, _ in answers]


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


def present(has: list[bool], device: torch.device) -> list[int]:
    """How many ranks have each of these."""
    counts = torch.tensor(has, dtype=torch.int32, device=device)
    distributed.all_reduce(counts)
    return [int(count) for count in counts.tolist()]
