"""torch's own cases for Adam and AdamW, except those listed here with a reason."""

import warnings
from typing import Any

import pytest
import torch
from models import distance, pair
from torch.optim import Optimizer

import longshore

common = pytest.importorskip("torch.testing._internal.common_optimizers", reason="torch's tests need expecttest")

OURS: dict[str, Any] = {"Adam": longshore.Adam, "AdamW": longshore.AdamW}
INFOS = [info for info in common.optim_db if info.optim_cls.__name__ in OURS]
CLOSE = 1e-6

#: Torch's inputs that are refused, with the error's words. The servers' rules have none of these options.
REFUSED = {
    "maximize": "maximize is True",
    "amsgrad": "amsgrad is True",
    "capturable": "capturable is True",
    "differentiable": "differentiable is True",
}
#: Torch's error inputs that are valid here, with the reason.
ALLOWED = {
    "lr as Tensor doesn't work with foreach & not capturable": "foreach means nothing here, and a rate is read as a number",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": "so are betas",
}


def cases(kind: str) -> list[Any]:
    found = []
    for info in INFOS:
        name = info.optim_cls.__name__
        of = info.optim_inputs_func(device="cpu") if kind == "inputs" else errors_of(info)
        found += [pytest.param(name, info.optim_cls, case, id=f"{name}-{number}") for number, case in enumerate(of)]
    return found


def errors_of(info: Any) -> list[Any]:
    return list(info.optim_error_inputs_func(device="cpu", dtype=torch.float32))


@pytest.mark.parametrize(("name", "reference", "case"), cases("inputs"))
def test_inputs(name: str, reference: type[Optimizer], case: Any) -> None:
    ours, theirs = pair("mlp")
    refused = [word for word in REFUSED if case.kwargs.get(word)]
    if refused:
        with pytest.raises(ValueError, match=REFUSED[refused[0]]):
            OURS[name](ours.named_parameters(), **case.kwargs)
        return
    for model, optimizer in (
        (ours, OURS[name](ours.named_parameters(), **case.kwargs)),
        (theirs, reference(theirs.parameters(), **case.kwargs)),
    ):
        for step in range(20):
            optimizer.zero_grad()
            model.loss(step).backward()
            optimizer.step()
    assert distance(ours, theirs) < CLOSE


@pytest.mark.parametrize(("name", "reference", "case"), cases("errors"))
def test_error_inputs(name: str, reference: type[Optimizer], case: Any) -> None:
    given = case.optimizer_error_input
    params = [torch.nn.Parameter(torch.randn(2, 3))] if given.params is None else given.params
    assert case.error_on is common.OptimizerErrorEnum.CONSTRUCTION_ERROR
    if given.desc in ALLOWED or case.error_regex in ALLOWED:
        OURS[name](params, **given.kwargs)
        return
    if issubclass(case.error_type, Warning):
        with pytest.warns(case.error_type, match=case.error_regex):
            OURS[name](params, **given.kwargs)
        return
    with warnings.catch_warnings(), pytest.raises(case.error_type, match=case.error_regex):
        OURS[name](params, **given.kwargs)
