"""Ranks come and go: all of them start again with another number, and the job goes on. torchrun's agents do so by themselves."""

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ended_after, running, several
from forked import Forked
from torch import Tensor, nn

import longshore
from longshore import errors

#: World sizes, one after the other. Each trains for `STEPS` steps.
SCHEDULE = (4, 2, 3)
STEPS = 4
SHARDS = {"shard_elements": 64 * 1024}


def built(weights: dict[str, Tensor] | None) -> nn.Module:
    """Returns a model of several shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 4))
    if weights is not None:
        model.load_state_dict(weights)
    return model


def backward(model: nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(8, 16, generator=generator)).square().mean().backward()


def phase(
    servers: str, job: str, world_size: int, first: int, before: Any = None, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Trains ``STEPS`` steps from ``first`` on as ``world_size`` ranks. Returns rank 0's state and weights. With ``before``, those of an
    earlier phase, the job is a new one that begins with them."""
    state, weights = before or (None, None)
    models = [built(weights) for _ in range(world_size)]

    def rank(number: int) -> Any:
        model = models[number]
        made = longshore.AdamW(
            model.named_parameters(), lr=1e-3, servers=servers, job=job, rank=number, world_size=world_size, **{**SHARDS, **options}
        )
        with made as optimizer:
            if state is not None:
                optimizer.load_state_dict(state)
            else:
                optimizer.open()
                assert first - optimizer.version <= options.get("delay", 0)
            for step in range(first, first + STEPS):
                backward(model, step, number)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.flush()
            return optimizer.state_dict(full=True) if number == 0 else None

    with ThreadPoolExecutor(world_size) as ranks:
        [found, *_] = [rank.result(120) for rank in [ranks.submit(rank, number) for number in range(world_size)]]
    return found, models[0].state_dict()


@contextlib.contextmanager
def two(tier: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yields two servers that have a tier."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        flags = {"nvme": ("--state-dir", folder), "shm": ("--shm-dir", Path(shared)), "memory": ()}[tier]
        one, other = ([flags[0], str(flags[1] / name)] if flags else [] for name in "ab")
        for name in "ab" if flags else "":
            (flags[1] / name).mkdir()
        with running(*one, memory="1GiB") as first, running(*other, memory="1GiB") as second:
            yield first, second


def are_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(weights, found[name]) for name, weights in expected.items())


@pytest.mark.parametrize("options", [
    {},
    {"streaming": True, "max_grad_norm": 0.5},
    {"tier": "shm"},
    {"tier": "nvme"},
], ids=str)
def test_each_number_of_ranks_has_the_bits_of_a_job_of_its_own(options: dict[str, Any], tmp_path: Path) -> None:
    with two(options.get("tier", "memory"), tmp_path) as servers:
        apart = None
        for number, world_size in enumerate(SCHEDULE):
            apart = phase(",".join(servers), f"apart-{number}", world_size, number * STEPS, apart, **options)
            _, found = phase(",".join(servers), "elastic", world_size, number * STEPS, **options)
            assert are_equal(found, apart[1]), f"with {world_size} ranks"


@pytest.mark.parametrize("tier", ["memory", "shm", "nvme"])
def test_delayed_steps_have_the_bits_of_one_server(tier: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tier": tier, "delay": 1}
    with two(options.get("tier", "memory"), tmp_path) as servers:
        for number, world_size in enumerate(SCHEDULE):
            first = number * STEPS
            _, alone = phase(servers[0], "alone", world_size, first, **options)
            _, found = phase(",".join(servers), "elastic", world_size, first, **options)
            assert are_equal(found, alone), f"with {world_size} ranks"


def test_a_job_has_room_for_the_ranks_that_it_names() -> None:
    with several(2) as servers:
        phase(servers, "small", 1, 0)
        with pytest.raises(errors.RefusedError, match=r"world_size is 2, but must be at most 1, .*: start fewer ranks; for more"):
            phase(servers, "small", 2, STEPS)
        phase(servers, "large", 1, 0, max_ranks=3)
        phase(servers, "large", 3, STEPS, max_ranks=3)
        phase(servers, "large", 2, 2 * STEPS)
    with pytest.raises(errors.InvalidError, match="max_ranks is 1, but must be at least 2"):
        phase(servers, "large", 2, 0, max_ranks=1)


def test_a_rank_of_another_number_says_which() -> None:
    with several(1) as servers:
        options: Any = {"servers": servers, "job": "two", **SHARDS}
        with longshore.AdamW(built(None).named_parameters(), rank=0, world_size=1, max_ranks=2, **options) as alone:
            alone.open()
            with pytest.raises(errors.RefusedError, match="world_size is 2 on rank 1, but must be 1, rank 0's: start all ranks anew"):
                longshore.AdamW(built(None).named_parameters(), rank=1, world_size=2, deadline=3.0, **options)


#: The program of one of torchrun's ranks. With two ranks, rank 1 stays away after its third step, like a lost host.
RANK = """
import os, sys, time, torch, longshore
rank, ranks, servers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
with longshore.AdamW(model.named_parameters(), lr=1e-2, servers=servers, job="elastic", deadline=5.0) as optimizer:
    print(f"rank {rank} of {ranks} begins at {optimizer.version}", flush=True)
    for step in range(optimizer.version, 8):
        if step == 3 and rank == 1:
            os.kill(os.getppid(), 9)
            os._exit(9)
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    print(f"rank {rank} of {ranks} ends at {optimizer.version}", flush=True)
"""


def test_torchrun_goes_on_without_a_host_that_is_lost(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    quick = "is_host=0,last_call_timeout=1,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=2"
    flags = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
    flags += ["--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-conf", quick, "--local-addr", "localhost"]
    with several(2) as servers:
        code = f"from torch.distributed.run import main; main({[*flags, str(program), servers]!r})"
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        agents = [Forked(code, environment=environment, **streams) for _ in range(2)]
        with ended_after(240, *agents):
            said = [agent.communicate()[0] for agent in agents]
    text = "\n".join(said)
    assert re.findall(r"rank (\d) of (\d) begins at 0", text), text
    assert "rank 0 of 1 begins at 3" in text and "rank 0 of 1 ends at 8" in text, text
    assert 0 in [agent.returncode for agent in agents], text
