"""Activation checkpointing within a unit's module: weights that it uses itself are noted by name there as well."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

_graph: Any = torch._C._autograd
#: What torch puts its hooks with while a checkpointed function runs, where it has that and does not run backward itself.
_HOOK: Any = getattr(checkpoint, "_checkpoint_hook", None)


def follow(on_again: Callable[[Any], bool], off: Callable[[], None]) -> None:
    """torch counts what a checkpointed function saves, and what it saves when it is computed again. Then no unit's module runs, and weights
    that are used directly go to hooks of ours. So ours go on top of those of a checkpoint in forward, too.

    Args:
        on_again: puts hooks on top of what is there now, if the hooks that were on top before are those of a unit that runs; says whether.
        off: takes them away.
    """
    if _HOOK is None or hasattr(_HOOK, "_longshore_follows"):
        return
    enter, leave = _HOOK.__enter__, _HOOK.__exit__

    def enter_(self: Any) -> Any:
        before = _graph._top_saved_tensors_default_hooks(True)
        entered = enter(self)
        self._longshore_is_on = on_again(before)
        return entered

    def leave_(self: Any, *error: Any) -> Any:
        if self._longshore_is_on:
            off()
        return leave(self, *error)

    _HOOK.__enter__, _HOOK.__exit__, _HOOK._longshore_follows = enter_, leave_, True
