"""Several ranks of Lightning, whose gradients the servers sum."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from conftest import ended_after
from programs import EXAMPLES, load, ranks

pytest.importorskip("lightning", reason="lightning is not installed: pip install -r worker/python/tests/requirements.txt")

STEPS = 12
RANK = """
import json, sys, torch
torch.set_num_threads(1)
sys.path[:0] = [{examples!r}, {tests!r}]
import lit
from test_lightning import own_data
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
given = own_data(rank)
lit.data = lambda: lit.Loader(torch.utils.data.TensorDataset(*given), batch_size=8)
losses = lit.main(f"{folder}/{{rank}}", {servers!r}, "ranks", strategy="longshore")
print("losses", json.dumps([losses[index] for index in sorted(losses)]))
torch.distributed.destroy_process_group()
"""


def own_data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(10 + rank))
    return inputs, inputs[:, :4].argmax(1)


def run(folder: pathlib.Path, servers: str) -> list[list[float]]:
    """The losses of two ranks, as torchrun starts them."""
    here = pathlib.Path(__file__).parent
    code = RANK.format(examples=str(EXAMPLES), tests=str(here), folder=folder, servers=servers)
    environments = [{**os.environ, "TORCHELASTIC_RUN_ID": "none", **rank} for rank in ranks(2)]
    started = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for environment in environments
    ]
    with ended_after(300, *started):
        said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return [json.loads(text.rsplit("losses ", 1)[1]) for text in said]


def test_two_ranks_of_lightning_train_on_the_mean_of_their_gradients(tmp_path: pathlib.Path, servers: str) -> None:
    """The servers add them up. Each rank clips its own, as Lightning does, before they leave."""
    found = run(tmp_path, servers)
    model = load("lit")["Sorting"](None, None).layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    expected: list[list[float]] = [[], []]
    for step in range(STEPS):
        means = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in (0, 1):
            inputs, labels = own_data(rank)
            optimizer.zero_grad()
            for index in (2 * step, 2 * step + 1):
                batch = slice(8 * index, 8 * index + 8)
                loss = torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
                expected[rank].append(loss.item())
                (loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for mean, parameter in zip(means, model.parameters(), strict=True):
                mean += parameter.grad / 2
        for mean, parameter in zip(means, model.parameters(), strict=True):
            parameter.grad = mean
        optimizer.step()
        schedule.step()
    for rank in (0, 1):
        assert found[rank] == pytest.approx(expected[rank], rel=1e-5)
