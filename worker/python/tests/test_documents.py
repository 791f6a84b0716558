"""The examples of docs/pytorch.md run, and docs/pytorch-reference.md lists the public names and options."""

import dataclasses
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
from longshore.transfer.options import Options

PACKAGE = pathlib.Path(__file__).parent.parent
DOCUMENT = PACKAGE.parent.parent / "docs" / "pytorch.md"
REFERENCE = DOCUMENT.with_name("pytorch-reference.md")


def changed(side: str) -> str:
    """Returns the program of the document's first diff, before (-) or after (+) the change."""
    found = re.search(r"```diff\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    lines = found[1].splitlines()
    return "\n".join(line[1:] for line in lines if not line or line[0] in (" ", side))


def test_the_changed_lines_train_as_the_old_ones_did() -> None:
    models = pair("mlp")
    for model, side in zip(models, "-+", strict=True):
        names: dict[str, object] = {}
        exec(changed(side), names)
        optimizer = names["build"](model)
        assert isinstance(optimizer, longshore.AdamW if side == "+" else torch.optim.AdamW)
        train(model, optimizer, range(20))
    assert distance(*models) < 1e-6


def test_the_line_with_servers_finds_the_job_again(servers: str) -> None:
    line = next(line for line in DOCUMENT.read_text().splitlines() if "servers=" in line and line.startswith("optimizer ="))
    line = line.replace("host1:7070,host2:7070", servers)
    for expected in (0, 1):
        model, _ = pair("mlp")
        names = {"model": model, "longshore": longshore}
        exec(line, names)
        assert names["optimizer"].version == expected
        model.loss(0).backward()
        names["optimizer"].step()
        names["optimizer"].close()


def test_the_reference_lists_every_option_and_every_public_name() -> None:
    text = REFERENCE.read_text()
    section = text[text.index("## Options") : text.index("## Methods")]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `") and line.count("|") == 5]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == {field.name for field in dataclasses.fields(Options)}
    absent = [name for name in [*longshore.__all__, *longshore.errors.__dict__] if name[0].isupper() and name not in text]
    assert not absent, f"docs/pytorch-reference.md lacks {absent}"


def test_the_trainer_example(tmp_path: pathlib.Path, servers: str, capfd: pytest.CaptureFixture[str]) -> None:
    embedded = example.main(str(tmp_path / "embedded"))
    assert capfd.readouterr().out.count("exposed_ms") == len(embedded) == 4
    assert [*embedded.values()] == sorted(embedded.values(), reverse=True)
    assert embedded[40] < 0.75 * embedded[10]
    with pytest.warns(UserWarning, match="can go back to this save.*--checkpoint-dir"):
        assert example.main(str(tmp_path / "servers"), servers) == embedded
    saved = torch.load(tmp_path / "servers" / "checkpoint-20" / "optimizer.pt", weights_only=True)
    assert saved["longshore"]["version"] == 20


def test_the_readmes_lines_for_the_trainer(tmp_path: pathlib.Path, servers: str) -> None:
    readme = (PACKAGE.parent.parent / "README.md").read_text()
    lines = re.search(r"```python\n(import longshore\ntrainer = .*?)```", readme, re.DOTALL)
    assert lines is not None
    assert len(lines[1].splitlines()) == 3
    args = arguments(tmp_path, max_steps=3)
    names: dict[str, Any] = {"Trainer": transformers.Trainer, "model": example.tiny_llama(), "args": args, "dataset": example.Counting()}
    exec(lines[1].replace("host1:7070", servers), names)
    names["trainer"].train()
    assert names["trainer"].optimizer.optimizer.version == 3
    assert names["trainer"].optimizer.optimizer.job == "my-run"


def test_the_trainer_streams_where_the_servers_clip(tmp_path: pathlib.Path) -> None:
    logs = []
    for is_streaming in (False, True):
        job = {"streaming": True, "accumulate": 2, "max_grad_norm": 1.0} if is_streaming else {}
        max_grad_norm = 0.0 if is_streaming else 1.0
        trainer = transformers.Trainer(
            example.tiny_llama(),
            arguments(tmp_path, gradient_accumulation_steps=2, max_steps=4, max_grad_norm=max_grad_norm, logging_steps=1),
            train_dataset=example.Counting(),
            optimizer_cls_and_kwargs=(longshore.AdamW, {"lr": 3e-3, **job}),
            callbacks=[longshore.huggingface.Callback()],
        )
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    for safe, streamed in zip(*logs, strict=True):
        assert streamed["loss"] == pytest.approx(safe["loss"], rel=1e-5)
        assert streamed["grad_norm"] == pytest.approx(safe["grad_norm"], rel=1e-5)
