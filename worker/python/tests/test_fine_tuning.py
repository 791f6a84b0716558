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
from programs import EXAMPLES, arguments

import longshore
from longshore import errors

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


def train_by_axolotl(output: str, servers: str, job: str) -> None:
    """Axolotl's part, in a process of its own: its plugin manager, and a Trainer whose optimizer the plugin puts on servers."""
    import trainer as example
    import transformers
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    manager = PluginManager.get_instance()
    manager.register("longshore.axolotl.Plugin")
    assert "longshore.axolotl.Plugin" in manager.plugins
    assert manager.get_input_args() == ["longshore.axolotl.LongshoreArgs"]
    args = arguments(output, learning_rate=3e-3, max_steps=4, per_device_train_batch_size=8)
    trainer = transformers.Trainer(example.tiny_llama(), args, train_dataset=example.Counting())
    cfg = DictDefault({"longshore": {"servers": servers, "job": job}})
    manager.post_trainer_create(cfg, trainer)
    for callback in manager.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, longshore.AdamW)
    assert (optimizer.job, optimizer.version, len(optimizer.param_groups)) == (job, 4, 2)
    names = {name for name, _ in trainer.model.named_parameters()}
    assert {param.name for param in optimizer._connection.params} == names
    with pytest.raises(errors.InvalidError, match=r"longshore\.rule is 'lamb', but must be one of adamw"):
        manager.post_trainer_create(DictDefault({"longshore": {"rule": "lamb"}}), trainer)
    with pytest.raises(errors.InvalidError, match="longshore is sever.*unexpected keyword argument 'sever'"):
        manager.post_trainer_create(DictDefault({"longshore": {"sever": "a:1"}}), trainer)


def test_axolotls_plugin_puts_the_optimizer_on_servers(tmp_path: pathlib.Path, servers: str) -> None:
    run("axolotl", "from test_fine_tuning import *; train_by_axolotl(*sys.argv[1:])", str(tmp_path), servers, "axolotl")
