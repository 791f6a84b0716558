"""Fixtures: one thread for torch, so that sums have a fixed order, and server processes for tests."""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import distributed

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Keeps the imported objects out of each later collection. A complete one would take 0.3 s."""
    gc.freeze()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restores the environment after each test. Libraries set ``RANK`` and others, which would make later tests train as a rank of many."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def servers() -> Iterator[str]:
    """Yields the address of a server process."""
    with running() as address:
        yield address


@pytest.fixture
def server() -> Iterator["Server"]:
    """Yields a server process that a test stops or kills."""
    with Server() as server:
        yield server


@pytest.fixture
def two_servers() -> Iterator[str]:
    """Yields the addresses of two servers. A model needs a shard for each."""
    with several(2) as addresses:
        yield addresses


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and Python then leaves it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@contextlib.contextmanager
def several(number: int, memory: str = "256MiB") -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        yield ",".join(stack.enter_context(running(memory=memory)) for _ in range(number))


@contextlib.contextmanager
def running(*flags: str, memory: str = "256MiB") -> Iterator[str]:
    """Yields the address of a server that ends with the block."""
    with Server(*flags, memory=memory) as server:
        yield server.address


class Server:
    """A server's process on a free port, which can be stopped, killed, and started again at its address."""

    def __init__(self, *flags: str, memory: str = "256MiB") -> None:
        self._flags = ["--memory", memory, "--threads", "1", *flags]
        self._start("127.0.0.1:0")

    def _start(self, listen: str) -> None:
        code = "import sys; from longshore.__main__ import serve; sys.argv[0] = 'longshored'; sys.exit(serve())"
        command = [sys.executable, "-c", code, "--listen", listen, *self._flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.address = address_of(self._process)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def start_again(self) -> None:
        self.kill()
        self._start(self.address)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # until then a thread of the server may still answer

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def address_of(process: subprocess.Popen[str]) -> str:
    """Waits until a server listens."""
    assert process.stdout is not None
    with ended_after(60, process):
        line = process.stdout.readline()
    assert line.startswith("longshored listening on "), line or "it ended, or said nothing for 60 s"
    return line.split()[-1]


@contextlib.contextmanager
def ended_after(seconds: float, *processes: subprocess.Popen[str]) -> Iterator[None]:
    """Ends processes after ``seconds``, so that a read of their output cannot block forever."""

    def end() -> None:
        for process in processes:
            process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
