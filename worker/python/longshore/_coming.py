"""Images on their way to a device, in the background: group by group, as they arrive at this process."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from longshore._params import Param

#: By device: the event after the copies of a group.
Copied = dict[torch.device, Any]


class Coming:
    """The images of one version, on a thread of their own.

    Args:
        version: whose images they are.
        groups: what reads a group's images into the host's memory, and its parameters.
        copy: gives the copies of a group to its devices.
    """

    def __init__(self, version: int, groups: list[tuple[Any, list[Param]]], copy: Callable[[list[Param]], Copied]) -> None:
        self.version = version
        self._groups = groups
        self._copy = copy
        self._place = {param.index: place for place, (_, params) in enumerate(groups) for param in params}
        #: The parameters that were not amended, and among them those of which nobody knows.
        self.left = set(self._place)
        self.begun: set[int] = set()
        self._changed = threading.Condition()
        self._copied: list[Copied] = []
        self._is_given_up = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="longshore-images", daemon=True)
        self._thread.start()

    def __contains__(self, param: Param) -> bool:
        return param.index in self._place

    def _run(self) -> None:
        try:
            for fetch, params in self._groups:
                if self._is_given_up:
                    return
                fetch.read()
                copied = self._copy(params)
                with self._changed:
                    self._copied.append(copied)
                    self._changed.notify_all()
        except BaseException as failure:
            with self._changed:
                self.failure = failure
                self._changed.notify_all()

    def wait_for(self, param: Param) -> Copied:
        """Waits until the copy of a parameter's image has been given to its device, not until it is done.

        Raises:
            LongshoreError: what kept the image from coming.
        """
        place = self._place[param.index]
        with self._changed:
            self._changed.wait_for(lambda: len(self._copied) > place or self.failure is not None)
            if len(self._copied) > place:
                return self._copied[place]
        assert self.failure is not None
        raise self.failure

    @property
    def is_here(self) -> bool:
        """Whether this thread is the one that reads the images."""
        return threading.current_thread() is self._thread

    def cancel(self) -> None:
        """Has it end soon. It waits for nothing."""
        self._is_given_up = True
        for fetch, _ in self._groups:
            fetch.cancel()

    def give_up(self) -> None:
        """Nothing writes to the host's memory, and no copy is given to a device, once this has returned; on the thread of the images
        itself, once that has gone on."""
        self.cancel()
        while self._thread.is_alive() and not self.is_here:
            # It ends soon. Ctrl-C once more must not free what it writes to.
            with contextlib.suppress(KeyboardInterrupt):
                self._thread.join()
