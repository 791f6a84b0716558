"""The examples as tests use them: imported, or run as processes that are killed."""

import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
from typing import Any

from conftest import ended_after

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def load(name: str) -> dict[str, Any]:
    """The names that an example defines."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile((EXAMPLES / f"{name}.py").read_text(), EXAMPLES / f"{name}.py", "exec"), names)
    return names


def random_step(first: int, last: int) -> int:
    """A step to kill a process at, from a seed that is printed."""
    seed = random.SystemRandom().randrange(1 << 32)
    step = random.Random(seed).randint(first, last)
    print(f"seed {seed}: killed at step {step}")
    return step


def start(name: str, call: str, **environment: str) -> subprocess.Popen[str]:
    """Runs ``main(...)`` of an example in a process of its own."""
    code = f"import sys, torch; torch.set_num_threads(1); sys.path.insert(0, {str(EXAMPLES)!r}); import {name}; {name}.main({call})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def kill_at(step: int, *processes: subprocess.Popen[str]) -> dict[int, float]:
    """Kills processes when the first of them says that it begins a step.

    Returns:
        The losses that it printed before, by step.
    """
    losses = {}
    output = processes[0].stdout
    assert output is not None
    with ended_after(300, *processes):
        for line in output:
            words = line.split()
            if words[:1] == ["loss"]:
                losses[int(words[1])] = float(words[2])
            if words == ["step", str(step)]:
                break
        else:
            raise AssertionError(f"step {step} did not begin within 300 s: {losses}")
    for process in processes:
        process.send_signal(signal.SIGKILL)
    codes = [process.wait(timeout=60) for process in processes]
    assert codes == [-signal.SIGKILL] * len(processes), "it ended before it was killed"
    return losses


def ranks(number: int) -> list[dict[str, str]]:
    """The environments of torchrun's processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**both, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
