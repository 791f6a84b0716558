"""The progress line of a training run."""

import io
import sys
import types
from types import SimpleNamespace

import pytest
import torch

import longshore


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(file: io.StringIO | None, steps: int, seconds_a_step: float) -> str:
    """Returns the lines of a run of an optimizer whose figures stay the same."""
    seconds, optimizer = 0.0, SimpleNamespace(last_report=None)
    with longshore.Progress(optimizer, steps=steps, file=file, now=lambda: seconds) as progress:
        for number in range(steps):
            optimizer.last_report = SimpleNamespace(step=number + 1, grad_norm=0.84, wall_s=0.5, exposed_s=0.025, skipped=False)
            seconds += seconds_a_step
            progress.step(torch.tensor(3.0 - number))
    return "" if file is None else file.getvalue()


def test_a_terminal_has_one_line_that_changes() -> None:
    lines = shown(Terminal(), steps=3, seconds_a_step=30.0).split("\r")
    assert lines[1] == "step 1 of 3  loss 3.000  grad norm 0.84  30000.0 ms a step, exposed 25.0 ms  1 min 0 s left"
    assert lines[2].rstrip() == "step 2 of 3  loss 2.000  grad norm 0.84  30000.0 ms a step, exposed 25.0 ms  30 s left"
    assert lines[3].rstrip() == "step 3 of 3  loss 1.000  grad norm 0.84  30000.0 ms a step, exposed 25.0 ms"
    assert lines[3].endswith("\n")
    # The line is padded with spaces, which cover the end of the longer line before.
    assert len(lines[3].rstrip("\n")) == len(lines[2].rstrip())
    assert shown(Terminal(), steps=0, seconds_a_step=1.0) == ""


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
    shown(None, steps=2, seconds_a_step=1.0)
    lines = [[line.split("  ")[0] for line in file.getvalue().replace("\r", "\n").splitlines()] for file in (output, error)]
    assert lines == ([["", "step 1 of 2", "step 2 of 2"], []] if in_notebook else [[], ["step 2 of 2"]])


def test_it_follows_a_real_optimizer() -> None:
    weight, file = torch.nn.Parameter(torch.ones(8)), Terminal()
    with longshore.AdamW([("weight", weight)], lr=1e-2) as optimizer, longshore.Progress(optimizer, file=file) as progress:
        for _ in range(3):
            loss = (weight**2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.step(loss)
    assert optimizer.is_closed and "\rstep 3  loss 7." in file.getvalue()
    assert "grad norm 5." in file.getvalue()
