"""A rank of test_torchrun.py, which trains. At its first start, rank 1 kills itself in the middle of a step."""

import json
import os
import signal
import sys
from typing import Any

import torch
from rank import loss, net
from torch import distributed

import longshore

STEPS = 6
#: The version at which rank 1 kills itself, before its step.
KILLED_AT = 3


def train(out: str, options: dict[str, Any]) -> None:
    rank, restarts = distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    is_killed = options.pop("is_killed", False) and (rank, restarts) == (1, 0)
    model = net()
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-3, max_grad_norm=0.5, **options)
    optimizer.open()
    found: dict[str, Any] = {"restarts": restarts, "joined": optimizer.version, "losses": []}
    while optimizer.version < STEPS:
        value = loss(model, optimizer.version, rank)
        found["losses"].append(value.item())
        optimizer.zero_grad()
        value.backward()
        if is_killed and optimizer.version == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    optimizer.flush()
    assert optimizer._connection is not None
    found["hash"] = optimizer._connection.job.state_hash()
    found["weights"] = [parameter.detach().clone() for parameter in model.parameters()]
    if rank == 0:
        torch.save(found, out)
    distributed.barrier()
    optimizer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    train(sys.argv[1], json.loads(sys.argv[2]))
    distributed.destroy_process_group()
