"""Servers with certificates, which identify their callers."""

import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import running
from models import pair, same_bits
from models import train as steps
from torch import nn

import longshore
from longshore import errors


def make_certificates(folder: pathlib.Path) -> None:
    command = [sys.executable, "-m", "longshore", "tls", "init", str(folder), "--hosts", "localhost"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """Yields a server's address, and the folder of ``longshore tls init``."""
    folder = tmp_path / "tls"
    make_certificates(folder)
    with running("--tls-dir", str(folder / "server")) as address:
        yield address, folder


def train(model: nn.Module, **options: object) -> None:
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, **options)
    steps(model, optimizer, range(3))
    optimizer.close()


def test_the_same_bits_over_tls(cluster: tuple[str, pathlib.Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder = cluster
    model, other = pair("mlp")
    train(model)
    # The variable does not concern the embedded server that the run above had.
    monkeypatch.setenv("LONGSHORE_TLS_DIR", str(folder / "worker-token"))
    train(other, servers=address, job="by-token", transport="tcp")
    assert same_bits(model, other)
    another, alone = pair("mlp")
    train(another, servers=address, job="by-certificate", transport="tcp", tls_dir=folder / "worker")
    assert same_bits(model, another)
    train(alone)
    assert same_bits(model, alone)


def test_who_may_not_is_told_why(cluster: tuple[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
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
        socket = pathlib.Path(server.address.removeprefix("unix:"))
        assert [path.stat().st_mode & 0o777 for path in (socket, socket.parent)] == [0o600, 0o700]
        model, other = pair("mlp")
        train(model, servers=server, transport="tcp")
        # Another process of this user reaches it by its address.
        train(other, servers=server.address, job="by-address")
        assert same_bits(model, other)
    assert not socket.parent.exists()
