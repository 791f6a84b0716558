"""The progress line of a training run."""

import io
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

import longshore
from longshore.transfer.job import StepReport
from longshore.transfer.options import Options


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Clock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Steps:
    """The part of an optimizer that the line reads."""

    last_report: StepReport | None = None
    made: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    def step(self) -> None:
        self.last_report = StepReport(
            step=next(self.made),
            read=0,
            skipped=False,
            grad_norm=0.84,
            clip_coefficient=1.0,
            loss_scale=1.0,
            overflow=None,
            wall_s=0.5,
            exposed_s=0.025,
            pushed_bytes=0,
            pulled_bytes=0,
        )


def shown(file: io.StringIO, steps: int, seconds_a_step: float) -> str:
    clock, optimizer = Clock(), Steps()
    with longshore.Progress(optimizer, steps=steps, file=file, now=clock) as progress:
        for number in range(steps):
            optimizer.step()
            clock.seconds += seconds_a_step
            progress.step(torch.tensor(3.0 - number))
    return file.getvalue()


def test_a_terminal_has_one_line_that_changes() -> None:
    lines = shown(Terminal(), steps=3, seconds_a_step=30.0).split("\r")
    assert lines[1] == "step 1 of 3  loss 3.000  grad norm 0.84  30000.0 ms a step, exposed 25.0 ms  1 min 0 s left"
    assert lines[2].rstrip() == "step 2 of 3  loss 2.000  grad norm 0.84  30000.0 ms a step, exposed 25.0 ms  30 s left"
    assert lines[3].rstrip() == "step 3 of 3  loss 1.000  grad norm 0.84  30000.0 ms a step, exposed 25.0 ms"
    assert lines[3].endswith("\n")
    # Spaces cover the rest of a longer line before.
    assert len(lines[3].rstrip("\n")) == len(lines[2].rstrip())


def test_a_log_has_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    lines = shown(io.StringIO(), steps=25, seconds_a_step=1.0).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 10 of 25", "step 20 of 25", "step 25 of 25"]
    assert len(shown(io.StringIO(), steps=20, seconds_a_step=1.0).splitlines()) == 2


@pytest.mark.parametrize("in_notebook", [True, False])
def test_a_notebook_has_its_line_in_the_cells_output(monkeypatch: pytest.MonkeyPatch, in_notebook: bool) -> None:
    """A kernel's output is not a terminal, and still returns at a carriage return. ipykernel is loaded in a kernel alone."""
    output, error = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if in_notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    clock, optimizer = Clock(), Steps()
    with longshore.Progress(optimizer, steps=2, now=clock) as progress:
        for _ in range(2):
            optimizer.step()
            clock.seconds += 1.0
            progress.step()
    if in_notebook:
        assert [line.split("  ")[0] for line in output.getvalue().split("\r")] == ["", "step 1 of 2", "step 2 of 2"]
        assert error.getvalue() == ""
    else:
        assert [line.split("  ")[0] for line in error.getvalue().splitlines()] == ["step 2 of 2"]
        assert output.getvalue() == ""


def test_a_run_without_a_step_says_nothing() -> None:
    assert shown(Terminal(), steps=0, seconds_a_step=1.0) == ""


def test_it_follows_a_real_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = longshore.AdamW([("weight", weight)], lr=1e-2)
    file = Terminal()
    with longshore.Progress(optimizer, file=file) as progress:
        for _ in range(3):
            loss = (weight**2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.step(loss)
    optimizer.close()
    assert "\rstep 3  loss 7." in file.getvalue()
    assert "grad norm 5." in file.getvalue()


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, (3, 8)),
        # torchrun inside a Slurm step.
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (1, 2)),
        # An sbatch script, which is a single process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),
    ],
)
def test_rank_and_world_size_come_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], place: tuple[int, int]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Options().place() == place


def test_a_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(longshore.errors.InvalidError, match="RANK is 'first'"):
        Options().place()
