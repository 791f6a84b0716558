"""The examples as tests use them: imported, or as processes that tests kill."""

import os
import pathlib
import random
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from conftest import ended_after
from forked import Forked
from torch.distributed import TCPStore

#: The examples' folder, which is on the tests' path.
EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
#: Stores of processes that a test starts together. A store ends once nothing refers to it.
STORES: list[TCPStore] = []


def arguments(folder: pathlib.Path, **more: Any) -> Any:
    """Returns arguments of the Hugging Face Trainer on a CPU, which reports nothing and saves nothing."""
    import transformers

    given = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", **more}
    return transformers.TrainingArguments(str(folder), **given)


def random_step(first: int, last: int) -> int:
    """Returns a step at which to kill a process, from a printed seed."""
    seed = random.SystemRandom().randrange(1 << 32)
    step = random.Random(seed).randint(first, last)
    print(f"seed {seed}: killed at step {step}")
    return step


def start(name: str, call: str, **environment: str) -> subprocess.Popen[str]:
    """Runs ``main(...)`` of an example in its own process."""
    code = f"import torch, {name}; torch.set_num_threads(1); {name}.main({call})"
    return Forked(code, environment={**os.environ, **environment}, imports=[name], stdout=subprocess.PIPE)


def kill_at(step: int, *processes: subprocess.Popen[str]) -> dict[int, float]:
    """Kills processes when the first of them prints the beginning of ``step``.

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
    """Returns the environments of torchrun's processes. The rendezvous store belongs to this process, as to torchrun: no other process can
    take its port before rank 0 starts, and an early rank can connect."""
    STORES.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(STORES[-1].port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return [{**place, "WORLD_SIZE": str(number), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]


def run_ranks(number: int, code: str, imports: Sequence[str] = (), **environment: str) -> list[str]:
    """Runs this code on ranks to their end. Returns their standard outputs."""
    environments = [{**os.environ, **environment, **rank} for rank in ranks(number)]
    started = [Forked(code, environment=each, imports=imports, stdout=subprocess.PIPE) for each in environments]
    with ended_after(300, *started):
        said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * number, said
    return said
