"""DeepSpeed's stage 3 with weights and optimizer offloaded: an engine, its checkpoints, and the Hugging Face Trainer."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import serve
from models import pair, same_bits
from programs import load
from torch import nn
from units import Accountant, Deep, same, weight_bytes
from units import pair as pair_of

import longshore
from longshore import errors

#: As DeepSpeed's documents offload both.
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def config(**more: Any) -> dict[str, Any]:
    zero = {**CONFIG["zero_optimization"], **more.pop("zero", {})}
    return {**CONFIG, "zero_optimization": zero, **more}


def stage_2() -> dict[str, Any]:
    return {**CONFIG, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def train(engine: longshore.Engine, steps: range) -> list[float]:
    losses = []
    for number in range(2 * steps.start, 2 * steps.stop):
        loss = engine.module.loss(number)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:.* changes nothing here")
def test_an_engine_of_stage_3_has_the_bits_of_stage_2(tmp_path: pathlib.Path) -> None:
    whole, cut = pair_of(Deep)
    reference = longshore.initialize(model=whole, config=stage_2())[0]
    losses = train(reference, range(5))
    elements = weight_bytes(cut) // 2 // 8
    accountant = Accountant(cut)
    given = config(zero={"stage3_max_live_parameters": elements}, bf16={"enabled": True})
    engine, optimizer, _, _ = longshore.initialize(model=cut, config=given)
    assert engine.zero_optimization_stage() == 3 and optimizer.is_in_units
    with accountant:
        assert train(engine, range(5)) == losses
    accountant.check(2 * elements)
    same(whole, cut)
    engine.save_16bit_model(tmp_path)
    kept = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(kept[name], value) for name, value in whole.state_dict().items())
    engine.destroy()


@pytest.mark.filterwarnings("ignore:.* changes nothing here")
def test_checkpoints_in_stage_3(tmp_path: pathlib.Path) -> None:
    """The engine goes back to a checkpoint while its model is in units, in the same process and in a server's next life."""
    frozen, cut = pair("mlp")
    for model in (frozen, cut):
        model.layers[0].bias.requires_grad_(False)
    process, address = serve("--checkpoint-dir", str(tmp_path / "servers"))
    try:
        given = config(longshore={"servers": address, "job": "stage3", "budget": 9000})
        engine = longshore.initialize(model=cut, config=given)[0]
        first = train(engine, range(3))
        engine.save_checkpoint(tmp_path / "kept")
        later = train(engine, range(3, 6))
        engine.load_checkpoint(tmp_path / "kept")
        assert engine.global_steps == 3
        assert train(engine, range(3, 6)) == later
        reference = longshore.initialize(model=frozen, config=stage_2())[0]
        assert train(reference, range(6)) == first + later
        same(frozen, cut)
        engine.destroy()
    finally:
        process.kill()
        process.wait()


@pytest.mark.filterwarnings("ignore:.* changes nothing here")
def test_keys_of_stage_3() -> None:
    model, _ = pair("mlp")
    with pytest.warns(UserWarning, match="stage3_prefetch_bucket_size changes nothing here: units are fetched up to four"):
        engine = longshore.initialize(model=model, config=config())[0]
    assert engine.optimizer.is_in_units, "on a CPU the budget is DeepSpeed's 1e9 weights"
    with pytest.raises(errors.InvalidError, match="budget is .* raise the budget by"):
        longshore.initialize(model=pair("mlp")[0], config=config(longshore={"budget": 100}))
    with pytest.warns(UserWarning, match=r"nvme_path changes nothing here: .*tier"):
        nvme = {"device": "nvme", "nvme_path": "/nowhere"}
        longshore.initialize(model=pair("mlp")[0], config=config(zero={"offload_param": nvme}))


def llama() -> nn.Module:
    model: nn.Module = load("trainer")["tiny_llama"](0.0)
    return model


@pytest.mark.filterwarnings("ignore:.* changes nothing here")
def test_a_llama_of_hugging_face_in_an_engine() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    whole, cut = llama(), llama()
    data = load("trainer")["Counting"]()
    written, engines = [], []
    for model, given in ((whole, stage_2()), (cut, config(longshore={"budget": weight_bytes(cut) * 2 // 3}))):
        engine = longshore.initialize(model=model, config=given)[0]
        for step in range(8):
            rows = [data[4 * step + row] for row in range(4)]
            batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
            engine.backward(engine(**batch).loss)
            engine.step()
        model.eval()
        written.append(model.generate(torch.tensor([[1, 4, 7]]), max_new_tokens=5, do_sample=False))
        model.train()
        engines.append(engine)
    units = engines[1].optimizer._units._home.units
    assert any(unit.name.startswith("model.layers.0") for unit in units) and "lm_head" in {unit.name for unit in units}
    assert torch.equal(*written)
    same(whole, cut)


@pytest.mark.filterwarnings("ignore")
def test_a_llama_of_hugging_face_under_its_trainer(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if "LONGSHORE_TEST_ALONE" not in os.environ:
        # Other tests leave state behind in this process, with which the Trainer copies a model that is already in place.
        test = f"{__file__}::test_a_llama_of_hugging_face_under_its_trainer"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        alone = {**os.environ, "LONGSHORE_TEST_ALONE": "1"}
        found = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=300, check=False)
        assert found.returncode == 0, found.stdout + found.stderr
        return
    from longshore import huggingface

    auto = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    models = []
    for stage in (2, 3):
        model = llama()
        args = transformers.TrainingArguments(
            str(tmp_path / str(stage)),
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            save_steps=3,
            eval_strategy="steps",
            eval_steps=3,
            disable_tqdm=True,
        )
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        if stage == 3:
            zero |= {"offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 30_000, "stage3_prefetch_bucket_size": "auto"}
        given = {
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "optimizer": auto,
            "zero_optimization": zero,
        }
        (tmp_path / f"{stage}.json").write_text(json.dumps(given))
        optimizer, scheduler = huggingface.deepspeed(tmp_path / f"{stage}.json", args, model)
        assert optimizer.is_in_units is (stage == 3)
        data = load("trainer")["Counting"]()
        trainer = transformers.Trainer(
            model=model,
            args=args,
            train_dataset=data,
            eval_dataset=data,
            optimizers=(optimizer, scheduler),
            callbacks=[huggingface.Callback(checkpoint=False)],
        )
        trainer.train()
        models.append(model)
        model.keeps = optimizer
    kept = type(models[0]).from_pretrained(tmp_path / "3" / "checkpoint-6")
    assert optimizer.version == 6
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert same_bits(kept.bfloat16(), copy_of(models[1]))


def copy_of(model: nn.Module) -> nn.Module:
    other = llama()
    other.load_state_dict(model.state_dict())
    return other.bfloat16()
