"""Fixtures: one thread for torch, so that sums have a fixed order, and server processes for tests."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


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
def two_servers() -> Iterator[str]:
    """Yields the addresses of two servers. A model needs a shard for each."""
    with several(2) as addresses:
        yield addresses


@contextlib.contextmanager
def several(number: int, memory: str = "256MiB") -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        yield ",".join(stack.enter_context(running(memory=memory)) for _ in range(number))


@contextlib.contextmanager
def running(*flags: str, memory: str = "256MiB") -> Iterator[str]:
    """Yields the address of a server that ends with the block."""
    process, address = serve(*flags, memory=memory)
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def serve(*flags: str, listen: str = "127.0.0.1:0", memory: str = "256MiB") -> tuple[subprocess.Popen[str], str]:
    """Starts a server, on a free port by default. Returns its process and its address."""
    code = "import sys; from longshore.__main__ import serve; sys.argv[0] = 'longshored'; sys.exit(serve())"
    command = [sys.executable, "-c", code, "--listen", listen, "--memory", memory, "--threads", "1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return process, address_of(process)


def address_of(process: subprocess.Popen[str]) -> str:
    """Waits until a server listens."""
    assert process.stdout is not None
    with ended_after(60, process):
        line = process.stdout.readline()
    assert line.startswith("longshored listening on "), line or "it ended, or said nothing for 60 s"
    return line.split()[-1]


def job_on(address: str) -> dict[str, Any]:
    """Returns the output of ``longshore status`` on the only job of a server."""
    code = "import sys; from longshore.__main__ import main; sys.argv[0] = 'longshore'; sys.exit(main())"
    command = [sys.executable, "-c", code, "status", "--json", "--servers", address]
    (job,) = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    found: dict[str, Any] = json.loads(job)["servers"][0]
    return found


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
