"""The streams of a device that use units' weights: where one stream has fetched a unit, another one may use it or let go of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from longshore import _device
from longshore._units import Unit


@dataclass(slots=True)
class _Uses:
    """What one device has of a unit."""

    #: The streams that its memory belongs to: what is given up is theirs again at once, whoever still reads it.
    owners: list[Any] = field(default_factory=list)
    #: The streams that have used it, and those that wait for the last of it that came.
    users: list[Any] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)
    #: The streams that ranks have gathered parts of it behind, each with when that is done.
    gathered: list[tuple[Any, Any]] = field(default_factory=list)


class UnitStreams:
    """Orders streams by the units that they share. A caller orders none that only read.

    Args:
        copies: by device, the stream that weights come on.
    """

    def __init__(self, copies: Callable[[torch.device], Any]) -> None:
        self._copies = copies
        self._uses: dict[Unit, dict[torch.device, _Uses]] = {}

    def begin(self, unit: Unit, owners: Mapping[torch.device, Any]) -> None:
        """Weights of a unit come to memory of these streams, by device."""
        for device, owner in owners.items():
            uses = self._uses.setdefault(unit, {}).setdefault(device, _Uses())
            _add(uses.owners, owner)
            uses.shown.clear()

    def gathered(self, unit: Unit) -> None:
        """Ranks gather a unit's weights, and this thread's streams wait for that: others that use the unit will, too."""
        for device, uses in self._uses.get(unit, {}).items():
            current = _device.accelerator.current_stream(device)
            others = [(stream, done) for stream, done in uses.gathered if stream != current]
            uses.gathered = [*others, (current, _device.accelerator.record(current))]

    def use(self, unit: Unit, *, waits: bool) -> None:
        """This thread's streams use a unit from now on. ``waits`` says that they wait for its weights already."""
        for device, uses in self._uses.get(unit, {}).items():
            current = _device.accelerator.current_stream(device)
            if current in uses.shown:
                continue
            if not waits:
                _device.accelerator.let_wait(current, _device.accelerator.record(self._copies(device)))
            _wait_for_gathered(uses, current)
            uses.shown.append(current)
            _add(uses.users, current)

    def leave(self, unit: Unit) -> None:
        """Weights of a unit go: what comes next in their memory waits for those who use them."""
        for uses in self._uses.get(unit, {}).values():
            for owner in uses.owners:
                for user in uses.users:
                    if user != owner:
                        _device.accelerator.let_wait(owner, _device.accelerator.record(user))

    def forget(self, unit: Unit) -> None:
        """Nothing of a unit is on a device any more."""
        self._uses.pop(unit, None)


def _wait_for_gathered(uses: _Uses, current: Any) -> None:
    for stream, done in uses.gathered:
        if stream != current:
            _device.accelerator.let_wait(current, done)


def _add(streams: list[Any], stream: Any) -> None:
    if stream not in streams:
        streams.append(stream)
