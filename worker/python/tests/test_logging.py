"""The library's messages during a call come through Python's logging."""

import logging

import torch
from conftest import Said
from torch import nn

import longshore


def test_a_server_of_this_process_is_heard(said: Said) -> None:
    level = logging.getLogger("longshore").level
    logging.getLogger("longshore").setLevel(logging.INFO)
    try:
        with longshore.Server() as server:
            model = nn.Linear(4, 4)
            with longshore.AdamW(model.named_parameters(), servers=server, job="heard") as optimizer:
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        said.wait_for("job opened")
    finally:
        logging.getLogger("longshore").setLevel(level)
