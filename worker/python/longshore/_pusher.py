"""Pushes gradients of an accelerator in the background, each when its copy is done, so that backward never waits for it."""

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from longshore._host import Leaving
from longshore._locked import Straight


class _Work:
    """What the pusher and its thread share."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[int | None, int, Callable[[], None]] | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.left = 0
        #: Bytes of gradients on their way.
        self.nbytes = 0
        #: Parameters whose gradients are on their way.
        self.params: set[int] = set()
        self.failure: BaseException | None = None

    def run(self) -> None:
        while (item := self.queue.get()) is not None:
            param, nbytes, act = item
            try:
                if self.failure is None:
                    act()
            except BaseException as failure:
                self.failure = failure
            # What the act holds, such as a gradient, goes before somebody is told that it is done.
            del item, act
            with self.changed:
                self.left -= 1
                self.nbytes -= nbytes
                self.params.discard(-1 if param is None else param)
                self.changed.notify_all()


class Pusher:
    """Does things in the order given, on a thread of its own. A failure is raised by the next call of any method."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._work = _Work()
        threading.Thread(target=self._work.run, name="longshore-push", daemon=True).start()
        self.close = weakref.finalize(self, self._work.queue.put, None)

    def push(self, param: int, leaving: Leaving | Straight) -> None:
        """Pushes a parameter's gradient once its copy is done."""
        self._give(param, functools.partial(leaving.push, self._job), leaving.on_device)

    def then(self, act: Callable[[], None]) -> None:
        """Does this after all that was given before."""
        self._give(None, act)

    def _give(self, param: int | None, act: Callable[[], None], nbytes: int = 0) -> None:
        self._raise()
        with self._work.changed:
            self._work.left += 1
            self._work.nbytes += nbytes
            if param is not None:
                self._work.params.add(param)
        self._work.queue.put((param, nbytes, act))

    def wait_for(self, param: int) -> None:
        """Waits until a parameter's gradient of the micro-step before has been read."""
        with self._work.changed:
            self._work.changed.wait_for(lambda: param not in self._work.params)
        self._raise()

    def wait_for_room(self, nbytes: int, room: int) -> None:
        """Waits until a gradient of this size fits into so many bytes, with those on their way that a device still holds."""
        with self._work.changed:
            self._work.changed.wait_for(lambda: not self._work.nbytes or self._work.nbytes + nbytes <= room)
        self._raise()

    def wait(self) -> None:
        """Waits until all that was given is done."""
        with self._work.changed:
            self._work.changed.wait_for(lambda: self._work.left == 0)
        self._raise()

    def _raise(self) -> None:
        failure = self._work.failure
        if failure is not None:
            self.wait_until_idle()
            self._work.failure = None
            raise failure

    def wait_until_idle(self) -> None:
        """Waits until nothing is under way, whatever became of it."""
        with self._work.changed:
            self._work.changed.wait_for(lambda: self._work.left == 0)
