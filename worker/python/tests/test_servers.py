"""Servers as users start them: the commands, certificates, and drives for a server in this process."""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import units
from conftest import address_of, running
from models import pair, same_bits
from models import train as steps
from torch import nn
from units import Deep, optimizer_of, same

import longshore
from longshore import errors


def make_certificates(folder: Path) -> None:
    command = [sys.executable, "-m", "longshore", "tls", "init", str(folder), "--hosts", "localhost"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yields a server's address, and the folder of ``longshore tls init``."""
    folder = tmp_path / "tls"
    make_certificates(folder)
    with running("--tls-dir", str(folder / "server")) as address:
        yield address, folder


def train(model: nn.Module, **options: object) -> None:
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, **options)
    steps(model, optimizer, range(3))
    optimizer.close()


def test_the_same_bits_over_tls(cluster: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder = cluster
    model, other = pair("mlp")
    train(model)
    # LONGSHORE_TLS_DIR does not concern the embedded server of the run above.
    monkeypatch.setenv("LONGSHORE_TLS_DIR", str(folder / "worker-token"))
    train(other, servers=address, job="by-token", transport="tcp")
    assert same_bits(model, other)
    another, alone = pair("mlp")
    train(another, servers=address, job="by-certificate", transport="tcp", tls_dir=folder / "worker")
    assert same_bits(model, another)
    train(alone)
    assert same_bits(model, alone)


def test_who_may_not_is_told_why(cluster: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = cluster
    model, _ = pair("mlp")
    with pytest.raises(errors.RefusedError, match="reader, which is reader.*worker or operator for OpenJob"):
        train(model, servers=address, job="read", tls_dir=folder / "reader")
    with pytest.raises(errors.InvalidError, match=r"ca\.pem"):
        train(model, servers=address, job="read", tls_dir=tmp_path)
    strange = tmp_path / "strange"
    make_certificates(strange)
    with pytest.raises(errors.UntrustedError, match=r"an authority that ca\.pem does not have") as raised:
        train(model, servers=address, job="read", tls_dir=strange / "worker")
    assert raised.value.remedy is not None


def test_a_server_inside_the_process_is_its_users_alone() -> None:
    with longshore.Server() as server:
        socket = Path(server.address.removeprefix("unix:"))
        assert [path.stat().st_mode & 0o777 for path in (socket, socket.parent)] == [0o600, 0o700]
        model, other = pair("mlp")
        train(model, servers=server, transport="tcp")
        # Other processes of this user reach the server by its address.
        train(other, servers=server.address, job="by-address")
        assert same_bits(model, other)
    assert not socket.parent.exists()


def command(name: str) -> str:
    """Returns pip's path of the command: bin/ beside the package with --target, else this Python's scripts."""
    beside = Path(longshore.__file__).parent.parent / "bin"
    found = [folder / name for folder in (beside, Path(sysconfig.get_path("scripts"))) if (folder / name).is_file()]
    assert found, f"{name} is neither in {beside} nor among this Python's scripts"
    return str(found[0])


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command(words[0]), *words[1:]], capture_output=True, text=True, timeout=60, check=False)


def test_both_say_the_packages_version_and_their_own_name() -> None:
    for name in ("longshore", "longshored"):
        said = run(name, "--version")
        assert (said.returncode, said.stdout.strip()) == (0, f"{name} {importlib.metadata.version('longshore-train')}"), said


def test_a_server_serves_and_drains_and_the_other_command_finds_it() -> None:
    words = [command("longshored"), "--listen", "127.0.0.1:0", "--memory", "256MiB", "--threads", "1"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = address_of(server)
        found = run("longshore", "status", "--servers", address)
        assert (found.returncode, found.stderr) == (0, "") and "no jobs" in found.stdout, found
        # A usage error has the exit status of the command's own binary.
        assert run("longshore", "status", "--servers", address, "--nothing").returncode == 2
        assert run("longshored", "--listen", "nowhere").returncode == 2
        server.terminate()
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.communicate()


def test_an_import_says_that_another_project_of_the_name_is_installed(tmp_path: Path) -> None:
    """PyPI's distribution ``longshore`` has the same import name and command."""
    described = tmp_path / "longshore-1.4.0.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text("Metadata-Version: 2.1\nName: longshore\nVersion: 1.4.0\n")
    path = os.pathsep.join([str(Path(longshore.__file__).parent.parent), str(tmp_path)])
    command = [sys.executable, "-c", "import longshore"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "PYTHONPATH": path})
    assert "longshore 1.4.0 is installed beside longshore-train" in said.stderr and "pip uninstall longshore" in said.stderr


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "collected"])
def test_a_server_that_ends_leaves_its_folders_to_the_next(tmp_path: Path, closes: bool) -> None:
    for turn in range(4):
        server = longshore.Server(state_dirs=tmp_path if turn % 2 else str(tmp_path))
        model, _ = pair(Deep, depth=1)
        optimizer = optimizer_of(model, servers=server, job="driven", tier="nvme")
        units.train(model, optimizer, steps=1, first=turn)
        assert optimizer.flush() == turn + 1
        # The server's connections and its job's threads may end a while later.
        optimizer.close()
        if closes:
            server.close()
            server.close()
        del model, optimizer, server


@pytest.mark.filterwarnings("ignore:gradient_clipping is left out")
@pytest.mark.parametrize("state", ["nvme", "cpu", None])
def test_parameters_that_deepspeed_offloads_to_a_drive(state: str | None, tmp_path: Path) -> None:
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
    assert server is not None
    command = [sys.executable, "-m", "longshore", "status", "--json", "--servers", server.address]
    status = subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert json.loads(status.stdout)["servers"][0]["spill"] == "all"
    optimizer = longshore.AdamW(whole.named_parameters(), lr=1e-3, weight_decay=0.0, max_grad_norm=1.0, missing_gradients="zeros")
    units.train(whole, optimizer, 2)
    same(whole, cut)
    engine.destroy()


@pytest.mark.filterwarnings("ignore:gradient_clipping is left out")
def test_servers_elsewhere_are_told_where_by_their_flags(servers: str) -> None:
    drive = {"device": "nvme", "nvme_path": "/nowhere"}
    zero = {"stage": 3, "offload_param": drive}
    with pytest.warns(UserWarning, match=r"offload_param\.nvme_path changes nothing here: .*--state-dir --spill all"):
        config = longshore.deepspeed.config.Config.of({"zero_optimization": zero, "longshore": {"servers": servers, "job": "there"}})
    assert (config.job["tier"], config.job["servers"]) == ("nvme", servers)
