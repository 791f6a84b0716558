"""Over a network, a process with a model in units holds only units on their way, and asks for each as often as it comes."""


import pytest
from conftest import several
from models import pair
from units import Deep, check_in_units, optimizer_of, same, train, weight_bytes

import longshore
from longshore.units.residency import Residency

LAYERS = 32


def test_a_process_holds_what_is_on_its_way() -> None:
    with several(1, memory="1GiB") as servers:
        model = Deep(LAYERS, 1024)
        whole = weight_bytes(model)
        assert whole > 64 << 20
        unit = whole // LAYERS
        # Gradients of one unit, and three units of weights.
        budget = 4 * unit
        optimizer = optimizer_of(model, servers=servers, job="large", transport="tcp")
        sharded = longshore.shard(model, optimizer, budget)
        fetched = []
        for step in range(4):
            before = sharded.fetched_bytes
            train(model, optimizer, steps=1, first=step)
            fetched.append(sharded.fetched_bytes - before)
        # Forward needs every unit. Backward needs all but the first, and the last three have stayed.
        assert [step / unit for step in fetched] == [2 * LAYERS - 4] * 4
        assert optimizer._connection is not None
        job = optimizer._connection.job
        held = job.weights_held()
        assert unit <= held <= 3 * unit, f"{held / unit} units were held at once"
        assert optimizer.last_report is not None and optimizer.last_report.pulled_bytes == fetched[-1]
        optimizer.close()


def test_a_process_that_joins_does_not_hold_the_model_either(servers: str) -> None:
    """Weights read to open the job are dropped when the model is cut."""
    whole, cut = pair(Deep, width=96)
    options = {"servers": servers, "job": "again", "transport": "tcp"}
    first = optimizer_of(whole, **options)
    train(whole, first, steps=2)
    first.close()
    optimizer = optimizer_of(cut, **options)
    longshore.shard(cut, optimizer, budget := weight_bytes(cut) // 8)
    assert optimizer._connection is not None
    same(whole, cut)
    train(cut, optimizer, steps=2, first=2)
    held = optimizer._connection.job.weights_held()
    assert 0 < held <= budget, f"{held} bytes, budget {budget}"


def test_small_units_come_from_further_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip needs more than four small units ahead to hide. The results and the budget stay."""
    most = [0]
    ahead = Residency._fetch_ahead

    def noted(residency: Residency, *, shared: bool) -> None:
        ahead(residency, shared=shared)
        most.append(len(residency._under_way))

    monkeypatch.setattr(Residency, "_fetch_ahead", noted)
    check_in_units(*pair(Deep), share=1 / 2)
    assert max(most) > 8
