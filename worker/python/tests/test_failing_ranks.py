"""A rank fails between two collectives. The others learn the reason long before the process group's timeout. A rank runs failing_rank.py.
"""

from pathlib import Path
from typing import Any

import pytest
from failing_rank import FAILS, TIMEOUT
from test_ranks import run

RANKS = 3
#: For each failure, the class of the error on the failing rank, its class on other ranks, and the message.
FAILURES = {
    "waits": ("WaitError", "WaitError", "the server of shard 3 did not answer"),
    "interrupted": ("KeyboardInterrupt", "LongshoreError", "KeyboardInterrupt"),
    "streams": ("GradientError", "GradientError", "create_graph=True"),
    "pushes": ("GradientError", "GradientError", "but must be dense"),
    "opens": ("MemoryError", "LongshoreError", "no memory for a job"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_the_others_are_told_what_has_failed(what: str, tmp_path: Path, servers: str) -> None:
    own, others, message = FAILURES[what]
    [ranks] = run(tmp_path, [(what, {"servers": servers, "job": what})], RANKS, "failing_rank.py")
    for rank, found in enumerate(ranks):
        first: dict[str, Any] = found["first"]
        assert first["kind"] == (own if rank == FAILS else others), first
        assert first["seconds"] < TIMEOUT / 2, first
        if rank == FAILS:
            assert message in first["message"] or own == "KeyboardInterrupt"
        else:
            assert first["message"].startswith(f"rank {FAILS} failed, so that no rank can go on: ") and message in first["message"]
        if "then" in found:
            # A rank that went on would take part in the wrong collective, so each further call must raise.
            assert found["then"]["kind"] == "UsageError", found
            assert f"rank {FAILS} has failed in the midst of what ranks do together" in found["then"]["message"], found
            assert found["then"]["seconds"] < TIMEOUT / 2, found
    assert all(("then" in found) is (what != "opens") for found in ranks)
