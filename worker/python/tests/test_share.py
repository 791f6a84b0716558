"""What Python adds to a step, in CPU time of its thread, which other processes do not add to."""

import time

import pytest
from overhead import overhead


def fixed() -> float:
    """The CPU time of a loop that is always the same: what this host's cores and this Python take for it now. Where it was 1.2 ms
    Python's share was 0.7 ms in safe mode and 1.9 ms in streaming mode."""
    start, found = time.thread_time(), {}
    for number in range(LOOP):
        found[number % 64] = str(number)
    return time.thread_time() - start


LOOP = 18_000


@pytest.mark.parametrize(("streaming", "most"), [(False, 2.0), (True, 3.5)])
def test_what_python_takes_of_a_step_with_400_tensors(streaming: bool, most: float) -> None:
    # A busy host's cores are half as fast at times, so each is compared with a loop that runs beside it, and the least of ten counts.
    # Caches that others fill slow torch's part of a step more than the loop: with both cores busy streaming mode was at 2.9, and at 1.6 else.
    assert min(overhead(400, rounds=30, streaming=streaming) / min(fixed() for _ in range(5)) for _ in range(10)) < most
