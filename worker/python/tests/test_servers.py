"""Jobs on servers that outlive the process: later processes find them by name, and ranks share them."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from forked import Forked
from models import distance, pair, same_bits

import longshore
from longshore import errors


def test_a_new_optimizer_goes_on_where_the_job_is(servers: str) -> None:
    model, other = pair("mlp")
    undisturbed, _ = pair("mlp")
    options = {"servers": servers, "job": "goes-on", "lr": 1e-2}
    first = longshore.AdamW(model.named_parameters(), **options)
    for step in range(3):
        model.zero_grad()
        model.loss(step).backward()
        first.step()
    saved = first.state_dict()
    first.close()
    # Another process has other weights, and gets the job's before its first forward.
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    second = longshore.AdamW(other.named_parameters(), **options)
    assert second.version == 3
    assert same_bits(model, other)
    second.load_state_dict(saved)
    alone = longshore.AdamW(undisturbed.named_parameters(), lr=1e-2)
    for step in range(3, 6):
        other.zero_grad()
        other.loss(step).backward()
        second.step()
    for step in range(6):
        undisturbed.zero_grad()
        undisturbed.loss(step).backward()
        alone.step()
    assert same_bits(other, undisturbed)
    assert second.state_dict()["state"][0]["step"] == 6


def test_another_model_is_refused(servers: str) -> None:
    model, _ = pair("mlp")
    longshore.AdamW(model.named_parameters(), servers=servers, job="shape").open()
    other, _ = pair("conv")
    with pytest.raises(errors.RefusedError, match=r"spec\.params.*another job name"):
        longshore.AdamW(other.named_parameters(), servers=servers, job="shape").open()


RANK = """
import torch, longshore
from models import pair
torch.set_num_threads(1)
model, _ = pair("mlp")
if {rank}:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, servers={servers!r}, job="ranks", max_grad_norm=0.5)
optimizer.open()
for step in range(10):
    model.zero_grad()
    model.loss(2 * step + {rank}).backward()
    optimizer.step()
torch.save(model.state_dict(), {out!r})
"""


def test_two_ranks_train_on_the_mean_of_their_gradients(servers: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path
    ranks = []
    for rank in (0, 1):
        code = RANK.format(rank=rank, servers=servers, out=str(folder / f"{rank}.pt"))
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
        ranks.append(Forked(code, environment=environment))
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    weights = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    model, _ = pair("mlp")
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(10):
        reference.zero_grad()
        ((model.loss(2 * step) + model.loss(2 * step + 1)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        reference.step()
    trained, _ = pair("mlp")
    trained.load_state_dict(weights[0])
    assert distance(trained, model) < 1e-5


FORK = """
import os, sys, pathlib, longshore
from longshore.transfer import server
folder = pathlib.Path(server.default().checkpoint_dir)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(folder, folder.is_dir())
"""


def test_the_end_of_a_fork_leaves_its_parents_folder() -> None:
    """The server in the parent process still writes checkpoints into the folder."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, check=True, timeout=120)
    folder, was_there = done.stdout.split()
    assert was_there == "True"
    assert not pathlib.Path(folder).exists(), "it ends with the parent"
