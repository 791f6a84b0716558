"""What came of rank 0's opening of a job: the other ranks hear it from the process group's store before they wait for servers.

Rank 0 alone opens a job, and fills it. Where it cannot, servers have nothing to tell the others, who would wait for it as long as an
upload may take. A store has no timeout of its own, as a collective has.
"""

import contextlib
import json
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from longshore import _agree, _waits
from longshore.errors import WaitError

T = TypeVar("T")

#: Seconds that others wait for rank 0 at most: the worker's ``slow_deadline``, in which it may upload.
_LONGEST = 1800.0
#: Seconds after which they say so, and the longest between two looks.
_LONG = 60.0
_PAUSE = 0.1

#: By job: how many of rank 0's openings this process knows the end of. All ranks run the same program, so that the next one is
#: that of the opening in hand.
_known: dict[str, int] = {}


def first(job: str, rank: int, world_size: int, act: Callable[[], T], *, is_shared: bool) -> T:
    """Opens a job on this rank: on the others once rank 0 has done so. Without a process group of all ranks no rank hears of others.

    Args:
        is_shared: what fails here fails on all ranks, which open the job again together.

    Raises:
        LongshoreError: rank 0's failure, on all ranks, or this one's own.
        WaitError: where rank 0 has said nothing in time, or has ended.
    """
    store = distributed.distributed_c10d._get_default_store() if _agree.can_meet(world_size) else None
    if store is None:
        return act()
    if rank != 0:
        _hear(store, job)
        try:
            return act()
        except BaseException:
            # This rank alone tries again what rank 0 has done.
            _known[job] -= not is_shared
            raise
    try:
        opened = act()
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store is gone, and what failed is to be seen
            _say(store, job, _waits.of_error(error))
        raise
    _say(store, job, None)
    return opened


def _say(store: Any, job: str, failure: _waits.Failure | None) -> None:
    _known[job] = _known.get(job, 0) + 1
    store.set(_key(job, _known[job]), json.dumps(failure))


def _hear(store: Any, job: str) -> None:
    """Waits for what came of rank 0's opening of the same number."""
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
        raise _waits.elsewhere(0, failure)


def _wait(store: Any, job: str, number: int) -> None:
    start, pause, said = time.monotonic(), 0.001, False
    while not store.check([_key(job, number)]):
        waited = time.monotonic() - start
        if waited >= _LONGEST:
            raise WaitError(f"waited {_LONGEST:.0f} s for rank 0 to open job {job} and to fill it: see what it does, and call open() on all ranks")
        if waited >= _LONG and not said:
            warnings.warn(f"still waiting for rank 0 to open job {job} and to fill it, for {_LONGEST:.0f} s at most", RuntimeWarning, stacklevel=2)
            said = True
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)


def _key(job: str, number: int) -> str:
    return _waits.key(f"opened/{job}/{number}")
