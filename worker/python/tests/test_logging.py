"""The library's messages during a call come through Python's logging."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import longshore
from longshore import errors


class Said(logging.Handler):
    """Lets a test wait for a record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.changed:
            self.records.append(record)
            self.changed.notify_all()

    def wait_for(self, text: str) -> logging.LogRecord:
        def found() -> logging.LogRecord | None:
            return next((record for record in self.records if text in record.getMessage()), None)

        with self.changed:
            record = self.changed.wait_for(found, timeout=60)
        assert record is not None, [record.getMessage() for record in self.records]
        return record


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    logger = logging.getLogger("longshore")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_rank_says_whom_it_waits_for(servers: str, said: Said) -> None:
    model = nn.Linear(4, 4)
    optimizer = longshore.AdamW(model.named_parameters(), servers=servers, job="alone", rank=0, world_size=2, deadline=7.0)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(errors.LongshoreError, match="rank 1"):
        optimizer.step()
    record = said.wait_for("still waiting for ")
    assert (record.name, record.levelno) == ("longshore.worker", logging.WARNING)
    assert servers in record.getMessage() and "rank 1" in record.getMessage() and "job=alone" in record.getMessage()


def test_a_pause_says_why(servers: str, said: Said) -> None:
    """An overflow at the smallest loss scale pauses the job, until an operator resumes it."""
    model = nn.Linear(4, 4).half()
    scale = longshore.LossScale(initial=1.0, min=1.0, hysteresis=1)
    optimizer = longshore.AdamW(model.named_parameters(), servers=servers, job="overflows", loss_scale=scale)

    def step(gradient: float) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, gradient)
        optimizer.step()

    failed: list[BaseException] = []
    # The step may wait for an hour. A daemon thread keeps a failing test from waiting for it.
    overflows = threading.Thread(target=kept(lambda: step(float("inf")), failed), daemon=True)
    overflows.start()
    record = said.wait_for("the job is paused")
    assert record.levelno == logging.WARNING and "longshore resume" in record.getMessage()
    command = [sys.executable, "-m", "longshore", "resume", "--servers", servers, "--job", "overflows"]
    subprocess.run(command, check=True, timeout=60, env={**os.environ})
    overflows.join(timeout=60)
    assert not overflows.is_alive() and not failed, failed
    step(1.0)
    assert optimizer.version == 2


def kept(act: Callable[[], None], failed: list[BaseException]) -> Callable[[], None]:
    def run() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    return run


def test_a_server_of_this_process_is_heard(said: Said) -> None:
    level = logging.getLogger("longshore").level
    logging.getLogger("longshore").setLevel(logging.INFO)
    try:
        with longshore.Server() as server:
            model = nn.Linear(4, 4)
            with longshore.AdamW(model.named_parameters(), servers=server, job="heard") as optimizer:
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        said.wait_for("job opened")
    finally:
        logging.getLogger("longshore").setLevel(level)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_handler_that_fails_fails_no_step() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("this handler is broken")

    logger, broken = logging.getLogger("longshore"), Broken()
    level = logger.level
    logger.addHandler(broken)
    logger.setLevel(logging.INFO)
    try:
        model = nn.Linear(4, 4)
        with (
            longshore.Server() as server,
            longshore.AdamW(model.named_parameters(), servers=server, job="heard") as optimizer,
        ):
            for step in (1, 2):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                assert optimizer.version == step
    finally:
        logger.removeHandler(broken)
        logger.setLevel(level)
