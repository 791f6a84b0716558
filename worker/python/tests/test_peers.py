"""The systems in the benchmark's comparison do the same work."""

import sys

import peer_ways
import peers
import pytest

ROUNDS = 2


def test_peers_take_turns_and_train_alike(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    times = peers.peers(300_000, 500_000, 3, 2, 8, ROUNDS, "longshore,torch,deepspeed")
    ways = [*peer_ways.OURS, "torch fused, with casts"]
    layered = [peer_ways.BASE, "longshore, stage 2"]
    steps = [*peer_ways.OURS, "torch AdamW, with casts", "torch fused, with casts"]
    parts = {"step": steps, "training": ways, "stage 3": layered}
    assert list(times) == [f"{part}: {name}" for part, names in parts.items() for name in names]
    assert all(len(taken) == ROUNDS and min(taken) > 0 for taken in times.values())
    printed = capsys.readouterr().out
    assert printed.count("not measured: ") == 6, "what is not installed is said, and nothing else stops"
    assert "load" in printed
    losses = [float(line.split()[-1]) for line in printed.splitlines() if " loss " in line]
    assert len(losses) == len(ways) + len(layered)
    training, in_units = losses[: len(ways)], losses[len(ways) :]
    assert training == pytest.approx([training[0]] * len(ways), rel=1e-2)
    assert in_units[0] == in_units[1], "stages 2 and 3 have the same bits"
