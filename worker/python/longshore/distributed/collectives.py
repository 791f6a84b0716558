"""Acts of all ranks by torch.distributed: collectives and agreements. A wait for a collective ends if a rank has
failed, and an agreement raises one rank's error on all.

A collective waits until all ranks have come, or until the timeout of ``init_process_group`` has passed. A rank that
raises before it comes writes its failure into the process group's store, which waiting ranks poll. All later
collectives of the job are refused: ranks are out of step, and could take one collective's bytes for another's. Only
waits on the host poll. A device's collective is waited for by a stream.

Rank 0 alone opens and fills a job. The other ranks poll the store for the outcome, since rank 0's upload may take
longer than a collective's timeout. Calls come from the training thread, and in streaming mode from autograd's threads.
"""

import contextlib
import datetime
import gc
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from longshore import errors
from longshore.errors import LongshoreError, UsageError, WaitError, invalid, warn
from longshore.transfer import device as _device

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

#: A rank's failure as other ranks read it: the error's class, message and field.
Failure = tuple[str, str, str | None]

#: Time between two polls of a waiting rank, and before the first one.
_PERIOD = datetime.timedelta(seconds=0.5)
#: Seconds after which a waiting rank warns.
_LONG = 60.0

#: Number of jobs that this process has begun, equal on all ranks.
_jobs = 0
#: The rank that failed in the last job, and its failure; None if no rank did.
_failed: tuple[int, Failure] | None = None
#: The default process group at the time of that failure.
_failed_in: Any = None


def begin() -> None:
    """Begins a job on all ranks, and forgets the last job's failure. The failure still counts if a rank waited in a
    collective of this process group to which the failed rank never came.

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
    """Marks an error that all ranks raise, so that no rank tells the others."""
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
        if _failed is None and not hasattr(error, "_longshore_is_known"):
            failed = _fail(distributed.get_rank(), of_error(error))
            with contextlib.suppress(RuntimeError):  # the store is gone; the caller's own error is raised
                if not _store().check([_key()]):  # the first failure is the cause of others
                    _store().set(_key(), json.dumps(failed))
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
        # A daemon, so that the process can end while this thread still waits for an interrupted caller.
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
        # The work has ended since the first wait expired, with a result or an error. A second wait returns or raises at
        # once.
        work.wait()
    except RuntimeError as error:
        _raise_failure()
        who = waiting.missing() if waiting is not None else "another rank has ended"
        raise WaitError(
            f"rank {distributed.get_rank()} waited for {what}, and {who}. Either a rank has ended, or the timeout of init_process_group has "
            f"passed: look at the other ranks' errors. torch.distributed says: {error}"
        ) from error
    return True


def _fail(rank: int, failure: Failure) -> tuple[int, Failure]:
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
    """Returns whether a rank has read the last failure while it waited in a collective. If none has, all ranks may have
    failed alike, and no rank waits for another."""
    try:
        return bool(_store().check([key(f"heard/{_jobs}")]))
    except RuntimeError:  # the store is gone with rank 0
        return True


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


def key(what: str) -> str:
    """Returns a key for the process group's store.

    torchrun's own store outlives the ranks, and keeps entries from before a restart. So the key has torchrun's count of
    restarts where one agent starts all ranks. With several hosts the key has none, since their agents may count
    differently."""
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(distributed.get_world_size())
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host else "0"
    return f"longshore/{start}/{what}"


def _key() -> str:
    return key(f"failed/{_jobs}")


def _waits(rank: int) -> str:
    return key(f"waits/{rank}")


class Collective:
    """A collective under way. The object keeps the tensors that the collective reads and writes, all on one device,
    until :meth:`wait`."""

    def __init__(self, work: Any, tensors: Sequence[Tensor]) -> None:
        self._work = work
        self._tensors = list(tensors)
        self._is_of_device = _device.accelerator.has(tensors[0])

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
    if _device.accelerator.has(whole):
        work = _device.accelerator.all_gather(whole, own, group)
    else:
        work = distributed.all_gather_into_tensor(whole, own, group, async_op=True)
    return Collective(work, [whole, own])


def reduce_scatter(slots: Tensor, rank: int) -> tuple[Collective, Tensor]:
    """Sums the tensors of all ranks row by row, and gives each rank the sum of its own row.

    Args:
        slots: a tensor of shape (ranks, elements), whose content is undefined afterwards.

    Returns:
        The collective, and memory for this rank's row of the sum.
    """
    if _device.accelerator.has(slots):
        part = _device.empty_beside(slots, slots.shape[1:], slots.dtype)
        return Collective(_device.accelerator.reduce_scatter(part, slots), [part, slots]), part
    # All ranks get all rows. gloo's reduce_scatter_tensor does the same, and then makes a copy whose end cannot be
    # observed.
    part = slots[rank]
    return Collective(distributed.all_reduce(slots, async_op=True), [part, slots]), part


def all_reduce(tensor: Tensor) -> Collective:
    """Sums all ranks' tensors in place."""
    has = _device.accelerator.has(tensor)
    work = _device.accelerator.all_reduce(tensor) if has else distributed.all_reduce(tensor, async_op=True)
    return Collective(work, [tensor])


def place() -> tuple[int, int]:
    """Returns the process group's rank and world size.

    Raises:
        UsageError: without a process group.
    """
    if not has_group():
        raise UsageError(
            "ranks that reduce gradients among themselves need a process group: call torch.distributed.init_process_group() "
            "before the optimizer is built, or let the servers sum (partition=None)"
        )
    return distributed.get_rank(), distributed.get_world_size()


#: The default process group, and a gloo group that :func:`group_of` has made beside it. None until one is needed.
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


def has_group() -> bool:
    """Returns whether the default process group exists."""
    return distributed.is_available() and distributed.is_initialized()


def can_meet(world_size: int) -> bool:
    """Returns whether a process group of all ranks exists, in which this rank can wait for others."""
    return world_size > 1 and has_group() and distributed.get_world_size() == world_size


def has_ddp(tensors: Iterable[Tensor]) -> bool:
    """Returns whether a DistributedDataParallel model has some of these tensors as parameters."""
    if not has_group():
        return False
    mine = {id(tensor) for tensor in tensors}
    # `isinstance` would read `__class__` of all objects: that takes seconds, and some of torch's objects warn.
    wrapped = [found for found in gc.get_objects() if DistributedDataParallel in type(found).__mro__]
    return any(id(tensor) in mine for model in wrapped for tensor in model.parameters())


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
    with telling():
        try:
            answer = act(), None
        except Exception as error:
            failure, answer = known(error), (None, of_error(error))
        answers = _everyones(answer)
    if failure is not None:
        raise failure
    for rank, (_, why) in enumerate(answers):
        if why is not None:
            raise elsewhere(rank, why)
    return [returned for returned, _ in answers]


def _everyones(answer: object) -> list[Any]:
    what, world_size = "a meeting of all ranks", distributed.get_world_size()
    group = group_of(torch.device("cpu"))
    mine = torch.frombuffer(bytearray(pickle.dumps(answer)), dtype=torch.uint8)
    sizes = _device.host_empty([world_size], torch.int64)
    size = torch.tensor([len(mine)], dtype=torch.int64, device="cpu")
    wait(distributed.all_gather_into_tensor(sizes, size, group, async_op=True), what)
    longest = int(sizes.max())
    padded = _device.host_empty([longest], torch.uint8).zero_()
    padded[: len(mine)] = mine
    whole = _device.host_empty([world_size * longest], torch.uint8)
    wait(distributed.all_gather_into_tensor(whole, padded, group, async_op=True), what)
    parts = zip(whole.view(world_size, longest), sizes.tolist(), strict=True)
    return [pickle.loads(part[:size].numpy().tobytes()) for part, size in parts]


#: Settings that may differ between ranks, since they concern a rank's way to the servers, or no server receives them.
_OWN = {"rank", "servers", "transport", "streaming", "layerwise", "frozen", "written_weights", "nonfinite"}


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
    """Returns two values as text, or only their first items that differ."""
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
    all_reduce(counts).wait("the end of a backward pass")
    return [int(count) for count in (accelerator.to_host(counts) if is_there else counts).tolist()]


#: Longest wait for rank 0's opening in seconds: the worker's ``slow_deadline``, which bounds rank 0's upload.
_LONGEST = 1800.0
#: The longest pause between two polls.
_PAUSE = 0.1

#: Number of rank 0's openings of a job whose outcome this process knows, by the job's name. All ranks run the same
#: program, so a rank waits for the outcome with the next number.
_known: dict[str, int] = {}


def rank_0_first(job: str, rank: int, world_size: int, act: Callable[[], T], *, is_shared: bool) -> T:
    """Opens a job on this rank. Ranks other than 0 first wait for rank 0's opening, if a process group has all ranks.

    Args:
        is_shared: whether a failure here fails on all ranks, which then open the job again together.

    Raises:
        LongshoreError: rank 0's failure, on all ranks, or this one's own.
        WaitError: if rank 0 reports nothing in time, or has ended.
    """
    store = _store() if can_meet(world_size) else None
    if store is None:
        return act()
    if rank != 0:
        _hear(store, job)
        try:
            return act()
        except BaseException:
            # After a failure that is not shared only this rank opens the job again. Rank 0 does not, so its last
            # outcome must count once more.
            _known[job] -= not is_shared
            raise
    try:
        opened = act()
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store is gone; the caller's own error is raised
            _say(store, job, of_error(error))
        raise
    _say(store, job, None)
    return opened


def _say(store: Any, job: str, failure: Failure | None) -> None:
    _known[job] = _known.get(job, 0) + 1
    store.set(_opening(job, _known[job]), json.dumps(failure))


def _hear(store: Any, job: str) -> None:
    """Waits for the outcome of rank 0's opening with this rank's next number."""
    number = _known.get(job, 0) + 1
    start, pause, said = time.monotonic(), 0.001, False
    try:
        while not store.check([_opening(job, number)]):
            waited = time.monotonic() - start
            if waited >= _LONGEST:
                raise WaitError(f"waited {_LONGEST:.0f} s for rank 0 to open job {job} and to fill it: see what it does, and call open() on all ranks")
            if waited >= _LONG and not said:
                warn(f"still waiting for rank 0 to open job {job} and to fill it, for {_LONGEST:.0f} s at most", RuntimeWarning)
                said = True
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE)
        failure = json.loads(store.get(_opening(job, number)))
    except RuntimeError as error:
        if isinstance(error, WaitError):
            raise
        raise WaitError(f"rank 0 has ended before it opened job {job}: look at its error. torch.distributed says: {error}") from error
    _known[job] = number
    if failure is not None:
        raise elsewhere(0, failure)


def _opening(job: str, number: int) -> str:
    return key(f"opened/{job}/{number}")
