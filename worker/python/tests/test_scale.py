"""A job moves to other servers, while a script trains or by a checkpoint, and keeps its bits."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Said, running

import longshore


def train(servers: str, moved: Callable[[longshore.AdamW, int], None]) -> list[torch.Tensor]:
    """Trains 200 steps, calls ``moved`` before each, and returns the weights."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    inputs, targets = torch.randn(8, 16), torch.randn(8, 4)
    with longshore.AdamW(model.named_parameters(), lr=1e-2, servers=servers, job="moving") as optimizer:
        for step in range(200):
            moved(optimizer, step)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        optimizer.flush()
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_script_moves_its_job_and_the_first_server_stops(said: Said) -> None:
    with longshore.Server() as alone:
        expected = train(alone.address, lambda optimizer, step: None)
    first, second = longshore.Server(), longshore.Server()

    def move(optimizer: longshore.AdamW, step: int) -> None:
        if step == 5:
            with pytest.raises(longshore.errors.InvalidError, match="max_exposed"):
                optimizer.scale([second.address], max_exposed=0)
            with pytest.raises(longshore.errors.InvalidError, match="one of memory, shm, nvme"):
                optimizer.scale([second.address], tier="dram")
            optimizer.scale(f"{second.address}, ", max_exposed=0.25)  # as servers= takes it
        if step == 150:
            first.close()

    logging.getLogger("longshore").setLevel(logging.INFO)
    try:
        with second:
            found = train(first.address, move)
    finally:
        logging.getLogger("longshore").setLevel(logging.NOTSET)
    said.wait_for("job opened")
    assert "max_exposed=0.25" in said.wait_for("moving to other servers").getMessage()
    for known, moved in zip(expected, found, strict=True):
        assert torch.equal(known, moved)


def test_a_handle_takes_its_job_to_more_servers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(512, 512)
    inputs = torch.randn(4, 512)

    def steps(servers: list[str], number: int, handle: Any = None) -> Any:
        options: Any = {"servers": servers, "job": "grows", "shard_elements": 64 * 1024}
        with longshore.AdamW(model.named_parameters(), lr=1e-3, **options) as optimizer:
            if handle is not None:
                optimizer.load_state_dict(handle)
            for _ in range(number):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            optimizer.flush()
            if handle is not None or len(servers) == 1:
                return optimizer.version
            optimizer.checkpoint("before")
            return optimizer.state_dict()

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running("--checkpoint-dir", str(tmp_path))) for _ in range(3)]
        handle = steps(servers[:2], 3)
        assert steps(servers, 2, handle) == 5
        found = [weights.clone() for weights in model.parameters()]
    torch.manual_seed(1)
    model = torch.nn.Linear(512, 512)
    with longshore.Server() as alone:
        steps([alone.address], 5)
    for known, moved in zip(model.parameters(), found, strict=True):
        assert torch.equal(known, moved)
