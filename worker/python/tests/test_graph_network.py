"""Forces through double backward: the gradients that leave, and their time."""

from collections import Counter
from typing import Any

import pytest
import torch
from models import distance, molecules, pair, same_bits

import longshore
from longshore import errors

STEPS = 200


class Counted:
    """A job that counts pushes of each gradient."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self.pushed: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def push(self, gradients: list[Any], *scale: float) -> None:
        self.pushed.update(place[0] for place in gradients)
        self._job.push(gradients, *scale)


def test_the_force_computation_sends_nothing_and_backward_sends_each_gradient_once() -> None:
    model, _ = pair("graph")
    optimizer = longshore.AdamW(model.named_parameters(), streaming=True)
    optimizer.open()
    counted = optimizer._connection.job = Counted(optimizer._connection.job)
    batch = molecules.molecules(0)
    energies, forces = model(batch)
    assert not counted.pushed, "a derivative by the positions accumulates into no weight"
    # The force alone reaches each weight in two ways: through the first derivative, and through its argument.
    (energies.square().mean() + forces.square().mean()).backward()
    assert counted.pushed == dict.fromkeys(range(len(list(model.parameters()))), 1)


def test_streaming_equals_safe_and_both_follow_torch() -> None:
    safe, safe_losses = molecules.train(longshore.AdamW, STEPS)
    streamed, streamed_losses = molecules.train(longshore.AdamW, STEPS, streaming=True)
    assert same_bits(safe, streamed)
    assert safe_losses == streamed_losses
    assert safe_losses[-1] < 0.05 * safe_losses[0]
    torchs, _ = molecules.train(torch.optim.AdamW, STEPS)
    assert distance(safe, torchs) < 1e-6


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_forces_by_backward_are_refused_in_streaming_mode() -> None:
    """`backward` for the forces would send the energy's gradient by the weights, as in torch it would add to it."""
    model, _ = pair("graph")
    optimizer = longshore.AdamW(model.named_parameters(), streaming=True)
    optimizer.open()
    energies, _ = model(molecules.molecules(0))
    with pytest.raises(errors.GradientError, match=r"create_graph=True.*torch\.autograd\.grad"):
        energies.sum().backward(create_graph=True)
    assert optimizer.version == 0


def test_the_example(servers: str, capsys: pytest.CaptureFixture[str]) -> None:
    losses = molecules.main(servers, steps=20)
    torchs, safe, streamed = losses.values()
    assert safe == streamed == pytest.approx(torchs, rel=1e-4)
    assert torchs[-1] < torchs[0]
    assert capsys.readouterr().out.count("longshore.AdamW") == 2
