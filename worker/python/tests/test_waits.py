"""Waits for collectives, and ranks' messages in the process group's store, without other ranks."""

import datetime
from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from longshore import errors
from longshore.distributed import collectives

CPU = torch.device("cpu")


class Work:
    """A collective whose first wait gives up just before its end."""

    def __init__(self, failure: str | None) -> None:
        self._failure = failure
        self.waits = 0

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_failed", "_failed_in"):
        monkeypatch.setattr(collectives, name, None)
    initialize()
    yield
    distributed.destroy_process_group()


def initialize() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def test_what_ends_just_after_a_look_has_not_failed(group: None) -> None:
    work = Work(None)
    collectives.wait(work, "weights")
    assert work.waits == 2
    with pytest.raises(errors.WaitError, match=r"waited for weights, and another rank has ended.*Connection closed"):
        collectives.wait(Work("Connection closed by peer"), "weights")


def test_a_process_group_whose_collectives_are_out_of_step_is_refused(group: None) -> None:
    for error in (collectives.known(MemoryError("that all ranks know")), MemoryError("of all ranks")):
        collectives.begin()
        with pytest.raises(MemoryError), collectives.telling():
            raise error
    collectives.begin()
    with pytest.raises(MemoryError), collectives.telling():
        raise MemoryError("no memory")
    with pytest.raises(errors.LongshoreError, match="no memory"):
        collectives._raise_failure()  # as a rank does that waits for this one
    for _ in range(2):
        with pytest.raises(errors.UsageError, match="rank 0 has failed in the midst of.*no memory"):
            collectives.begin()
    distributed.destroy_process_group()
    initialize()
    collectives.begin()
    collectives.refuse()


def test_what_ranks_said_before_torchrun_started_them_again_is_not_heard(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    collectives.begin()
    distributed.distributed_c10d._get_default_store().set(collectives._key(), '[0, ["MemoryError", "no memory", null]]')
    with pytest.raises(errors.LongshoreError, match="rank 0 failed, so that no rank can go on: no memory"):
        collectives._raise_failure()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    collectives._raise_failure()
    # Agents of several hosts may count differently.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert collectives.key("x") == "longshore/0/x"
