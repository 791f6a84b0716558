"""Optimizers that follow one another over the same parameters, as where a notebook's cell runs again."""

import os
from typing import Any

from torch import Tensor

from longshore import _guards, _params
from longshore._options import Options
from longshore._streaming import Stream
from longshore._unit_weights import UnitWeights
from longshore.errors import UsageError


class Succession:
    """The part of an optimizer that gives way to the next one."""

    param_groups: list[dict[str, Any]]
    _options: Options
    _stream: Stream | None
    _units: UnitWeights | None
    _process: int
    #: Whether another optimizer has taken the parameters over.
    _is_replaced: bool

    @property
    def rank(self) -> tuple[int, int]:
        raise NotImplementedError

    def _tensors(self) -> list[Tensor]:
        raise NotImplementedError

    def flush(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _claim_at_once(self) -> None:
        """Claims the parameters before the first step where backward would send their gradients for another optimizer."""
        trained = [(name, tensor) for name, tensor in _params.named(self.param_groups) if tensor.requires_grad]
        if self._options.streaming or any(other.accumulates[0] for _, other in _params.owners(trained, self)):
            _params.claim(trained, self, is_begun=False)

    def give_way(self, tensors: set[int]) -> bool:
        """Closes this optimizer for another one that updates all of its parameters from now on, as torch lets one follow the other. The
        parameters have the last weights then.

        Args:
            tensors: what the other one updates, by ``id``.

        Returns:
            False where that cannot be, and nothing has changed: it updates others too, other ranks would not know, or its model is in units.
        """
        mine = {id(tensor) for tensor in self._tensors() if tensor.requires_grad}
        if not mine <= tensors or self.rank[1] > 1 or self._units is not None or self._process != os.getpid():
            return False
        self.flush()
        self.close()
        if self._stream is not None:
            self._stream.unhook()
        _guards.release_clipping(mine)
        self._is_replaced = True
        return True

    def _check_not_replaced(self) -> None:
        if self._is_replaced:
            raise UsageError("this optimizer was closed when another one took its parameters over: step the newer one")
