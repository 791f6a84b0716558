"""Collectives of torch.distributed, and waits for them that end if a rank has failed.

A collective waits until all ranks have come, or until the timeout of ``init_process_group`` has passed. A rank that raises earlier writes
its failure into the process group's store, which waiting ranks poll. Its collectives are out of step from then on, so all later collectives
of the job are refused. Otherwise a rank could take another collective's bytes for its own. Streams wait for a device's collectives, and no
thread can poll meanwhile.
"""

import contextlib
import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, distributed

from longshore import errors
from longshore.errors import LongshoreError, UsageError, WaitError, warn
from longshore.transfer import device

E = TypeVar("E", bound=BaseException)

#: A rank's failure for other ranks: the error's class, its message and its field.
Failure = tuple[str, str, str | None]

#: Time before the first poll of a waiting rank, and between two polls.
_PERIOD = datetime.timedelta(seconds=0.5)
#: Seconds after which a rank warns about the missing ranks.
_LONG = 60.0

#: Number of jobs that this process has begun, equal on all ranks.
_jobs = 0
#: The last job's failed rank, and its failure.
_failed: tuple[int, Failure] | None = None
#: The default process group at that failure.
_failed_in: Any = None


def begin() -> None:
    """Begins a job on all ranks. Earlier failures are forgotten. The exception is a collective of the last job in this process group to
    which a rank never came.

    Raises:
        UsageError: as :func:`refuse` does.
    """
    global _jobs, _failed
    if _failed is not None and _failed_in is distributed.group.WORLD and _is_heard():
        refuse()
    _jobs += 1
    _failed = None


def of_error(error: BaseException) -> Failure:
    """Returns an error as a failure for other ranks."""
    return type(error).__name__, str(error) or type(error).__name__, getattr(error, "field", None)


def elsewhere(rank: int, failure: Failure) -> LongshoreError:
    """Returns the error that this rank raises for another rank's failure."""
    kind, message, field = failure
    found = getattr(errors, kind, LongshoreError)
    raised: LongshoreError = found(f"rank {rank} failed, so that no rank can go on: {message}", field=field)
    return known(raised)


def known(error: E) -> E:
    """Marks an error that all ranks raise."""
    error._longshore_is_known = True  # type: ignore[attr-defined]
    return error


def refuse() -> None:
    """Refuses a collective once a rank has failed."""
    if _failed is not None:
        rank, (_, message, _) = _failed
        raise known(
            UsageError(
                f"rank {rank} has failed in the midst of what ranks do together, so that no rank can go on: end all of them and start them "
                f"again, and they go on from the last step. It failed with: {message}"
            )
        )


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Context in which ranks wait for each other. An error inside is told to the other ranks."""
    refuse()
    try:
        yield
    except BaseException as error:
        _tell(error)
        raise


def wait(work: Any, what: str) -> None:
    """Waits for a collective of the hosts' memory.

    Raises:
        LongshoreError: another rank's failure.
        WaitError: if another rank has ended, or has not come within the process group's timeout.
    """
    if not _is_done(work, what, None):
        with _Waiting(what) as waiting:
            while not _is_done(work, what, waiting):
                waiting.look()


class Apart:
    """Runs a blocking call on a thread of its own, as a collective that :func:`wait` takes.

    gloo's ``send`` and ``recv`` need it, since they cannot be polled: an expired wait closes all connections of the process.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._failure: BaseException | None = None
        # An interrupted caller leaves the thread waiting, and the process may end.
        self._thread = threading.Thread(target=self._run, name="longshore-wait", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as failure:
            self._failure = failure

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Waits for the call's end. Raises RuntimeError after the timeout, as a collective does, or the call's own error."""
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError(f"it takes longer than {timeout}")
        if self._failure is not None:
            raise self._failure


class _Waiting:
    """A wait that other ranks can see in the store."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = time.monotonic()
        self._is_said = False

    def __enter__(self) -> "_Waiting":
        with contextlib.suppress(RuntimeError):
            _store().set(_waits(distributed.get_rank()), self._what)
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(RuntimeError):
            _store().delete_key(_waits(distributed.get_rank()))

    def look(self) -> None:
        """Raises another rank's failure. Warns once about the missing ranks."""
        _raise_failure()
        if time.monotonic() - self._start >= _LONG and not self._is_said:
            self._is_said = True
            rank = distributed.get_rank()
            warn(f"rank {rank} still waits for {self._what}, and {self.missing()}: see what they do", RuntimeWarning)

    def missing(self) -> str:
        """Returns a sentence on the ranks that have not come, as far as the store knows."""
        others = (rank for rank in range(distributed.get_world_size()) if rank != distributed.get_rank())
        missing: list[str] = []
        with contextlib.suppress(RuntimeError):
            missing = [str(rank) for rank in others if not _store().check([_waits(rank)])]
        return f"these have not come to it: rank {', '.join(missing)}" if missing else "others do as well"


def _is_done(work: Any, what: str, waiting: _Waiting | None) -> bool:
    try:
        work.wait(_PERIOD)
    except RuntimeError:
        if not work.is_completed():
            return False
    else:
        return True
    try:
        # The work may have ended well just after the first wait expired. A wait for ended work returns or raises at once.
        work.wait()
    except RuntimeError as error:
        _raise_failure()
        who = waiting.missing() if waiting is not None else "another rank has ended"
        raise WaitError(
            f"rank {distributed.get_rank()} waited for {what}, and {who}. Either a rank has ended, or the timeout of init_process_group has "
            f"passed: look at the other ranks' errors. torch.distributed says: {error}"
        ) from error
    return True


def _tell(error: BaseException) -> None:
    if _failed is None and not hasattr(error, "_longshore_is_known"):
        failed = _fail(distributed.get_rank(), of_error(error))
        with contextlib.suppress(RuntimeError):  # the store is gone; the caller's own error is raised
            if not _store().check([_key()]):  # the first failure is the cause of others
                _store().set(_key(), json.dumps(failed))


def _fail(rank: int, failure: Failure) -> tuple[int, Failure]:
    """Notes the failed rank, and the process group."""
    global _failed, _failed_in
    _failed, _failed_in = (rank, failure), distributed.group.WORLD
    return _failed


def _raise_failure() -> None:
    said: Any = None
    with contextlib.suppress(RuntimeError):  # rank 0 is gone with the store, and the collective raises
        if _store().check([_key()]):
            said = json.loads(_store().get(_key()))
    if said is not None:
        with contextlib.suppress(RuntimeError):
            _store().set(key(f"heard/{_jobs}"), "")
        rank, (kind, message, field) = said
        raise elsewhere(*_fail(rank, (kind, message, field)))


def _is_heard() -> bool:
    """Returns whether a rank has read the last failure while it waited in a collective. Otherwise all ranks may have failed alike, and none
    waits for another."""
    try:
        return bool(_store().check([key(f"heard/{_jobs}")]))
    except RuntimeError:  # the store is gone with rank 0
        return True


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


def key(what: str) -> str:
    """Returns a key for the process group's store.

    torchrun's own store outlives the ranks, and keeps entries from before a restart. So the key has torchrun's count of restarts, if one
    agent starts all ranks. Agents of several hosts may count differently."""
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(distributed.get_world_size())
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host else "0"
    return f"longshore/{start}/{what}"


def _key() -> str:
    return key(f"failed/{_jobs}")


def _waits(rank: int) -> str:
    return key(f"waits/{rank}")


class Collective:
    """A collective under way. Keeps the tensors that it reads and writes, all on one device, until a wait for it."""

    def __init__(self, work: Any, tensors: Sequence[Tensor]) -> None:
        self._work = work
        self._tensors = list(tensors)
        self._is_of_device = device.accelerator.has(tensors[0])

    def is_done(self) -> bool:
        """Returns whether the collective has ended."""
        done: bool = self._work.is_completed()
        return done

    def wait(self, what: str) -> None:
        """Waits for a collective of host memory. Makes this thread's stream wait for a collective of a device."""
        if self._is_of_device:
            self._work.wait()
        else:
            wait(self._work, what)
        self._tensors.clear()


def all_gather(whole: Tensor, own: Tensor, group: Any) -> Collective:
    """Gives all ranks every rank's ``own``, end to end in ``whole``. ``own`` may be this rank's part of ``whole``."""
    if device.accelerator.has(whole):
        work = device.accelerator.all_gather(whole, own, group)
    else:
        work = distributed.all_gather_into_tensor(whole, own, group, async_op=True)
    return Collective(work, [whole, own])


def reduce_scatter(slots: Tensor, rank: int) -> tuple[Collective, Tensor]:
    """Sums all ranks' rows, one for each rank.

    Args:
        slots: (ranks, elements). Their content is undefined afterwards.

    Returns:
        The collective, and memory for this rank's row of the sum.
    """
    if device.accelerator.has(slots):
        part = device.empty_beside(slots, slots.shape[1:], slots.dtype)
        return Collective(device.accelerator.reduce_scatter(part, slots), [part, slots]), part
    # gloo's reduce_scatter_tensor does the same with a copy of its own, whose end cannot be observed.
    part = slots[rank]
    return Collective(distributed.all_reduce(slots, async_op=True), [part, slots]), part


def all_reduce(tensor: Tensor) -> Collective:
    """Sums all ranks' tensors in place."""
    has = device.accelerator.has(tensor)
    work = device.accelerator.all_reduce(tensor) if has else distributed.all_reduce(tensor, async_op=True)
    return Collective(work, [tensor])
