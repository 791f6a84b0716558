"""A job moves to another server while a script trains, and keeps its bits."""

from collections.abc import Callable

import torch

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


def test_a_script_moves_its_job_and_the_first_server_stops() -> None:
    with longshore.Server() as alone:
        expected = train(alone.address, lambda optimizer, step: None)
    first, second = longshore.Server(), longshore.Server()

    def move(optimizer: longshore.AdamW, step: int) -> None:
        if step == 5:
            optimizer.scale([second.address])
        if step == 150:
            first.close()

    with second:
        found = train(first.address, move)
    for known, moved in zip(expected, found, strict=True):
        assert torch.equal(known, moved)
