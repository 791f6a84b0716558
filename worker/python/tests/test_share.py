"""What Python adds to a step, in CPU time of its thread, which other processes do not add to."""

from longshore.bench import overhead


def test_python_takes_two_milliseconds_of_a_step_with_400_tensors() -> None:
    assert min(overhead(400, rounds=30) for _ in range(3)) < 2e-3
