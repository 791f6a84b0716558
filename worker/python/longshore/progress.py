"""A progress line of training. In a terminal or a notebook the line changes; elsewhere a new line appears every few seconds."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

#: Seconds between two changes of the line, and between two lines of a log.
_SHOWN_EVERY = 0.2
_LOGGED_EVERY = 10.0


class Progress:
    """Shows after each step the progress of training and the step's cost.

    >>> with longshore.Progress(optimizer, steps=1000) as progress:  # doctest: +SKIP
    ...     for batch in loader:
    ...         loss = train_on(batch)
    ...         progress.step(loss)
    step 412 of 1000  loss 3.071  grad norm 0.84  18.3 ms a step, exposed 0.4 ms  11 s left

    Args:
        optimizer: an optimizer of this package.
        steps: total number of steps. Without it the time left is not shown.
        file: target of the line. By default standard error, and in a notebook the cell's output.

    A loss on a device is read when the line changes, so other steps do not wait for it.
    """

    def __init__(
        self,
        optimizer: Any,
        steps: int | None = None,
        *,
        file: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        # ipykernel is loaded in a notebook's process. The notebook's output handles a carriage return as a terminal
        # does.
        in_notebook = "ipykernel" in sys.modules
        self._optimizer = optimizer
        self._steps = steps
        self._file = file or (sys.stdout if in_notebook else sys.stderr)
        self._changes = in_notebook or self._file.isatty()
        self._now = now
        self._began = self._shown_at = now()
        self._done = self._shown = 0
        self._exposed_s = 0.0
        self._counted: int | None = None
        self._width = 0
        self._loss: Any = None

    def step(self, loss: Any = None) -> None:
        """Counts a step. Call it after ``optimizer.step()``, with the step's loss if there is one."""
        self._done += 1
        self._loss = loss.detach() if hasattr(loss, "detach") else loss
        report = self._optimizer.last_report
        if report is not None and report.step != self._counted:
            self._counted = report.step
            self._exposed_s += report.exposed_s
        if self._now() - self._shown_at >= (_SHOWN_EVERY if self._changes else _LOGGED_EVERY):
            self._show()

    def close(self) -> None:
        """Shows the last state, and ends the line."""
        if self._shown < self._done:
            self._show()
        if self._changes and self._width:
            self._file.write("\n")
            self._file.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self) -> None:
        now = self._now()
        self._shown_at, self._shown = now, self._done
        text = "  ".join(self._parts(now - self._began))
        if self._changes:
            # Blanks cover the end of the previous line if that line was longer.
            self._file.write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        else:
            self._file.write(f"{text}\n")
        self._file.flush()

    def _parts(self, elapsed_s: float) -> list[str]:
        of = f" of {self._steps}" if self._steps else ""
        parts = [f"step {self._done}{of}"]
        if self._loss is not None:
            parts.append(f"loss {float(self._loss):.3f}")
        report = self._optimizer.last_report
        if report is not None and report.grad_norm:
            parts.append(f"grad norm {report.grad_norm:.2f}")
        step_ms, exposed_ms = (1e3 * seconds / self._done for seconds in (elapsed_s, self._exposed_s))
        parts.append(f"{step_ms:.1f} ms a step, exposed {exposed_ms:.1f} ms")
        if self._steps and self._done < self._steps:
            parts.append(f"{_duration(elapsed_s / self._done * (self._steps - self._done))} left")
        return parts


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
