"""The commands `longshore` and `longshored` as pip installs them beside the package."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import longshore
from conftest import address_of


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
