"""The code after each change in docs/migrate.md runs, and trains like the code before."""

import json
import pathlib
import re
from typing import Any

import pytest
import torch
import trainer as example
import transformers
from models import distance, pair, train
from programs import arguments

import longshore

TEXT = (pathlib.Path(__file__).parent.parent.parent.parent / "docs" / "migrate.md").read_text()


def after(section: str, number: int = 0) -> str:
    """Returns a section's diff, after the change."""
    part = TEXT.split(f"## From {section}")[1].split("\n## ")[0]
    lines = re.findall(r"```diff\n(.*?)```", part, re.DOTALL)[number].splitlines()
    return "\n".join(line[1:] for line in lines if not line or line[0] in (" ", "+"))


def names_of(section: str) -> dict[str, object]:
    names: dict[str, object] = {"torch": torch}
    exec(after(section), names)
    return names


def test_from_deepspeed(tmp_path: pathlib.Path) -> None:
    ours, theirs = pair("mlp")
    names = names_of("DeepSpeed")
    config = {"train_batch_size": 8, "gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine = names["build"](ours, config)
    batches = [lambda model, step=step: model.loss(step) for step in range(5)]
    names["train"](engine, batches, tmp_path)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0), range(5))
    assert distance(ours, theirs) < 1e-6
    assert (tmp_path / "latest").read_text() == "global_step5"


def test_from_deepspeed_under_the_trainer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    config = {"train_batch_size": "auto", "gradient_clipping": "auto", "optimizer": auto, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "longshore": longshore,
        "model": example.tiny_llama(),
        "dataset": example.Counting(),
        "output": str(tmp_path / "output"),
        "Trainer": transformers.Trainer,
        "TrainingArguments": arguments,
    }
    exec(after("DeepSpeed", 1), names)
    assert names["trainer"].state.global_step == names["optimizers"][0].version == 4


def test_from_torchao() -> None:
    ours, theirs = pair("mlp")
    train(ours, names_of("torchao")["build"](ours), range(5))
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3), range(5))
    assert distance(ours, theirs) < 1e-6


def test_from_fsdp(servers: str) -> None:
    ours, theirs = pair("mlp")
    train(ours, names_of("FSDP")["build"](ours, servers), range(5))
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3), range(5))
    assert distance(ours, theirs) < 1e-6
