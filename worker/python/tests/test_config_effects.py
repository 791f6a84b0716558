"""The effects of DeepSpeed configuration keys on training, each compared with the same training without the key."""

import concurrent.futures
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import Said
from models import Mlp, distance, engine_of, pair, same_bits, train_engine
from torch import Tensor, nn
from torch.nn import functional

import longshore


class Halves(nn.Module):
    """Two layers that compute in the type of their weights, and record the types they have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        self.seen += [inputs.dtype, hidden.dtype]
        return self.second(functional.gelu(hidden)).float()


def inputs(number: int = 0) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize(("drops", "sizes"), [(None, [4, 4, 2]), (False, [4, 4, 2]), (True, [4, 4])])
def test_dataloader_drop_last(drops: bool | None, sizes: list[int]) -> None:
    config = {"optimizer": {"type": "AdamW"}, "gradient_clipping": 0, "train_batch_size": 4, "dataloader_drop_last": drops}
    loader = longshore.initialize(model=Mlp(), config=config, training_data=list(range(10)))[2]
    assert [len(batch) for batch in loader] == sizes


def test_managed_gradient_accumulation() -> None:
    """Without managed accumulation the caller ends a step by calling step()."""
    ours, theirs = pair("mlp")
    managed = engine_of(theirs, gradient_accumulation_steps=2)
    train_engine(managed, range(4))
    engine = engine_of(ours, gradient_accumulation_steps=2, managed_gradient_accumulation=False)
    for step in (0, 1):
        for number in (2 * step, 2 * step + 1):
            engine.backward(ours.loss(number))
        assert engine.is_gradient_accumulation_boundary()
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == step + 1
    assert same_bits(ours, theirs)
    # A step may end after fewer backward passes.
    train_engine(engine, range(4, 5))
    assert engine.global_steps == engine.optimizer.flush() == 3 and managed.global_steps == 2


def test_set_gradient_accumulation_boundary() -> None:
    ours, theirs = pair("mlp")
    engine = engine_of(ours, gradient_accumulation_steps=3)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    number = 0
    for passes in (1, 2, 3):
        for last in [False] * (passes - 1) + [True]:
            engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() is last
            engine.backward(ours.loss(number))
            engine.step()
            assert engine.was_step_applied() is last
            (theirs.loss(number) / 3).backward()
            number += 1
        reference.step()
        reference.zero_grad()
    assert engine.global_steps == 3 and distance(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_communication_data_type(name: str) -> None:
    """Gradients of an fp32 model travel in 16 bits, and servers compute with these."""
    ours, theirs = pair("mlp")
    engine, plain = engine_of(ours, communication_data_type=name), engine_of(theirs)
    reports = []
    for each in (engine, plain):
        train_engine(each, range(2))
        each.optimizer.flush()
        reports.append(each.optimizer.last_report)
    assert 1.8 < reports[1].pushed_bytes / reports[0].pushed_bytes < 2.2
    assert not same_bits(ours, theirs) and distance(ours, theirs) < 0.1


@pytest.mark.parametrize(
    ("key", "rounded"), [("bf16_master_weights_and_grads", {"master"}), ("bf16_optimizer_states", {"exp_avg", "exp_avg_sq"}), (None, set())]
)
def test_formats_of_the_state(key: str | None, rounded: set[str]) -> None:
    model, _ = pair("mlp")
    engine = engine_of(model, bf16={"enabled": True, **({key: True} if key else {})})
    engine.module.forward = lambda number: functional.cross_entropy(  # type: ignore[assignment]
        model.layers(inputs(number).bfloat16()).float(), torch.arange(8) % 4
    )
    for number in range(3):
        engine.backward(engine(number))
        engine.step()
    states = engine.optimizer.state_dict(full=True)["state"].values()
    for name in ("master", "exp_avg", "exp_avg_sq"):
        values = torch.cat([state[name].flatten() for state in states])
        assert torch.equal(values, values.bfloat16().float()) is (name in rounded), name


@pytest.mark.parametrize("casts", [True, False])
def test_fp16_auto_cast(casts: bool) -> None:
    engine = engine_of(Halves(), fp16={"enabled": True, "auto_cast": casts})
    if not casts:
        with pytest.raises(RuntimeError, match="dtype"):
            engine(inputs())
        return
    engine(inputs())
    assert engine.module.seen == [torch.float16, torch.float16]


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.bfloat16), ("bfloat16", torch.bfloat16), ("float16", torch.float16)])
@pytest.mark.parametrize("enabled", [True, False])
def test_torch_autocast(enabled: bool, dtype: str | None, expected: torch.dtype) -> None:
    engine = engine_of(Halves(), torch_autocast={"enabled": enabled, **({"dtype": dtype} if dtype else {})})
    engine(inputs())
    assert engine.module.seen == [torch.float32, expected if enabled else torch.float32]
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}


def scales(fp16: dict[str, Any], overflows: list[bool], job: dict[str, Any] | None = None) -> tuple[longshore.Engine, list[float]]:
    """Returns an engine in fp16, and its scale before each step. Some steps overflow."""
    torch.manual_seed(0)
    engine = engine_of(Halves(), fp16={"enabled": True, "auto_cast": True, **fp16}, longshore=job or {})
    found = []
    for number, overflow in enumerate(overflows):
        found.append(engine.loss_scale())
        loss = functional.cross_entropy(engine(inputs(number)), torch.arange(8) % 4)
        engine.backward(loss * float("inf") if overflow else loss)
        engine.step()
        assert engine.was_step_applied() is not overflow
        assert engine.optimizer.last_report.loss_scale == found[-1]
    return engine, [*found, engine.loss_scale()]


#: Sections of fp16, whether each step overflows, and the scale before each step and after the last.
SCALES: dict[str, tuple[dict[str, Any], list[bool], list[float]]] = {
    "fixed": ({"loss_scale": 128, "loss_scale_window": 1}, [False, True, False, False], [128.0] * 5),
    # The scale doubles each time that a window of steps has passed without an overflow.
    "dynamic": ({"hysteresis": 1, "loss_scale_window": 2}, [True] + [False] * 5, [64.0, 32.0, 32.0, 32.0, 64.0, 64.0, 128.0]),
    # Two overflows halve the scale. With `consecutive_hysteresis` a clean step between them restarts the count.
    "hysteresis": ({"hysteresis": 2, "loss_scale_window": 100}, [True, False, True], [64.0, 64.0, 64.0, 32.0]),
    "consecutive": ({"hysteresis": 2, "consecutive_hysteresis": True, "loss_scale_window": 100}, [True, False, True], [64.0] * 4),
}


@pytest.mark.filterwarnings("ignore:step . was skipped")
@pytest.mark.parametrize("kind", SCALES)
def test_loss_scales(kind: str) -> None:
    fp16, overflows, expected = SCALES[kind]
    engine, found = scales({"initial_scale_power": 6, **fp16}, overflows)
    assert found == expected
    assert engine.fp16_enabled() and engine.dynamic_loss_scale() is (kind != "fixed")
    skipped, made = overflows.count(True), len(overflows)
    assert (engine.skipped_steps, engine.global_steps) == (skipped, made)
    assert engine.optimizer.state_dict(full=False)["state"][0]["step"] == made - skipped


def test_min_loss_scale(servers: str, said: Said) -> None:
    """An overflow at the smallest scale pauses the job, which waits for an operator. The log says so."""
    fp16 = {"initial_scale_power": 3, "min_loss_scale": 4, "hysteresis": 1, "loss_scale_window": 100}
    engine, found = scales(fp16, [True, False], {"servers": servers, "job": "floor"})
    assert found == [8.0, 4.0, 4.0]
    command = [sys.executable, "-m", "longshore", "resume", "--servers", servers, "--job", "floor", "--loss-scale", "2"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode != 0 and "paused" in refused.stderr

    def resume() -> int:
        record = said.wait_for("the job is paused")
        assert (record.name, record.levelno) == ("longshore.worker", logging.WARNING) and "longshore resume" in record.getMessage()
        return subprocess.run(command, capture_output=True, timeout=60).returncode

    with concurrent.futures.ThreadPoolExecutor(1) as operator:
        resumed = operator.submit(resume)
        engine.backward(functional.cross_entropy(engine(inputs()), torch.arange(8) % 4) * float("inf"))
        engine.step()
        assert engine.loss_scale() == 2.0
        assert resumed.result() == 0
