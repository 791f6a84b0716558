"""Frameworks above the Trainer: TRL, and Axolotl's plugin under its own manager."""

import pathlib

import pytest
from programs import load, needs

import longshore
from longshore import errors

# 250 MB, so that tests/run does not install it.
TRL = "trl==1.16.0 datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 python-dateutil pytz dill==0.4.1 multiprocess==0.70.19 xxhash requests"


def test_trl_trains_a_tiny_llama(tmp_path: pathlib.Path, servers: str, capfd: pytest.CaptureFixture[str]) -> None:
    needs("trl", TRL)
    losses = load("sft")["main"](str(tmp_path), servers, "sft")
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4 and losses[-1] < 0.9 * losses[0]
    assert capfd.readouterr().out.count("exposed_ms") == 4


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> object:
    needs("axolotl", "axolotl==0.19.0 addict==2.4.0 peft==0.21.2")
    from axolotl.integrations.base import PluginManager

    found = PluginManager.get_instance()
    found.register("longshore.axolotl.Plugin")
    assert "longshore.axolotl.Plugin" in found.plugins
    yield found
    found.plugins.clear()


def test_axolotls_plugin_puts_the_optimizer_on_servers(manager: object, tmp_path: pathlib.Path, servers: str) -> None:
    import transformers
    from axolotl.utils.dict import DictDefault

    assert manager.get_input_args() == ["longshore.axolotl.LongshoreArgs"]
    example = load("trainer")
    args = transformers.TrainingArguments(
        str(tmp_path),
        learning_rate=3e-3,
        max_steps=4,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(example["tiny_llama"](), args, train_dataset=example["Counting"]())
    cfg = DictDefault({"longshore": {"servers": servers, "job": "axolotl"}})
    manager.post_trainer_create(cfg, trainer)
    for callback in manager.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, longshore.AdamW)
    assert (optimizer.job, optimizer.version, len(optimizer.param_groups)) == ("axolotl", 4, 2)
    with pytest.raises(errors.InvalidError, match=r"longshore\.rule is 'lamb', but must be one of adamw"):
        manager.post_trainer_create(DictDefault({"longshore": {"rule": "lamb"}}), trainer)
    with pytest.raises(errors.InvalidError, match="longshore is sever.*unexpected keyword argument 'sever'"):
        manager.post_trainer_create(DictDefault({"longshore": {"sever": "a:1"}}), trainer)
