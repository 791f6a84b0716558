"""An optimizer built over another optimizer's parameters, as when a notebook's cell runs again. A scheduler or a traceback may still refer
to the older one."""

from typing import Any

import pytest
import torch
from models import distance, pair, train

import longshore
from longshore import errors

MODES: dict[str, dict[str, Any]] = {"safe": {}, "streaming": {"streaming": True}, "delayed": {"delay": 1, "warmup_steps": 1}}


@pytest.mark.parametrize("after", ["safe", "streaming"])
@pytest.mark.parametrize("before", MODES)
def test_the_newer_one_goes_on_from_the_last_weights(before: str, after: str) -> None:
    ours, theirs = pair("mlp")
    first = longshore.AdamW(ours.named_parameters(), lr=1e-2, **MODES[before])
    train(ours, first, range(3))
    first.flush()
    theirs.load_state_dict(ours.state_dict())
    second = longshore.SGD(ours.named_parameters(), lr=0.1, momentum=0.9, **MODES[after])
    train(ours, second, range(3, 6))
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), range(3, 6))
    second.flush()
    assert distance(ours, theirs) < 1e-6
    assert first.is_closed
    with pytest.raises(errors.UsageError, match="another one took its parameters over"):
        first.step()


def test_one_that_has_made_no_step_takes_no_gradients() -> None:
    """The unused optimizer's hooks would be the first that backward calls."""
    ours, theirs = pair("mlp")
    first = longshore.AdamW(ours.named_parameters(), streaming=True)
    train(ours, longshore.AdamW(ours.named_parameters(), lr=1e-2), range(2))
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), range(2))
    assert distance(ours, theirs) < 1e-6
    with pytest.raises(errors.UsageError, match="another one took its parameters over"):
        first.step()


def test_a_job_of_a_server_goes_on_in_the_newer_one(servers: str) -> None:
    model, _ = pair("mlp")
    kept = []
    for cell in range(3):
        kept.append(longshore.AdamW(model.named_parameters(), servers=servers, job="cell"))
        train(model, kept[-1], range(2 * cell, 2 * cell + 2))
    assert [optimizer.version for optimizer in kept] == [2, 4, 6]
