"""Weights of units that lie in servers' memory, from which their device copies them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longshore import _device
from longshore._lending import Lending, Run
from longshore._params import DTYPES
from longshore._unit_spans import Span


class Lent:
    """What was asked for together.

    Args:
        job: the Rust half's.
        version: of the weights.
        asked: the Rust half's, which will say where they lie.
        parts: where each part lies in the job, and the device's flat memory that it comes to.
    """

    def __init__(self, job: Any, version: int, asked: Any, parts: list[tuple[Span, Tensor]]) -> None:
        self._job, self._version, self._asked, self._parts = job, version, asked, parts
        self._runs: list[list[Run]] | None = None
        self._staged: list[Tensor] = []
        self._fetch: Any = None

    def read(self) -> None:
        """Waits for the weights. Where they came to this process's memory after all, since the link with a server was lost, they are read
        into page-locked memory."""
        self._runs = self._asked.runs()
        if self._runs is None:
            self._staged = [_device.accelerator.locked(target.shape, target.dtype) for _, target in self._parts]
            places = [
                ((index, memory.data_ptr(), elements, DTYPES[memory.dtype]), first)
                for ((index, first, elements), _), memory in zip(self._parts, self._staged, strict=True)
            ]
            self._fetch = self._job.fetch(self._version, places)
            self._fetch.read()

    def cancel(self) -> None:
        """Ends the wait of a thread that reads."""
        self._asked.cancel()
        if self._fetch is not None:
            self._fetch.cancel()

    def copy(self, lending: Lending, stream: Callable[[torch.device], Any]) -> None:
        """Gives the copies to the streams of their devices, once the weights were read."""
        targets = [target for _, target in self._parts]
        if self._runs is not None:
            lending.copy(self._asked, self._runs, targets, stream)
            return
        for target, memory in zip(targets, self._staged, strict=True):
            _device.accelerator.copy(target, memory, stream(target.device))
        lending.hold(self._staged, targets, stream)
