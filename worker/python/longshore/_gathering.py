"""``longshore.GatheredParameters``: parameters of units, whole and plain, for who must see several at a time."""

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from longshore._unit_tensors import UnitParameter
from longshore._units import Unit


class GatheredParameters:
    """Within it these parameters are plain ones with their weights, all at a time, as in ``deepspeed.zero.GatheredParameters``.

    Their units must fit into the budget together. What trains is the servers' and cannot be written here; what is frozen can.

    Args:
        params: a parameter, or several. Those that are in no unit are left as they are.
        modifier_rank: means nothing: every rank may write to its frozen weights, and none to those that train.
        enabled: False does nothing.
    """

    def __init__(self, params: Tensor | Iterable[Tensor], modifier_rank: int | None = None, *_: Any, enabled: bool = True) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = given if enabled else []
        self._held = contextlib.ExitStack()

    def __enter__(self) -> None:
        units: dict[Unit, Any] = {}
        for tensor in self._params:
            if isinstance(tensor, UnitParameter):
                units[tensor._longshore_member.unit] = tensor._longshore_home  # type: ignore[attr-defined]
        with contextlib.ExitStack() as held:
            for home in {id(home): home for home in units.values()}.values():
                # What autograd saves here may be asked for when the weights have gone.
                held.enter_context(home.saving())
            for unit, home in units.items():
                home.pin(unit, alone=True)
                held.callback(home.unpin, unit)
            self._held = held.pop_all()

    def __exit__(self, *_: Any) -> None:
        self._held.close()
