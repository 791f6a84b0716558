"""Jobs on servers that outlive the process: later processes find them by name."""

import pathlib
import subprocess
import sys

import torch
from models import pair, same_bits

import longshore


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
