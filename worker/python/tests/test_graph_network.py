"""Forces through double backward: the gradients that leave, and their time."""

from collections import Counter
from typing import Any

import molecules
import pytest
import torch
from models import Recorded, pair

import longshore
from longshore import errors


def test_the_force_computation_sends_nothing_and_backward_sends_each_gradient_once() -> None:
    model, _ = pair("graph")
    optimizer = longshore.AdamW(model.named_parameters(), streaming=True)
    optimizer.open()
    pushed: Counter[int] = Counter()

    def note(name: str, *given: Any) -> None:
        if name == "push":
            pushed.update(place[0] for place in given[0])

    optimizer._connection.job = Recorded(optimizer._connection.job, note)
    batch = molecules.molecules(0)
    energies, forces = model(batch)
    assert not pushed, "a derivative by the positions accumulates into no weight"
    # The force alone reaches each weight in two ways: through the first derivative, and through its argument.
    (energies.square().mean() + forces.square().mean()).backward()
    assert pushed == dict.fromkeys(range(len(list(model.parameters()))), 1)


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
