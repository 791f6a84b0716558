"""Ctrl-C ends each wait for a silent server long before its deadline, and the interrupted call can be repeated."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Server
from forked import Forked
from models import pair
from units import Deep, optimizer_of, same, train, weight_bytes

import longshore

pytestmark = pytest.mark.usefixtures("ctrl_c")
#: Seconds that a wait may take. A wait that ends earlier was not ended by the deadline.
DEADLINE = 300
WIDTH = 512


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server("--checkpoint-dir", str(tmp_path), memory="1GiB") as server:
        yield server


@dataclass
class Case:
    """A call that waits for a server.

    Attributes:
        where: The waiting function, which calls the Rust half.
        act: The call that waits.
        again: The repetition once the server answers again, until the model has its undisturbed weights.
        options: The job's options.
        depth: The model's depth. A deep model has more gradients than fit on the way to a server that reads none.
    """

    where: str
    act: Callable[[longshore.AdamW, Any], object]
    again: Callable[[longshore.AdamW, Any], object]
    options: dict[str, Any] = field(default_factory=dict)
    depth: int = 2


def backward(optimizer: longshore.AdamW, model: Any) -> None:
    model.loss(2).backward()


def step(optimizer: longshore.AdamW, model: Any) -> None:
    train(model, optimizer, steps=1, first=2)


def give_up(optimizer: longshore.AdamW, model: Any) -> None:
    """Gives an interrupted step up as a training loop does, and makes it again."""
    optimizer.zero_grad()
    optimizer.flush()
    step(optimizer, model)


def flush(optimizer: longshore.AdamW, model: Any) -> None:
    optimizer.flush()


def step_and_flush(optimizer: longshore.AdamW, model: Any) -> None:
    """Makes a step without a wait, and then waits for it."""
    step(optimizer, model)
    optimizer.flush()


def checkpoint(optimizer: longshore.AdamW, _: Any) -> str:
    return optimizer.checkpoint("kept")


def full_state(optimizer: longshore.AdamW, _: Any) -> dict[str, Any]:
    return optimizer.state_dict(full=True)


#: Cases by their names. Each is interrupted after two steps, and ends after three.
CASES = {
    "flush": Case("drain", step_and_flush, flush, {"delay": 1, "warmup_steps": 3, "streaming": False}),
    "checkpoint": Case("_write_checkpoint", checkpoint, lambda *given: (checkpoint(*given), step(*given))),
    "full state": Case("left_out", full_state, lambda *given: (full_state(*given), step(*given))),
    "backward": Case("push", backward, give_up, depth=32),
    "step": Case("_commit", step, flush, {"streaming": False}),
}


class Pressed:
    """Presses Ctrl-C once a thread has stayed at one instruction for half a second, as in a wait of the Rust half."""

    def __init__(self) -> None:
        self._waiting = threading.get_ident()
        self.at = 0.0
        self.where = ""
        self._thread = threading.Thread(target=self._press)

    def __enter__(self) -> "Pressed":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _press(self) -> None:
        seen: object = None
        since, end = time.monotonic(), time.monotonic() + 60
        while time.monotonic() - since < 0.5 and time.monotonic() < end:
            frame = sys._current_frames()[self._waiting]
            if seen != (id(frame), frame.f_lasti):
                seen, since = (id(frame), frame.f_lasti), time.monotonic()
            self.where = frame.f_code.co_name
            del frame
            time.sleep(0.005)  # the watched thread needs the interpreter
        self.at = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)


def interrupted(server: Server, act: Callable[[], object], where: str | None, *, stops: bool = True) -> None:
    """Stops the server unless ``act`` does, interrupts ``act`` in its wait, and lets the server continue."""
    if stops:
        server.stop()
    try:
        with Pressed() as pressed, pytest.raises(KeyboardInterrupt):
            act()
        took = time.monotonic() - pressed.at
    finally:
        server.resume()
    assert took < 10, f"{took:.1f} s, and the deadline is {DEADLINE} s"
    assert where in (None, pressed.where)


def made(model: Any, server: Server, **options: Any) -> longshore.AdamW:
    given = {"servers": server.address, "job": "stopped", "deadline": DEADLINE, "shard_elements": 65536}
    return optimizer_of(model, **{**given, **options})


@pytest.mark.parametrize("name", CASES)
def test_ctrl_c_ends_it_while_a_server_is_stopped(server: Server, name: str) -> None:
    case = CASES[name]
    whole, ours = pair(Deep, depth=case.depth, width=WIDTH, dtype=torch.float32)
    train(whole, optimizer_of(whole), steps=3)
    optimizer = made(ours, server, **case.options)
    train(ours, optimizer, steps=2)
    optimizer.flush()
    interrupted(server, lambda: case.act(optimizer, ours), case.where)
    case.again(optimizer, ours)
    assert optimizer.flush() == 3
    same(whole, ours)


def test_ctrl_c_while_a_job_is_opened_or_closed(server: Server) -> None:
    """Another optimizer continues a job whose end was interrupted."""
    whole, ours = pair(Deep, depth=2)
    train(whole, optimizer_of(whole), steps=3)
    optimizer = made(ours, server)
    interrupted(server, optimizer.open, "__init__")
    optimizer.open()
    train(ours, optimizer, steps=2)
    optimizer.flush()
    interrupted(server, optimizer.close, "close")
    optimizer = made(ours, server)
    assert optimizer.version == 2
    train(ours, optimizer, steps=1, first=2)
    assert optimizer.flush() == 3
    same(whole, ours)


@pytest.mark.parametrize("layer", [0, 5])
def test_ctrl_c_while_units_are_awaited(server: Server, layer: int) -> None:
    whole, cut = pair(Deep)
    train(whole, optimizer_of(whole), steps=3)
    optimizer = made(cut, server)
    longshore.shard(cut, optimizer, weight_bytes(cut) // 8)
    train(cut, optimizer, steps=2)
    stopping = cut.layers[layer].register_forward_pre_hook(lambda *_: server.stop(), prepend=True)
    interrupted(server, lambda: cut.loss(2), None, stops=False)
    stopping.remove()
    train(cut, optimizer, steps=1, first=2)
    same(whole, cut)


def interrupted_forward(address: str, process: int) -> longshore.AdamW:
    """Stops the server in a forward, in which fetches ahead are under way, and ends the forward. Returns the optimizer."""
    model = Deep()
    optimizer = optimizer_of(model, servers=address, job="ends", deadline=DEADLINE)
    longshore.shard(model, optimizer, weight_bytes(model) // 8)
    train(model, optimizer, steps=2)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    model.layers[5].register_forward_pre_hook(lambda *_: os.kill(process, signal.SIGSTOP), prepend=True)
    signal.alarm(2)
    with pytest.raises(KeyboardInterrupt):
        model.loss(2)
    return optimizer


def test_a_process_ends_while_units_are_fetched_ahead(server: Server) -> None:
    call = f"import test_ctrl_c; kept = test_ctrl_c.interrupted_forward({server.address!r}, {server._process.pid})"
    child = Forked(call, stderr=subprocess.PIPE)
    _, said = child.communicate(timeout=DEADLINE / 5)
    assert child.returncode == 0, said
