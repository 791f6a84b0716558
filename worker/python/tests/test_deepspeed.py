"""DeepSpeed's interface and configuration keys: used, named in a warning, or refused with the path."""

import math
import pathlib
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import running
from models import distance, pair, same_bits, train_engine
from programs import arguments
from safetensors.torch import load_file

import longshore
from longshore import checkpoint, errors, schedules
from longshore.deepspeed import config as _config
from longshore.deepspeed import keys
from longshore.deepspeed.config import Config

DOCUMENT = pathlib.Path(__file__).parent.parent.parent.parent / "docs" / "migrate.md"
CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99]}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def train(engine: longshore.Engine, steps: range) -> list[float]:
    """Makes steps of two backward passes each, and returns their losses."""
    return train_engine(engine, range(2 * steps.start, 2 * steps.stop))


def test_the_engine_trains_as_a_plain_loop_does(tmp_path: pathlib.Path) -> None:
    ours, theirs = pair("mlp")
    engine, optimizer, loader, _ = longshore.initialize(model=ours, config=CONFIG, training_data=list(range(12)))
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (2, 8, 4)
    assert (engine.gradient_clipping(), engine.zero_optimization_stage(), engine.get_lr(), loader.batch_size) == (0.5, 2, [1e-2], 4)
    assert engine.layers is ours.layers
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(10):
        for micro_step in (0, 1):
            assert engine.is_gradient_accumulation_boundary() is (micro_step == 1)
            loss = ours.loss(2 * step + micro_step)
            engine.backward(loss) if micro_step else engine.scale(loss).backward()
            engine.step()
            assert engine.was_step_applied() is (micro_step == 1)
            (theirs.loss(2 * step + micro_step) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).item()
        reference.step()
        reference.zero_grad()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps) == (10, 20, 80, 0)
    assert distance(ours, theirs) < 1e-5
    engine.save_16bit_model(tmp_path / "half")
    half = torch.load(tmp_path / "half" / "pytorch_model.bin", weights_only=True)
    assert half["layers.0.weight"].dtype is torch.bfloat16
    with pytest.raises(errors.UsageError, match=r"no backward pass.*engine\.backward"):
        engine.step()
    engine.destroy()


@pytest.mark.parametrize("delay", [0, 1])
def test_a_restarted_engine_goes_on_with_schedule_and_counters(delay: int, servers: str) -> None:
    """A job's next process has the numbers and weights of an undisturbed one."""
    parameters = {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 2, "total_num_steps": 8}
    scheduler = {"type": "WarmupDecayLR", "params": parameters}

    def run(job: str, stop: int) -> tuple[Any, ...]:
        model, _ = pair("mlp")
        here = {"servers": servers, "job": f"{job}-{delay}", "delay": delay, "warmup_steps": 0}
        engine, optimizer, _, _ = longshore.initialize(model=model, config={**CONFIG, "scheduler": scheduler, "longshore": here})
        train(engine, range(engine.global_steps, stop))
        assert optimizer.global_step == engine.global_steps == stop
        counters = engine.get_lr(), engine.micro_steps, engine.global_samples, engine.skipped_steps
        version = optimizer.flush()
        optimizer.close()
        return counters, version, [parameter.detach().clone() for parameter in model.parameters()]

    *expected, weights = run("whole", 6)
    run("cut", 3)
    *found, again = run("cut", 6)
    assert found == expected and all(map(torch.equal, weights, again))
    model, _ = pair("mlp")
    config = {**CONFIG, "longshore": {"servers": servers, "job": f"cut-{delay}", "delay": delay, "warmup_steps": 0}}
    with pytest.raises(errors.InvalidError, match=r"OneCycleLR.*one of at least 6 steps, as the job has"):
        longshore.initialize(
            model=model, config=config, lr_scheduler=lambda of: torch.optim.lr_scheduler.OneCycleLR(of, 1e-2, total_steps=4)
        )


@pytest.mark.parametrize("delay", [0, 1])
def test_the_engine_goes_back_to_a_checkpoint(delay: int, tmp_path: pathlib.Path) -> None:
    model, _ = pair("mlp")
    job = {"delay": delay, "warmup_steps": 1}
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}
    engine, optimizer, _, _ = longshore.initialize(model=model, config={**CONFIG, "scheduler": scheduler, "longshore": job})
    train(engine, range(3))
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    undisturbed = train(engine, range(3, 7))
    with pytest.warns(UserWarning, match="goes back from version 7 to 3"):
        path, client = engine.load_checkpoint(tmp_path)
    assert path is not None and client == {"epoch": 3}
    assert (engine.global_steps, engine.global_samples, optimizer.version) == (3, 24, 3)
    assert train(engine, range(3, 7)) == undisturbed
    with pytest.raises(errors.StateError, match="tag is global_step9, but must be one of those.*global_step3"):
        engine.load_checkpoint(tmp_path, tag="global_step9")
    with pytest.warns(UserWarning, match="there is no checkpoint in .*empty, so nothing was loaded"):
        assert engine.load_checkpoint(tmp_path / "empty") == (None, {})
    with pytest.raises(errors.InvalidError, match="save_16bit_model"):
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)


def test_parameters_that_are_passed_have_the_models_names(tmp_path: pathlib.Path) -> None:
    model, _ = pair("mlp")
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}}
    engine = longshore.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    checkpoint.save_safetensors(engine.optimizer, tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert set(saved) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("name", ["add_config_arguments", "init_distributed", "zero"])
def test_what_else_programs_for_deepspeed_call_is_refused_with_what_stands_for_it(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}', which is DeepSpeed's: .*(config=|torch|longshore)"):
        getattr(longshore, name)


def other_run(drive: pathlib.Path) -> tuple[longshore.Engine, torch.nn.Module]:
    """Returns an engine with its own server, as in another process."""
    offload = {"device": "nvme", "nvme_path": str(drive)}
    model, _ = pair("mlp")
    config = {**CONFIG, "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    return longshore.initialize(model=model, config=config)[0], model


def test_a_tag_that_is_saved_again_has_the_last_run_that_saved_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs from one checkpoint share a job name, and may give checkpoints of one version the same name."""
    saved, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
    first, first_model = other_run(tmp_path)
    train(first, range(1))
    first.save_checkpoint(saved, tag="one")
    train(first, range(1, 2))
    for folder in (saved, elsewhere):
        first.save_checkpoint(folder, tag="best")

    second, model = other_run(tmp_path)
    second.load_checkpoint(saved, tag="one")
    train(second, range(7, 8))
    assert second.optimizer.version == 2 and not same_bits(model, first_model)
    second.save_checkpoint(saved, tag="best")
    undisturbed = train(second, range(8, 11))

    # An interrupted save leaves the previous one unchanged.
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            second.save_checkpoint(saved, tag="best")
    third, other = other_run(tmp_path)
    third.load_checkpoint(saved)
    assert (third.optimizer.version, third.global_steps) == (2, 2)
    assert train(third, range(8, 11)) == undisturbed

    # The checkpoint of the other run has the name and version of one of this run's own.
    third.load_checkpoint(saved, tag="best")
    with pytest.warns(UserWarning, match="goes back from version 2 to 2"):
        third.load_checkpoint(elsewhere, tag="best")
    assert same_bits(other, first_model)
    third.save_checkpoint(saved, tag="best")
    assert len([path for path in (saved / "best").iterdir() if path.is_dir()]) == 1, "what no save names any more is gone"


def test_an_engine_goes_on_from_a_universal_checkpoint(tmp_path: pathlib.Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}
    config = {**CONFIG, "scheduler": scheduler}
    model, other = pair("mlp")
    engine, optimizer, _, lr_scheduler = longshore.initialize(model=model, config=config)
    train(engine, range(3))
    tag = checkpoint.save_deepspeed(optimizer, tmp_path, lr_scheduler=lr_scheduler)
    undisturbed = train(engine, range(3, 6))
    states = tmp_path / tag / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(states, weights_only=True), "epoch": 7}, states)

    config["checkpoint"] = {"load_universal": True}
    again = longshore.initialize(model=other, config=config)[0]
    assert again.load_universal_checkpoint() and not engine.load_universal_checkpoint()
    assert again.load_checkpoint(tmp_path / "empty") == (None, {})
    path, client = again.load_checkpoint(tmp_path)
    assert path == str(states) and client == {"epoch": 7}
    assert (again.global_steps, again.micro_steps) == (3, 6)
    assert train(again, range(3, 6)) == undisturbed
    assert same_bits(model, other)
    with pytest.raises(errors.StateError, match="job"):
        again.load_checkpoint(tmp_path)
    # The engine's own file has the counters. A file with more than tensors is not read, since it could run code.
    torch.save({"module": {}, "client": pathlib.PurePosixPath("x")}, states)
    third, _ = pair("mlp")
    engine = longshore.initialize(model=third, config=config)[0]
    with pytest.warns(UserWarning, match=r"mp_rank_00_model_states\.pt has more than tensors.*counters stay as they are"):
        assert engine.load_checkpoint(tmp_path, tag=tag) == (str(states), {})
    assert engine.optimizer.state_dict()["state"][0]["step"] == 3


def test_ranks_that_cannot_wait_for_each_other_do_not_go_back(tmp_path: pathlib.Path) -> None:
    with running("--checkpoint-dir", str(tmp_path)) as servers:
        model, other = pair("mlp")
        alone = longshore.AdamW(model.named_parameters(), servers=servers, job="meet")
        alone.open()
        model.loss(0).backward()
        alone.step()
        alone.checkpoint("first")
        state = alone.state_dict()
        alone.close()
        rank = longshore.AdamW(other.named_parameters(), servers=servers, job="meet", rank=0, world_size=2)
        with pytest.raises(errors.StateError, match=r"ranks cannot wait for each other.*gloo is enough.*longshore restore"):
            rank.load_state_dict(state)


@pytest.mark.parametrize("options", [{}, {"streaming": True, "accumulate": 2}])
def test_a_loss_scale_in_a_plain_loop_changes_no_bit(options: dict[str, object]) -> None:
    """The scale is a power of two, and nothing overflows."""
    ours, theirs = pair("mlp")
    scaled = longshore.AdamW(
        ours.named_parameters(), loss_scale=longshore.LossScale(initial=256.0, window=2), max_grad_norm=0.5, **options
    )
    plain = longshore.AdamW(theirs.named_parameters(), max_grad_norm=0.5, **options)
    scales = set()
    for step in range(6):
        for model, optimizer in ((ours, scaled), (theirs, plain)):
            optimizer.zero_grad()
            for micro_step in range(int(options.get("accumulate", 1))):
                (model.loss(2 * step + micro_step) * optimizer.loss_scale).backward()
            optimizer.step()
        scales.add(scaled.last_report.loss_scale)
        assert scaled.grad_norm == plain.grad_norm
    assert same_bits(ours, theirs)
    assert scales == {256.0, 512.0, 1024.0}
    assert plain.last_report.loss_scale == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient_clippin": 1.0}, "config key gradient_clippin is 1.0.*did you mean gradient_clipping"),
        ({"offload_optimizer": {"device": "cpu"}}, r"offload_optimizer\.device.*at zero_optimization\.offload_optimizer\.device"),
        ({"lr": 1e-3}, r"config key lr.*at optimizer\.params\.lr"),
        ({"bf16": True}, "bf16 is True, but must be a section"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, r"fp16\.enabled is True, but must be False where bf16\.enabled"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, r"bfloat16\.enabled.*given once"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, r"offload_param\.device.*must be left out in stage 0: write .*stage: 3"),
        ({"longshore": {"budget": "1GB"}}, r"longshore\.budget is '1GB'.*left out in stage 0"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage is 4.*0, 1, 2 or 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "nvme_path": "/x"}}}, r"nvme_path is '/x', but must be left out"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, r"nvme_path is None.*longshore\.servers"),
        (
            {"zero_optimization": {"stage": 3, **{f"offload_{what}": {"device": "nvme", "nvme_path": f"/{what}"} for what in ("optimizer", "param")}}},
            r"offload_param\.nvme_path is '/param', but must be '/optimizer'",
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, r"device is 'gpu', but must be one of none, cpu, nvme"),
        ({"train_micro_batch_size_per_gpu": 3}, "train_batch_size is 8, but must be 6: micro-batch 3 x 2 micro-steps x 1 ranks"),
        ({"gradient_clipping": "auto"}, "gradient_clipping is 'auto'.*huggingface.deepspeed"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, r"optimizer\.params\.lr is 'auto'"),
        ({"optimizer": {"type": "Lamb"}}, r"optimizer\.type is Lamb.*one of adamw"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, r"optimizer\.params\.learning_rate.*one of lr"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, r"optimizer\.params\.max_grad_norm.*gradient_clipping"),
        ({"scheduler": {"type": "Cosine"}}, r"scheduler\.type is 'Cosine', but must be one of LRRangeTest"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, r"scheduler\.params\.total_num_steps is None, but must be given"),
        ({"longshore": {"rank": 0, "world_size": 2, "servers": "a:1", "job": "j"}}, "train_batch_size is 8, but must be|make the batch"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused_by_its_path(change: dict[str, object], message: str) -> None:
    model, _ = pair("mlp")
    config = {key: value for key, value in CONFIG.items() if key != "zero_optimization"} | change
    if "longshore" in change:
        config["train_micro_batch_size_per_gpu"] = 4
    with pytest.raises(errors.InvalidError, match=message):
        longshore.initialize(model=model, config=config)


def test_one_warning_names_all_keys_without_effect() -> None:
    config: Any = {"zero_optimization": {"offload_optimizer": {}, "offload_param": {}}}
    named = []
    for key in keys.NO_EFFECT:
        *sections, name = key.replace(".*", ".some_key").split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = 2
        named.append(".".join([*sections, name]))
    with pytest.warns(UserWarning) as said:
        Config.of(config)
    [message] = [str(warning.message) for warning in said]
    head, _, tail = message.removeprefix("without effect here: ").rpartition(". docs/migrate.md")
    assert sorted(head.split(", ")) == sorted(named) and tail


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"zero_quantized_gradients": False, "zero_hpz_partition_size": 1, "mics_shard_size": -1}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}},
        {"elasticity": {"enabled": False, "max_train_batch_size": 2000}},
        {"sparse_gradients": False, "gradient_allreduce_op": "mean", "tensorboard": {}, "compile": {}},
    ],
)
def test_a_key_that_asks_for_nothing_is_let_be(config: Any) -> None:
    with warnings.catch_warnings(action="error"):
        Config.of(config)


def test_keys_of_stage_3_without_their_prefix() -> None:
    """DeepSpeed accepts both names of these fields."""
    assert Config.of({"zero_optimization": {"stage": 3, "max_live_parameters": 5}}).shard == {"live": 5}
    with pytest.warns(UserWarning, match=r"^without effect here: zero_optimization\.stage3_max_reuse_distance\. "):
        Config.of({"zero_optimization": {"max_reuse_distance": 5}})
    with pytest.raises(errors.InvalidError, match=r"zero_optimization\.max_live_parameters is 5.*given once"):
        Config.of({"zero_optimization": {"stage3_max_live_parameters": 5, "max_live_parameters": 5}})


def test_the_document_has_the_tables() -> None:
    shown = DOCUMENT.read_text().split("### Every key")[1].split("\n## ")[0]
    used, ignored = shown.split("steer DeepSpeed's own implementation")
    assert re.findall(r"^\| `([^`]*)` \| (.*) \|$", used, re.MULTILINE) == [*keys.USED.items()]
    rows = re.findall(r"^\| (?:`([^`]*)`|top level.*?) \| (`.*) \|$", ignored, re.MULTILINE)
    named = [f"{section}.{name}" if section else name for section, names in rows for name in re.findall("`([^`]*)`", names)]
    assert sorted(named) == sorted(keys.NO_EFFECT)


def rates(scheduler: object, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.25, 0.5, 0.75, 1, 1]),
        ("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 4}, [0, 0, 0.5, math.log(3) / math.log(4), 1, 1, 1]),
        ("WarmupDecayLR", {"total_num_steps": 6, "warmup_max_lr": 1.0, "warmup_num_steps": 2, "warmup_type": "linear"}, [0, 0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("WarmupCosineLR", {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.0},
         [0, 0, 0.5, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2, 0]),
        ("LRRangeTest", {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2}, [1, 1.5, 2, 2.5, 3, 3.5, 4]),
        ("LRRangeTest", {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2, "lr_range_test_staircase": True}, [1, 1, 2, 2, 3, 3, 4]),
        ("OneCycle", {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "decay_step_size": 1, "decay_lr_rate": 1.0},
         [1, 2, 3, 2, 1, 0.5, 1 / 3]),
    ],
)  # fmt: skip
def test_schedules_have_deepspeeds_rates(kind: str, arguments: dict[str, object], expected: list[float]) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = getattr(schedules, kind)(optimizer, **arguments)
    found = rates(scheduler, 7)
    if kind == "OneCycle":
        # DeepSpeed computes the step after the cycle's last one as if the cycle began again, so the comparison ends
        # before.
        found, expected = found[:4], expected[:4]
    assert found == pytest.approx(expected)
    # A scheduler with a loaded state continues like the saved one.
    kept = scheduler.state_dict()
    again = getattr(schedules, kind)(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0), **arguments)
    again.load_state_dict(kept)
    again.step()
    scheduler.step()
    assert again.get_last_lr() == scheduler.get_last_lr()


def test_onecycle_turns_the_momentum_the_other_way() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedules.OneCycle(optimizer, 1.0, 3.0, cycle_first_step_size=2)
    found = []
    for _ in range(4):
        found.append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx([0.8, 0.85, 0.8, 0.85])


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    model, _ = pair("mlp")
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}
    config = {**CONFIG, "gradient_accumulation_steps": 1, "scheduler": scheduler}
    engine, _, _, made = longshore.initialize(model=model, config=config)
    for step in range(3):
        engine.backward(model.loss(step) * (float("inf") if step == 1 else 1.0))
        if step == 1:
            with pytest.warns(RuntimeWarning, match="step 2 was skipped"):
                engine.step()
        else:
            engine.step()
    assert (made.last_epoch, engine.skipped_steps, engine.global_steps) == (2, 1, 3)


@pytest.mark.parametrize("change", [{}, {"gradient_clipping": 0.7}, {"optimizer": {"type": "AdamW", "params": {"lr": 1}}}])
def test_auto_is_filled_as_the_trainer_fills_it(change: dict[str, object], tmp_path: pathlib.Path) -> None:
    from longshore import huggingface

    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    warmup = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
    auto = {
        **dict.fromkeys(sizes, "auto"),
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(warmup, "auto")},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
        **change,
    }
    args = arguments(tmp_path, learning_rate=3e-3, max_steps=20, warmup_steps=4, weight_decay=0.1, max_grad_norm=0.5)
    model, _ = pair("mlp")
    if change:
        with pytest.raises(errors.InvalidError, match="as TrainingArguments.(max_grad_norm|learning_rate) says.*'auto'"):
            huggingface.deepspeed(auto, args, model)
        return
    optimizer, scheduler = huggingface.deepspeed(auto, args, model)
    group = optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.1, (0.9, 0.999), 1e-8)
    assert scheduler._rate(5, 0) == pytest.approx(3e-3)
    assert auto["train_batch_size"] == "auto"


@pytest.mark.parametrize(
    ("examples", "epochs", "micro_steps", "drop_last"), [(40, 1.0, 1, False), (43, 2.5, 2, False), (43, 2.0, 2, True), (3, 1.0, 4, False)]
)
def test_auto_steps_are_those_that_the_trainer_makes(
    examples: int, epochs: float, micro_steps: int, drop_last: bool, tmp_path: pathlib.Path
) -> None:
    import trainer as example
    import transformers

    from longshore import huggingface

    steps = {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": steps}}
    config["gradient_accumulation_steps"] = "auto"
    given = {"num_train_epochs": epochs, "per_device_train_batch_size": 4, "gradient_accumulation_steps": micro_steps}
    args = arguments(tmp_path, **given, dataloader_drop_last=drop_last, warmup_steps=0.4)
    model, data = example.tiny_llama(), example.Counting(examples)
    with pytest.raises(errors.InvalidError, match=r"total_num_steps is 'auto'.*max_steps is not set.*pass dataset="):
        huggingface.deepspeed(config, args, model)
    optimizer, scheduler = huggingface.deepspeed(config, args, model, data)
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data, optimizers=(optimizer, scheduler))
    trainer.train()
    made = trainer.state.max_steps
    assert (scheduler.total_num_steps, scheduler.warmup_num_steps) == (made, max(2, math.ceil(0.4 * made)))
    steps["total_num_steps"] = 1000
    with pytest.raises(errors.InvalidError, match=f"total_num_steps is 1000, but must be {made}, as the dataset"):
        huggingface.deepspeed(config, args, model, data)


def test_auto_steps_of_several_ranks(tmp_path: pathlib.Path) -> None:
    """Accelerate deals batches to ranks, the same number to each."""
    from accelerate.data_loader import BatchSamplerShard

    for examples in range(1, 60):
        for drop_last in (False, True):
            sampler = torch.utils.data.BatchSampler(range(examples), 4, drop_last)
            length = len(BatchSamplerShard(sampler, num_processes=3, process_index=0))
            args = SimpleNamespace(
                max_steps=-1, dataloader_drop_last=drop_last, train_batch_size=4, world_size=3, num_train_epochs=1.0, gradient_accumulation_steps=1
            )
            assert _config._steps(args, range(examples)) == max(1, length)
