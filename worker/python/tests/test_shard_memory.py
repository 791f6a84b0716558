"""Over a network, a process with a model in units holds only units on their way, and asks for each as often as it comes."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import serve, several
from units import Deep, check_in_units, optimizer_of, pair, same, train, weight_bytes

import longshore
from longshore import errors
from longshore.units.residency import Residency

LAYERS = 32


class Server:
    """A server's process, which can be stopped and resumed."""

    def __init__(self) -> None:
        self.process, self.address = serve()
        self.is_stopped = threading.Event()

    def stop(self, *_: Any) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        self.is_stopped.set()

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.process.kill()
    server.process.wait()


def test_a_process_holds_what_is_on_its_way() -> None:
    with several(1, memory="1GiB") as servers:
        model = Deep(LAYERS, 1024)
        whole = weight_bytes(model)
        assert whole > 64 << 20
        unit = whole // LAYERS
        # Gradients of one unit, and three units of weights.
        budget = 4 * unit
        optimizer = optimizer_of(model, servers=servers, job="large", transport="tcp")
        sharded = longshore.shard(model, optimizer, budget)
        fetched = []
        for step in range(4):
            before = sharded.fetched_bytes
            train(model, optimizer, steps=1, first=step)
            fetched.append(sharded.fetched_bytes - before)
        # Forward needs every unit. Backward needs all but the first, and the last three have stayed.
        assert [step / unit for step in fetched] == [2 * LAYERS - 4] * 4
        assert optimizer._connection is not None
        job = optimizer._connection.job
        held = job.weights_held()
        assert unit <= held <= 3 * unit, f"{held / unit} units were held at once"
        assert optimizer.last_report is not None and optimizer.last_report.pulled_bytes == fetched[-1]
        optimizer.close()


def test_a_process_that_joins_does_not_hold_the_model_either(servers: str) -> None:
    """Weights read to open the job are dropped when the model is cut."""
    whole, cut = pair(Deep, width=96)
    options = {"servers": servers, "job": "again", "transport": "tcp"}
    first = optimizer_of(whole, **options)
    train(whole, first, steps=2)
    first.close()
    optimizer = optimizer_of(cut, **options)
    longshore.shard(cut, optimizer, budget := weight_bytes(cut) // 8)
    assert optimizer._connection is not None
    same(whole, cut)
    train(cut, optimizer, steps=2, first=2)
    held = optimizer._connection.job.weights_held()
    assert 0 < held <= budget, f"{held} bytes, budget {budget}"


@pytest.mark.parametrize("layer", [0, 5])
def test_ctrl_c_while_units_are_awaited(server: Server, layer: int) -> None:
    """The wait ends at once, and the step can be repeated once the server continues."""
    whole, cut = pair(Deep)
    train(whole, optimizer_of(whole))
    optimizer = optimizer_of(cut, servers=server.address, job="stopped", transport="tcp", deadline=300)
    longshore.shard(cut, optimizer, weight_bytes(cut) // 8)
    train(cut, optimizer, steps=2)
    stopping = cut.layers[layer].register_forward_pre_hook(server.stop, prepend=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted: list[float] = []
    interrupter = threading.Thread(target=_interrupt, args=(threading.get_ident(), server, interrupted))
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            cut.loss(2)
        assert interrupted, "the thread never waited for weights"
        took = time.monotonic() - interrupted[0]
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, before)
        server.go_on()
    assert took < 10, f"{took:.1f} s, and the deadline is 300 s"
    stopping.remove()
    train(cut, optimizer, steps=3, first=2)
    same(whole, cut)


def _interrupt(thread: int, server: Server, at: list[float]) -> None:
    """Sends Ctrl-C once a thread waits for weights of a stopped server, or after a minute."""
    end = time.monotonic() + 60
    server.is_stopped.wait(60)
    while not (waits := _waits(sys._current_frames()[thread])) and time.monotonic() < end:
        time.sleep(0.001)  # the watched thread needs the interpreter
    if waits:
        at.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)


def _waits(frame: Any) -> bool:
    """Returns whether a thread waits for a fetch. The wait's own frames are missing, or belong to the standard library."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(("units/fetching.py", "units/fetch.py")) and frame.f_code.co_name in ("read", "finish"):
            return True
        frame = frame.f_back
    return False


def test_gradients_leave_while_units_are_awaited(server: Server) -> None:
    _, cut = pair(Deep)
    optimizer = optimizer_of(cut, servers=server.address, job="pushes", transport="tcp", deadline=300)
    longshore.shard(cut, optimizer, weight_bytes(cut) // 8)
    train(cut, optimizer, steps=2)
    connection = optimizer._connection
    assert connection is not None
    param = connection.params[0]
    gradient, target = (param.tensor.new_ones(param.shape).contiguous() for _ in range(2))
    place, into = ((param.index, tensor.data_ptr(), param.elements, param.wire) for tensor in (gradient, target))
    server.stop()
    with pytest.raises(errors.InvalidError, match=r"tensor is \d+ elements from 1 on, but must be a part of \d+ elements"):
        connection.job.fetch(connection.version, [(into, 1)])
    fetch = connection.job.fetch(connection.version, [(into, 0)])
    reads = threading.Event()

    def read() -> None:
        reads.set()
        with pytest.raises(errors.UsageError):
            fetch.read()

    reader = threading.Thread(target=read)
    reader.start()
    reads.wait(60)
    connection.job.begin_step()
    connection.job.push([place])
    assert reader.is_alive(), "the weights have not come"
    fetch.cancel()
    reader.join(60)
    assert not reader.is_alive(), "a wait that is cancelled ends while the server is stopped"
    server.go_on()


def test_small_units_come_from_further_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip needs more than four small units ahead to hide. The results and the budget stay."""
    most = [0]
    ahead = Residency._fetch_ahead

    def noted(residency: Residency, *, shared: bool) -> None:
        ahead(residency, shared=shared)
        most.append(len(residency._under_way))

    monkeypatch.setattr(Residency, "_fetch_ahead", noted)
    check_in_units(*pair(Deep), share=1 / 2)
    assert max(most) > 8
