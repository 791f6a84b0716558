"""Axolotl's part of test_fine_tuning.py: its plugin manager, and a Trainer whose optimizer the plugin puts on servers.

    python axolotl_trainer.py OUTPUT_DIR SERVERS JOB
"""

import sys

import pytest
import transformers
from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault
from programs import load

import longshore
from longshore import errors


def main(output: str, servers: str, job: str) -> None:
    manager = PluginManager.get_instance()
    manager.register("longshore.axolotl.Plugin")
    assert "longshore.axolotl.Plugin" in manager.plugins
    assert manager.get_input_args() == ["longshore.axolotl.LongshoreArgs"]
    example = load("trainer")
    args = transformers.TrainingArguments(
        output,
        learning_rate=3e-3,
        max_steps=4,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(example["tiny_llama"](), args, train_dataset=example["Counting"]())
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
    print("all of it was as it should be")


if __name__ == "__main__":
    main(*sys.argv[1:])
