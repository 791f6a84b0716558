"""The examples of docs/pytorch.md run, docs/pytorch-reference.md lists the public names and options, and the code after each change in
docs/migrate.md trains like the code before."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import molecules
import pytest
import torch
import trainer as example
import transformers
from models import distance, pair, train
from programs import arguments

import longshore
from longshore.transfer.options import JobOptions, Options

PACKAGE = pathlib.Path(__file__).parent.parent
DOCUMENT = PACKAGE.parent.parent / "docs" / "pytorch.md"
REFERENCE, MIGRATE = DOCUMENT.with_name("pytorch-reference.md"), DOCUMENT.with_name("migrate.md")


def program(document: pathlib.Path, side: str = "+", number: int = 0, section: str = "") -> str:
    """Returns the program of a document's or a section's diff, before (-) or after (+) the change."""
    text = document.read_text()
    if section:
        text = text.split(f"## From {section}")[1].split("\n## ")[0]
    lines = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)[number].splitlines()
    return "\n".join(line[1:] for line in lines if not line or line[0] in (" ", side))


def test_the_changed_lines_train_as_the_old_ones_did() -> None:
    models = pair("mlp")
    for model, side in zip(models, "-+", strict=True):
        names: dict[str, object] = {}
        exec(program(DOCUMENT, side), names)
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
    assert listed == {field.name for field in dataclasses.fields(Options)} == JobOptions.__annotations__.keys()
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


def test_the_example_of_a_graph_network(servers: str, capsys: pytest.CaptureFixture[str]) -> None:
    torchs, safe, streamed = molecules.main(servers, steps=20).values()
    assert safe == streamed == pytest.approx(torchs, rel=1e-4)
    assert torchs[-1] < torchs[0]
    assert capsys.readouterr().out.count("longshore.AdamW") == 2


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


def names_of(section: str) -> dict[str, Any]:
    names: dict[str, Any] = {"torch": torch}
    exec(program(MIGRATE, section=section), names)
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
    exec(program(MIGRATE, number=1, section="DeepSpeed"), names)
    assert names["trainer"].state.global_step == names["optimizers"][0].version == 4


@pytest.mark.parametrize("section", ["torchao", "FSDP"])
def test_from_other_optimizers(section: str, servers: str) -> None:
    ours, theirs = pair("mlp")
    build = names_of(section)["build"]
    train(ours, build(ours) if section == "torchao" else build(ours, servers), range(5))
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3), range(5))
    assert distance(ours, theirs) < 1e-6
