"""Python's part of a step, in CPU time of its thread, to which other processes add nothing."""

import time
from typing import Any

import pytest
from overhead import overhead


def fixed() -> float:
    """Returns the CPU time of a fixed loop: the present speed of this host's cores with this Python. Where it was 1.2 ms, Python's part was
    0.7 ms in safe mode and 1.9 ms in streaming mode."""
    start, found = time.thread_time(), {}
    for number in range(LOOP):
        found[number % 64] = str(number)
    return time.thread_time() - start


LOOP = 18_000


@pytest.mark.parametrize(("mode", "most"), [({}, 2.0), ({"streaming": True}, 3.5), ({"streaming": True, "where": "simulated"}, 8.0)])
def test_what_python_takes_of_a_step_with_400_tensors(mode: dict[str, Any], most: float) -> None:
    # A busy host's cores are half as fast at times. Each measurement is divided by a loop beside it, and the least of ten counts. Caches
    # filled by other processes slow torch's part of a step more than the loop. With both cores busy, streaming mode was at 2.9; otherwise
    # at 1.6. A simulated device was at 5.8 with busy cores, and 8 is 0.024 ms a tensor.
    assert min(overhead(400, rounds=10, **mode) / min(fixed() for _ in range(5)) for _ in range(10)) < most
