"""One thread for torch, so that sums have one order; and servers of their own for tests that want some."""

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
    """Each test leaves the environment as it was. Libraries set ``RANK`` and others, by which later tests would train as a rank of many."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def servers() -> Iterator[str]:
    """The address of a server that is a process of its own."""
    with running() as address:
        yield address


@pytest.fixture
def two_servers() -> Iterator[str]:
    """The addresses of two. A model needs a shard for each."""
    with several(2) as addresses:
        yield addresses


@contextlib.contextmanager
def several(number: int, memory: str = "256MiB") -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        yield ",".join(stack.enter_context(running(memory=memory)) for _ in range(number))


@contextlib.contextmanager
def running(*flags: str, memory: str = "256MiB") -> Iterator[str]:
    """The address of a server that ends with the block."""
    process, address = serve(*flags, memory=memory)
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def serve(*flags: str, listen: str = "127.0.0.1:0", memory: str = "256MiB") -> tuple[subprocess.Popen[str], str]:
    """Starts a server, on a free port unless told which. Returns its process and its address."""
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
    """What ``longshore status`` says of the one job of a server."""
    code = "import sys; from longshore.__main__ import main; sys.argv[0] = 'longshore'; sys.exit(main())"
    command = [sys.executable, "-c", code, "status", "--json", "--servers", address]
    (job,) = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    found: dict[str, Any] = json.loads(job)["servers"][0]
    return found


@contextlib.contextmanager
def ended_after(seconds: float, *processes: subprocess.Popen[str]) -> Iterator[None]:
    """Ends processes that take longer, so that nobody reads what they say for ever."""

    def end() -> None:
        for process in processes:
            process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
