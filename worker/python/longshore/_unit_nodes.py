"""Nodes of backward that were given weights: the units of these stay until the node has run."""

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import Variable

from longshore._units import Unit


class Nodes:
    """What the nodes were given of all backwards that run, where one may run inside another.

    Args:
        lock: under which units are pinned. Whoever calls has it.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        #: By number of a backward: the node that it is at, by its own number, and the units that this was given weights of.
        self._given: dict[int, tuple[int | None, list[Unit]]] = {}

    def give(self, unit: Unit) -> None:
        """Has a unit stay for the node that runs."""
        backward, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        # Those that ran inside this one began later, and have ended.
        self.end(inside=backward)
        if backward not in self._given and backward != -1:
            Variable._execution_engine.queue_callback(functools.partial(self._end_backward, backward))
        if self._given.get(backward, (number,))[0] != number:
            self._end_node(backward)
        _, given = self._given.setdefault(backward, (number, []))
        if unit not in given:
            unit.pins += 1
            given.append(unit)

    def end(self, inside: int = -1) -> None:
        """Ends what nodes were given in backwards that ran inside this one, and outside of any."""
        for backward in list(self._given):
            if backward > inside or backward == -1:
                self._end_node(backward)

    def _end_backward(self, backward: int) -> None:
        with self._lock:
            self._end_node(backward)

    def _end_node(self, backward: int) -> None:
        _, given = self._given.pop(backward, (None, []))
        for unit in given:
            unit.pins -= 1


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1
