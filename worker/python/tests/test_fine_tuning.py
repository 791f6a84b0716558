"""Frameworks above the Trainer: TRL, and Axolotl's plugin under its own manager.

tests/run installs them beside the other packages, into a folder that TEST_FINE_TUNING names. Each training runs in its own process: that
folder on its path brings packages that other tests must not have.
"""

import ast
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
from programs import EXAMPLES

FOLDER = os.environ.get("TEST_FINE_TUNING")
ABSENT = os.environ.get("TEST_FINE_TUNING_ABSENT") or "it is not installed: tests/run installs it"
TESTS = pathlib.Path(__file__).parent


def run(package: str, code: str, *arguments: str) -> list[str]:
    """Runs a process that needs this package. Returns the lines that it prints."""
    if not FOLDER and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package}: {ABSENT}")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(EXAMPLES), str(TESTS), FOLDER)))
    begin = "import torch; torch.set_num_threads(1); import sys; "
    command = [sys.executable, "-c", begin + code, *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_trl_trains_a_tiny_llama(tmp_path: pathlib.Path, servers: str) -> None:
    lines = run("trl", "import sft; print(sft.main(*sys.argv[1:]))", str(tmp_path), servers, "sft")
    losses = ast.literal_eval(lines[-1])
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4 and losses[-1] < 0.9 * losses[0]
    assert "\n".join(lines).count("exposed_ms") == 4


def test_axolotls_plugin_puts_the_optimizer_on_servers(tmp_path: pathlib.Path, servers: str) -> None:
    lines = run("axolotl", "import axolotl_trainer; axolotl_trainer.main(*sys.argv[1:])", str(tmp_path), servers, "axolotl")
    assert lines[-1] == "all of it was as it should be"
