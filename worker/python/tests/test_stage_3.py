"""DeepSpeed's stage 3 with offloaded weights and optimizer: an engine, its checkpoints, and the Hugging Face Trainer."""

import json
import pathlib
from typing import Any

import pytest
import torch
from conftest import running
from models import pair, same_bits, train_engine
from programs import arguments, run_ranks
from torch import nn
from units import Accountant, Deep, optimizer_of, same, weight_bytes

import longshore
from longshore import errors
from longshore.checkpoint.trainer import Loaded

#: Optimizer and parameters are both offloaded, as in DeepSpeed's documents.
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


@pytest.mark.filterwarnings("ignore:without effect here")
def test_an_engine_of_stage_3_has_the_bits_of_stage_2(tmp_path: pathlib.Path) -> None:
    whole, cut = pair(Deep)
    reference = longshore.initialize(model=whole, config=stage_2())[0]
    losses = train_engine(reference, range(10))
    elements = weight_bytes(cut) // 2 // 8
    accountant = Accountant(cut)
    given = config(zero={"stage3_max_live_parameters": elements}, bf16={"enabled": True})
    engine, optimizer, _, _ = longshore.initialize(model=cut, config=given)
    assert engine.zero_optimization_stage() == 3 and optimizer.is_in_units
    with accountant:
        assert train_engine(engine, range(10)) == losses
    accountant.check(2 * elements)
    same(whole, cut)
    engine.save_16bit_model(tmp_path)
    kept = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(kept[name], value) for name, value in whole.state_dict().items())
    engine.destroy()


@pytest.mark.filterwarnings("ignore:without effect here")
def test_checkpoints_in_stage_3(tmp_path: pathlib.Path) -> None:
    """The engine goes back to a checkpoint with its model in units, in the same process and after a restart of the server."""
    frozen, cut = pair("mlp")
    for model in (frozen, cut):
        model.layers[0].bias.requires_grad_(False)
    with running("--checkpoint-dir", str(tmp_path / "servers")) as address:
        given = config(longshore={"servers": address, "job": "stage3", "budget": 9000})
        engine = longshore.initialize(model=cut, config=given)[0]
        first = train_engine(engine, range(6))
        engine.save_checkpoint(tmp_path / "kept")
        later = train_engine(engine, range(6, 12))
        engine.load_checkpoint(tmp_path / "kept")
        assert engine.global_steps == 3
        assert train_engine(engine, range(6, 12)) == later
        reference = longshore.initialize(model=frozen, config=stage_2())[0]
        assert train_engine(reference, range(12)) == first + later
        same(frozen, cut)
        engine.destroy()


@pytest.mark.filterwarnings("ignore:without effect here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_live_parameters_take_what_their_type_takes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration names no type: the model was built in one."""
    budgets = []
    monkeypatch.setattr(longshore.engine, "shard", lambda model, optimizer, **given: budgets.append(given["budget"]))
    longshore.initialize(model=pair("mlp")[0].to(dtype), config=config(zero={"stage3_max_live_parameters": 3e4}))
    assert budgets == [30_000 * dtype.itemsize]


def llama() -> nn.Module:
    """Returns a model of Transformers, which test_gpu_units.py has where that is installed."""
    import trainer as example

    model: nn.Module = example.tiny_llama(0.0)
    return model


def counting(number: int = 256) -> Any:
    import trainer as example

    return example.Counting(number)


def trained(
    folder: pathlib.Path,
    stage: int,
    servers: str | None = None,
    job: str | None = None,
    checkpoint: bool | None = False,
    device: str = "cpu",
    resume: str = "",
    **more: Any,
) -> tuple[Any, Any, dict[int, float]]:
    """Returns the Hugging Face Trainer's results for a Llama in six steps: model, optimizer, and each step's loss. ``resume`` is the point to
    continue from: ``"save"``, the Trainer's last one, or ``"newest"``, the last step that the servers decided."""
    import trainer as example
    import transformers

    from longshore import huggingface

    model = llama()
    given = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 1e-2}
    given |= {"logging_steps": 1, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, **more}
    args = arguments(folder / str(stage), **given)
    offload = {"device": device, **({"nvme_path": str(folder / "drive")} if device == "nvme" else {})}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": offload}
    if stage == 3:
        zero |= {"offload_param": offload, "stage3_max_live_parameters": 30_000, "stage3_prefetch_bucket_size": "auto"}
    auto = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": auto,
        "zero_optimization": zero,
        "longshore": {"servers": servers, "job": job} if servers else {},
    }
    optimizer, scheduler = huggingface.deepspeed(config, args, model)
    assert optimizer.is_in_units is (stage == 3)
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=counting(),
        eval_dataset=counting(16),
        optimizers=(optimizer, scheduler),
        callbacks=[huggingface.Callback(checkpoint=checkpoint), example.Printed()],
    )
    trainer.train(resume_from_checkpoint=huggingface.newest(trainer) if resume == "newest" else resume == "save")
    return model, optimizer, {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.mark.filterwarnings("ignore")
def test_a_llama_of_hugging_face_under_its_trainer(tmp_path: pathlib.Path) -> None:
    (tmp_path / "drive").mkdir()
    whole, stage_2, losses = trained(tmp_path, 2)
    cut, optimizer, found = trained(tmp_path, 3, device="nvme")
    assert [*(tmp_path / "drive").rglob("*")], "the server's state is on the drive"
    assert found == pytest.approx(losses, rel=1e-4)
    kept = type(whole).from_pretrained(tmp_path / "3" / "checkpoint-6")
    assert optimizer.version == stage_2.version == 6
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(cut.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert same_bits(kept.bfloat16(), copy_of(cut))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("resume", ["newest", "save"])
def test_a_trainer_that_was_interrupted_goes_on(resume: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer resumes from the servers' last step, or from its last save. In the second case the servers go back to that version."""
    import trainer as example

    def stop(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt

    whole, _, losses = trained(tmp_path / "plain", 3)
    with running("--checkpoint-dir", str(tmp_path / "checkpoints")) as servers:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(example.Printed, "on_step_begin", stop)
            trained(tmp_path, 3, servers, "interrupted", None)
        cut, _, found = trained(tmp_path, 3, servers, "interrupted", None, resume=resume)
    assert set(losses) - set(found) <= {4}, "what was computed and not written is missing"
    assert found == {step: losses[step] for step in found}
    same(whole, cut)


#: The first save is the best by this setting, since losses fall and a greater loss counts as better.
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}


@pytest.mark.filterwarnings("ignore")
def test_the_best_model_is_loaded_at_the_end(tmp_path: pathlib.Path) -> None:
    with running("--checkpoint-dir", str(tmp_path / "checkpoints")) as servers:
        cut, optimizer, _ = trained(tmp_path, 3, servers, "best", None, **BEST)
        best = llama().from_pretrained(tmp_path / "3" / "checkpoint-3")
        last = llama().from_pretrained(tmp_path / "3" / "checkpoint-6")
        assert optimizer.version == 3
        assert same_bits(best.bfloat16(), copy_of(cut)) and not same_bits(last.bfloat16(), copy_of(cut))


@pytest.mark.filterwarnings("ignore")
def test_a_best_model_that_no_server_keeps_is_refused_before_training(tmp_path: pathlib.Path, servers: str) -> None:
    for checkpoint, more in ((None, {}), (False, {}), (None, {"save_only_model": True})):
        with pytest.raises(errors.UsageError, match="load_best_model_at_end is True, but must be False in stage 3.*--checkpoint-dir"):
            trained(tmp_path, 3, servers, f"refused-{len(more)}-{checkpoint}", checkpoint, **BEST, **more)
    assert not (tmp_path / "3" / "checkpoint-3").exists()


RANK = """
import json, pathlib
import torch, test_stage_3
model, optimizer, losses = test_stage_3.trained(pathlib.Path({folder!r}), 3, {servers!r}, "ranks", {more})
assert type(model).__name__ == "LlamaForCausalLM"
state = {{name: value.clone() for name, value in model.state_dict().items()}}
torch.save(state, pathlib.Path({folder!r}) / f"{{torch.distributed.get_rank()}}.pt")
print("losses", json.dumps([*losses.values()]), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("number", "bf16"), [(1, True), (2, False)])
def test_ranks_of_the_trainer_train_one_model_in_units(tmp_path: pathlib.Path, servers: str, number: int, bf16: bool) -> None:
    """Under torchrun Accelerate wraps other models in DistributedDataParallel, also for one rank."""
    more = {"per_device_train_batch_size": 4 // number, "bf16": bf16}
    code = RANK.format(folder=str(tmp_path), servers=servers, more=f"**{more!r}")
    said = run_ranks(number, code, ["trainer"])
    found = json.loads(said[0].rsplit("losses ", 1)[1])
    alone, _, losses = trained(tmp_path, 3, bf16=bf16)
    # Each of two ranks has half of the batch. The mean is the same, but its sum has another order.
    assert found == ([*losses.values()] if number == 1 else pytest.approx([*losses.values()], rel=1e-4))
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(number)]
    for name, value in alone.state_dict().items():
        assert torch.equal(states[0][name], states[-1][name])
        assert torch.equal(states[0][name], value) if number == 1 else (states[0][name] - value).norm() < 1e-3 * value.norm()


@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_a_model_in_units_is_not_wrapped(wrapper: Any, alone: None) -> None:
    model, _ = pair(Deep, depth=4)
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True)
    longshore.shard(model, optimizer, budget=weight_bytes(model))
    with pytest.raises(errors.UsageError, match=f"{wrapper.__name__} cannot wrap a model in units"):
        wrapper(nn.Sequential(model))


def copy_of(model: nn.Module) -> nn.Module:
    other = llama()
    other.load_state_dict(model.state_dict())
    return other.bfloat16()


def test_what_is_loaded_is_compared_with_what_the_servers_have() -> None:
    models = [Deep(depth=4) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
        longshore.shard(model, optimizer_of(model), "40KB")
    whole, cut, other = models
    loaded = Loaded(cut)
    assert not any(cut.load_state_dict(whole.state_dict()))
    loaded.check()
    same(whole, cut)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight of unit layers\.0 was changed in place"):
        cut.load_state_dict(whole.state_dict())

    state = {name: value.clone() for name, value in whole.state_dict().items()}
    state["layers.2.bias"][5] += 1
    loaded = Loaded(other)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.1\.weight"):
        other.load_state_dict({**state, "layers.1.weight": torch.zeros(2, 2)})
    most = {name: value for name, value in state.items() if name != "layers.3.bias"}
    assert other.load_state_dict(most, strict=False).missing_keys == ["layers.3.bias"]
    with pytest.raises(errors.UsageError, match=r"layers\.2\.bias is another on the servers than what was loaded"):
        loaded.check()
    same(whole, other)
