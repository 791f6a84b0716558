"""A server in this process with drives, which may keep 16-bit weights and gradients too, also for DeepSpeed's offload_param."""

import pathlib

import pytest
from conftest import job_on
from models import pair
from units import Deep, optimizer_of, same, train

import longshore


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "collected"])
def test_a_server_that_ends_leaves_its_folders_to_the_next(tmp_path: pathlib.Path, closes: bool) -> None:
    for turn in range(8):
        server = longshore.Server(state_dirs=tmp_path if turn % 2 else str(tmp_path))
        model, _ = pair(Deep, depth=1)
        optimizer = optimizer_of(model, servers=server, job="driven", tier="nvme")
        train(model, optimizer, steps=1, first=turn)
        assert optimizer.flush() == turn + 1
        # Its connections and its job's threads may live a while longer.
        optimizer.close()
        if closes:
            server.close()
            server.close()
        del model, optimizer, server


@pytest.mark.filterwarnings("ignore:gradient_clipping is left out")
@pytest.mark.parametrize("state", ["nvme", "cpu", None])
def test_parameters_that_deepspeed_offloads_to_a_drive(state: str | None, tmp_path: pathlib.Path) -> None:
    """The optimizer's state is on the drive too, whatever ``offload_optimizer`` says."""
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    offloaded = {"nvme": {"offload_optimizer": drive}, "cpu": {"offload_optimizer": {"device": "cpu"}}, None: {}}[state]
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": drive, **offloaded},
        "longshore": {"budget": "1MB"},
    }
    whole, cut = pair(Deep, depth=4)
    if state == "cpu":
        with pytest.warns(UserWarning, match=r"offload_optimizer\.device changes nothing here: .*the drive has the state too"):
            engine = longshore.initialize(model=cut, config=config)[0]
    else:
        engine = longshore.initialize(model=cut, config=config)[0]
    for step in range(2):
        engine.backward(cut.loss(step))
        engine.step()
    server = engine.optimizer._options.server()
    assert server is not None and job_on(server.address)["spill"] == "all"
    optimizer = longshore.AdamW(whole.named_parameters(), lr=1e-3, weight_decay=0.0, max_grad_norm=1.0, missing_gradients="zeros")
    train(whole, optimizer, 2)
    same(whole, cut)
    engine.destroy()


@pytest.mark.filterwarnings("ignore:gradient_clipping is left out")
def test_servers_elsewhere_are_told_where_by_their_flags(servers: str) -> None:
    drive = {"device": "nvme", "nvme_path": "/nowhere"}
    zero = {"stage": 3, "offload_param": drive}
    with pytest.warns(UserWarning, match=r"offload_param\.nvme_path changes nothing here: .*--state-dir --spill all"):
        config = longshore.deepspeed.config.Config.of({"zero_optimization": zero, "longshore": {"servers": servers, "job": "there"}})
    assert (config.job["tier"], config.job["servers"]) == ("nvme", servers)
