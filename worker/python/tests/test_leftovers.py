"""The end of an optimizer as torch users expect it: for its job, saved state, and names."""

import pathlib
import warnings

import pytest
import torch
from torch import nn

import longshore
from longshore import errors


def test_an_optimizer_is_closed_at_the_end_of_with() -> None:
    model = nn.Linear(4, 4)
    with longshore.AdamW(model.named_parameters(), lr=1e-2) as optimizer:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    with pytest.raises(errors.LongshoreError, match="closed"):
        optimizer.flush()


def test_one_folder_for_state_is_one_folder(tmp_path: pathlib.Path) -> None:
    for folder in (str(tmp_path), tmp_path):
        with longshore.Server(state_dirs=folder) as server:
            step_on_drives(server).close()
        assert any(tmp_path.rglob("*"))


@pytest.mark.parametrize("closes", (True, False), ids=("closed", "collected"))
def test_a_server_that_ends_leaves_its_folders_to_the_next(tmp_path: pathlib.Path, closes: bool) -> None:
    for turn in range(8):
        server = longshore.Server(state_dirs=tmp_path)
        optimizer = step_on_drives(server)
        assert optimizer.version == turn + 1
        # Its connections and its job's threads may live a while longer.
        optimizer.close()
        if closes:
            server.close()
            server.close()
        del optimizer, server


def step_on_drives(server: longshore.Server) -> longshore.AdamW:
    """Returns an optimizer after one more step of a job in the server's folder."""
    model = nn.Linear(4, 4)
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, servers=server, job="driven", tier="nvme")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.flush()
    return optimizer


def test_a_job_without_a_name_on_servers_is_named_in_a_warning(servers: str) -> None:
    with pytest.warns(UserWarning, match=r"no job= was given, so this one is torch-.*longshore delete"):
        longshore.AdamW(nn.Linear(4, 4).named_parameters(), lr=1e-2, servers=servers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        longshore.AdamW(nn.Linear(4, 4).named_parameters(), lr=1e-2)
        longshore.AdamW(nn.Linear(4, 4).named_parameters(), lr=1e-2, servers=servers, job="named")


def test_an_engine_that_finds_nothing_to_load_says_so(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = longshore.initialize(model=model, config=config)
    with pytest.warns(UserWarning, match="there is no checkpoint in .*nowhere, so nothing was loaded"):
        assert engine.load_checkpoint(tmp_path / "nowhere") == (None, {})
