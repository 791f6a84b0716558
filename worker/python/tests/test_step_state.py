"""The states of a step, and reads that change none."""

import pytest
import torch
from models import Mlp, same_bits

import longshore
from longshore import errors
from longshore.optim.connection import State, Step


def test_a_step_goes_from_its_first_gradient_to_its_decision() -> None:
    step = Step()
    step.take(0)
    assert (step.state, step.has_begun) == (State.COLLECTING, True)
    step.end_pass()
    assert (step.state, step.passes, step.taken) == (State.PASSED, 1, set())
    step.push(made=3)
    assert (step.state, step.has_begun, step.made) == (State.PUSHED, False, 3)
    step.end()
    assert (step.state, step.made) == (State.IDLE, None)


@pytest.mark.parametrize("state", [State.PUSHED, State.TORN, State.GIVEN_UP])
def test_no_gradient_leaves_in_a_broken_step(state: State) -> None:
    step = Step()
    step.state = state
    for act in (step.check_open, step.end_pass, lambda: step.push(made=0)):
        with pytest.raises(errors.UsageError, match=r"flush\(\)"):
            act()
    assert (step.state, step.passes) == (state, 0)


def test_a_read_leaves_passes_in_hand_and_a_step_that_is_given_up() -> None:
    step = Step()
    for state, act in ((State.IDLE, step.end), (State.COLLECTING, lambda: step.take(0)), (State.PASSED, step.end_pass)):
        act()
        step.tear()
        assert step.state is State.TORN
        step.mend()
        assert step.state is state
    step.give_up(version=2)
    step.tear()
    step.mend()
    assert (step.state, step.version) == (State.GIVEN_UP, 2)


def test_reading_the_loss_scale_changes_nothing() -> None:
    """A step that had begun would keep flush() from the newest weights of a delayed job."""
    models = []
    for reads in (False, True):
        torch.manual_seed(0)
        model = Mlp()
        scale = longshore.LossScale(initial=8.0, dynamic=False)
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, delay=1, warmup_steps=1, loss_scale=scale)
        if reads:
            assert optimizer.loss_scale == 8.0 and optimizer._connection is None
        for number in range(4):
            optimizer.zero_grad()
            (model.loss(number) * 8.0).backward()
            optimizer.step()
            if reads:
                assert optimizer.loss_scale == 8.0
        assert optimizer.flush() == 4
        models.append(model)
    assert same_bits(*models)
