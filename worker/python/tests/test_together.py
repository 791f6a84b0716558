"""Small gradients on the host leave together in streaming mode, without other changes."""

from typing import Any

import pytest
import torch
from models import Recorded
from torch import nn

import longshore
from longshore import errors
from longshore.optim.step import ENOUGH


class Listening:
    """Records an optimizer's pushes, and lets them fail on request."""

    def __init__(self, optimizer: longshore.AdamW) -> None:
        optimizer.open()
        assert optimizer._connection is not None
        optimizer._connection.job = Recorded(optimizer._connection.job, self._note)  # type: ignore[assignment]
        self.calls: list[Any] = []
        self.fails = False

    def _note(self, name: str, *given: Any) -> None:
        if name == "push":
            self.calls.append([index for index, *_ in given[0]])
            if self.fails:
                raise KeyboardInterrupt
        elif name == "end_micro_step":
            self.calls.append("end")


def vectors(*lengths: int) -> list[tuple[str, nn.Parameter]]:
    """Returns parameters of these lengths. Their gradients come in reverse order."""
    return [(f"p{place}", nn.Parameter(torch.linspace(-1, 1, length))) for place, length in enumerate(lengths)]


def backward(params: list[tuple[str, nn.Parameter]]) -> None:
    loss = torch.zeros(())
    for _, param in params:
        loss = (loss + param.square().sum()).tanh()
    loss.backward()


def test_small_gradients_leave_in_one_push_in_their_order() -> None:
    params = vectors(8, 8, ENOUGH, 8, ENOUGH // 2, ENOUGH // 2)
    optimizer = longshore.AdamW(params, streaming=True, accumulate=2)
    job = Listening(optimizer)
    for _ in range(2):
        backward(params)
        assert all(param.grad is None for _, param in params)
    assert job.calls == [[5, 4], [3, 2], [1, 0], "end"] * 2


def test_those_of_a_pass_that_leaves_parameters_out_leave_with_it() -> None:
    params = vectors(8, 8, 8)
    optimizer = longshore.AdamW(params, streaming=True, missing_gradients="zeros")
    job = Listening(optimizer)
    backward(params[1:])
    assert job.calls == []
    optimizer.step()
    assert job.calls == [[2, 1], "end"]
    with pytest.raises(errors.GradientError, match="backward pass 2"):
        backward(params)
        backward(params)


def test_a_push_that_failed_is_made_again() -> None:
    found = []
    for fails in (False, True):
        params = vectors(8, 8)
        optimizer = longshore.AdamW(params, streaming=True)
        job = Listening(optimizer)
        if fails:
            job.fails = True
            with pytest.raises(KeyboardInterrupt):
                backward(params)
            job.fails = False
        else:
            backward(params)
        optimizer.step()
        assert optimizer.flush() == 1
        found.append([param.detach().clone() for _, param in params])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
