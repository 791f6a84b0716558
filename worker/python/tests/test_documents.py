"""What docs/pytorch.md shows is what runs."""

import pathlib
import re
import subprocess
import sys

import pytest
import torch
from models import distance, pair

import longshore
from longshore import errors

PACKAGE = pathlib.Path(__file__).parent.parent
DOCUMENT = PACKAGE.parent.parent / "docs" / "pytorch.md"


def changed(side: str) -> str:
    """The program of the document's first diff, before (-) or after (+) the change."""
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
        for step in range(20):
            optimizer.zero_grad()
            model.loss(step).backward()
            optimizer.step()
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


def test_the_trainer_example(tmp_path: pathlib.Path, servers: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    names: dict[str, object] = {"__name__": "example"}
    exec((PACKAGE / "examples" / "trainer.py").read_text(), names)
    embedded = names["main"](str(tmp_path / "embedded"))
    assert capfd.readouterr().out.count("exposed_ms") == len(embedded) == 4
    assert embedded == sorted(embedded, reverse=True)
    assert embedded[-1] < 0.75 * embedded[0]
    assert names["main"](str(tmp_path / "servers"), servers) == embedded
    saved = torch.load(tmp_path / "servers" / "checkpoint-20" / "optimizer.pt", weights_only=True)
    assert saved["longshore"]["version"] == 20


CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99]}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


def test_the_engine_trains_as_a_plain_loop_does(tmp_path: pathlib.Path) -> None:
    ours, theirs = pair("mlp")
    server = longshore.Server(checkpoint_dir=tmp_path / "servers", memory=64 << 20)
    with pytest.warns(UserWarning, match=r"offload_optimizer\.pin_memory changes nothing"):
        config = {**CONFIG, "longshore": {"servers": server, "job": "engine"}}
        engine, optimizer, loader, _ = longshore.initialize(model=ours, config=config, training_data=list(range(12)))
    assert engine.gradient_accumulation_steps() == 2
    assert loader.batch_size == 4
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.99))
    for step in range(10):
        norm = None
        for micro_step in (0, 1):
            assert engine.is_gradient_accumulation_boundary() is (micro_step == 1)
            engine.backward(ours.loss(2 * step + micro_step))
            engine.step()
            (theirs.loss(2 * step + micro_step) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item()
        reference.step()
        reference.zero_grad()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4)
    assert (engine.global_steps, engine.micro_steps) == (10, 20)
    assert distance(ours, theirs) < 1e-5
    engine.save_checkpoint(tmp_path / "mine", client_state={"epoch": 3})
    path, client = engine.load_checkpoint(tmp_path / "mine")
    assert path is not None and client == {"epoch": 3}
    assert (tmp_path / "servers" / "engine" / "global_step10" / "manifest.json").exists()
    engine.save_16bit_model(tmp_path / "half")
    half = torch.load(tmp_path / "half" / "pytorch_model.bin", weights_only=True)
    assert half["layers.0.weight"].dtype is torch.bfloat16
    engine.backward(ours.loss(0))
    engine.step()
    engine.backward(ours.loss(1))
    engine.step()
    with pytest.raises(errors.StateError, match=r"checkpoint\.version is 10, but must be 11.*longshore restore"):
        engine.load_checkpoint(tmp_path / "mine")
    engine.destroy()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient_clippin": 1.0}, "config key gradient_clippin is 1.0.*take it out"),
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization\.stage is 3, but must be 0, 1 or 2"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, r"config key zero_optimization\.offload_param\.device"),
        ({"train_micro_batch_size_per_gpu": 3}, "train_batch_size is 8, but must be 6"),
        ({"gradient_clipping": "auto"}, "gradient_clipping is 'auto'"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled is True.*bf16"),
        ({"optimizer": {"type": "Lamb"}}, r"optimizer\.type is Lamb"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused_by_its_path(change: dict[str, object], message: str) -> None:
    model, _ = pair("mlp")
    config = {key: value for key, value in CONFIG.items() if key != "zero_optimization"} | change
    with pytest.raises(errors.InvalidError, match=message):
        longshore.initialize(model=model, config=config)


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "longshore", "plan", "--params", "7B"], capture_output=True, text=True, check=True)
    assert "GiB" in done.stdout
    wrong = subprocess.run([sys.executable, "-m", "longshore", "no-such-command"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "no-such-command" in wrong.stderr
