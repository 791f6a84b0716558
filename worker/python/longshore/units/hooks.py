"""Hooks on modules and on backward: a unit is fetched before its module runs, and before backward needs saved weights.

``longshore.shard`` installs them. Forward runs them on the training thread, backward on autograd's threads. Activation checkpointing
recomputes a module, and puts the unit's hooks on top of its own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from longshore.errors import UsageError
from longshore.transfer.tensors import is_in_backward

if TYPE_CHECKING:
    from longshore.units.model import Member, Unit
    from longshore.units.residency import Residency

_graph: Any = torch._C._autograd
#: torch's context of saved-tensor hooks around a function that is checkpointed without reentrance. None if this torch
#: has no such context.
_HOOK: Any = getattr(checkpoint, "_checkpoint_hook", None)


def _follow_checkpoints() -> None:
    """Makes every checkpoint put units' hooks on top of its own, in forward too.

    torch counts the tensors that a checkpointed function saves, in forward and in recomputation, and both must agree.
    In recomputation, weights that the function uses directly go to the package's hooks, and torch does not count them.
    In forward the checkpoint's hooks would lie above those of the module around it, and count these weights.
    """
    if _HOOK is None or hasattr(_HOOK, "_longshore_follows"):
        return
    enter, leave = _HOOK.__enter__, _HOOK.__exit__

    def enter_(self: Any) -> Any:
        before = _graph._top_saved_tensors_default_hooks(True)
        entered = enter(self)
        self._longshore_is_on = before is not None and isinstance(before[0], _Pack)
        if self._longshore_is_on:
            Saving(before[0].home).on()
        return entered

    def leave_(self: Any, *error: Any) -> Any:
        if self._longshore_is_on:
            Saving.off()
        return leave(self, *error)

    _HOOK.__enter__, _HOOK.__exit__, _HOOK._longshore_follows = enter_, leave_, True


class Saving:
    """Hooks for tensors that autograd saves. A weight is saved by reference, and fetched again when backward needs it."""

    def __init__(self, home: Residency) -> None:
        self._home = home

    def on(self) -> None:
        """Puts these hooks on top of others, such as those of activation checkpointing. All tensors but weights go on
        to the other hooks."""
        below = _graph._top_saved_tensors_default_hooks(True)
        if self.is_ours(below):
            pack, unpack = below
        else:
            pack, unpack = _Pack(self._home, below), self._unpack
        try:
            _graph._push_saved_tensors_default_hooks(pack, unpack)
        except RuntimeError as error:
            raise UsageError(
                "torch allows no hooks on saved tensors here, and a model in units needs them: use torch.autograd.grad in place of "
                f"torch.func.grad, and call the model outside of torch.autograd.graph.disable_saved_tensors_hooks. torch says: {error}"
            ) from error

    def is_ours(self, hooks: Any) -> bool:
        """Returns whether ``hooks`` are the hooks of this object's model."""
        return hooks is not None and isinstance(hooks[0], _Pack) and hooks[0].home is self._home

    @staticmethod
    def off() -> None:
        _graph._pop_saved_tensors_default_hooks()

    def take_away(self) -> None:
        """Removes these hooks even if other hooks lie on top of them, or another hook's end has removed them."""
        above: list[Any] = []
        while (top := _graph._top_saved_tensors_default_hooks(True)) is not None:
            self.off()
            if self.is_ours(top):
                break
            above.append(top)
        for pack, unpack in reversed(above):
            _graph._push_saved_tensors_default_hooks(pack, unpack)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.on()
        try:
            yield
        finally:
            self.off()

    def _unpack(self, saved: Any) -> Tensor:
        if torch.is_grad_enabled() and is_in_backward():
            # With create_graph backward records a graph, which saves weights too. The hooks stay on until the running
            # node is done.
            self.on()
        tensor: Tensor = saved()
        return tensor


class _Pack:
    __slots__ = ("below", "home")

    def __init__(self, home: Residency, below: Any) -> None:
        self.home, self.below = home, below

    def __call__(self, tensor: Tensor) -> Any:
        member = self.home.member_of(tensor)
        if member is not None:
            return _Weight(self.home, member, tensor)
        if self.below is not None:
            pack, unpack = self.below
            return functools.partial(unpack, pack(tensor))
        return _Kept(tensor)


class _Weight:
    """A saved member, or a view of one."""

    __slots__ = ("_epoch", "_home", "_member", "_view")

    def __init__(self, home: Residency, member: Member, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._home, self._member, self._view = home, member, tensor.detach()
        self._epoch = home.epoch

    def __call__(self) -> Tensor:
        if self._epoch != self._home.epoch and self._member.is_trained:
            raise UsageError(
                f"backward needs {self._member.name} of unit {self._member.unit.name} as it was before the last step or flush: call "
                "backward before step()"
            )
        self._home.give(self._member)
        return self._view


class _Kept:
    """A saved tensor that is no weight, kept as torch keeps it."""

    __slots__ = ("_changes", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        # A saved tensor may refer to its graph, and the graph refers to this object: detach() avoids the cycle.
        self._tensor = tensor.detach()
        self._changes = self._tensor._version

    def __call__(self) -> Tensor:
        if self._tensor._version != self._changes:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(self._tensor.shape)}] is at version {self._tensor._version}; expected version {self._changes} instead."
            )
        return self._tensor


@dataclass(frozen=True, slots=True)
class _Run:
    """A running call of a module whose units are pinned. The call lasts as long as its frame on its thread."""

    module: nn.Module
    units: list[Unit]
    frame: FrameType
    thread: int
    #: True if the call runs within another call that has pinned the same units.
    is_within: bool = False

    def has_ended(self) -> bool:
        """Returns whether the call has ended, as far as this thread can tell."""
        if self.thread != threading.get_ident():
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is None


class ModuleHooks:
    """Pins the units of a model's modules while the modules run."""

    def __init__(self, model: nn.Module, home: Residency, saving: Saving) -> None:
        self._home, self._saving = home, saving
        self._running: list[_Run] = []
        #: The running modules, from the outermost on, also those that only contain units. The mode of the outermost one
        #: decides whether the call may train.
        self._calls: list[nn.Module] = []
        home.unwind, home.is_called = self.unwind, lambda: bool(self._calls)
        _follow_checkpoints()
        needed = list(_needed(model, home.units))
        for module, units in needed:
            self._register(module, units)
            self._follow_compile(module, units)
        ids = {id(module) for module, _ in needed}
        for module in model.modules():
            if id(module) not in ids and any(id(part) in ids for part in module.modules()):
                self._register(module, None)

    def _register(self, own: nn.Module, units: list[Unit] | None) -> None:
        """Hooks a module that needs these units. With None, the module only contains units. In a copy of the module the
        same hooks do nothing."""

        def before(module: nn.Module, args: Any) -> None:
            if module is not own or torch.compiler.is_compiling():
                return
            if units is None:
                self._begin(module)
            else:
                self._enter(module, units, sys._getframe(1))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module is not own or torch.compiler.is_compiling():
                return
            if units is None:
                self._end(module)
            else:
                self._leave(module, output)

        own.register_forward_pre_hook(before, prepend=True)
        own.register_forward_hook(after, always_call=True)

    def _follow_compile(self, own: nn.Module, units: list[Unit]) -> None:
        """Wraps the compiled call of ``module.compile()``. Hooks inside the compiled code do nothing."""

        def guard(module: nn.Module) -> None:
            compiled: Any = module._compiled_call_impl
            if compiled is None or module is not own:
                return

            def call(*args: Any, **kwargs: Any) -> Any:
                self._enter(module, units, sys._getframe())
                output = None
                try:
                    output = compiled(*args, **kwargs)
                finally:
                    self._leave(module, output)
                return output

            module._compiled_call_impl = call

        def compile_(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            type(module).compile(module, *args, **kwargs)
            guard(module)

        guard(own)
        # A method bound to the module, so that a copy of the module gets a method bound to the copy.
        own.compile = MethodType(compile_, own)  # type: ignore[method-assign]

    def unwind(self) -> None:
        """Unpins the units of ended calls whose hooks never ran: after Ctrl-C torch calls none. The frame tells whether a call has ended,
        since a module may be called again within its own call."""
        while self._running and self._running[-1].has_ended():
            run = self._running.pop()
            self._end(run.module)
            if not run.is_within:
                self._saving.take_away()
                self._home.unpin(*run.units)

    def _begin(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling():
            return
        self.unwind()
        self._home.check_thread()
        if module in self._calls:
            del self._calls[self._calls.index(module) :]  # Ctrl-C ended that call without its hooks
        if not self._calls:
            self._home.may_train = torch.is_grad_enabled()
        self._calls.append(module)

    def _end(self, module: nn.Module) -> None:
        if self._home.is_of_another_thread():
            return  # the call was refused
        if module in self._calls:
            del self._calls[self._calls.index(module) :]
        if not self._calls:
            self._home.may_train = True

    def _enter(self, module: nn.Module, units: list[Unit], frame: FrameType) -> None:
        self._begin(module)
        around = self._units_around(units)
        if around is not None:
            self._running.append(_Run(module, around, frame, threading.get_ident(), is_within=True))
            return
        pinned: list[Unit] = []
        try:
            for unit in units:
                self._home.pin(unit)
                pinned.append(unit)
            self._saving.on()
        except BaseException:
            self._end(module)
            self._home.unpin(*pinned)
            raise
        self._running.append(_Run(module, units, frame, threading.get_ident()))

    def _units_around(self, units: list[Unit]) -> list[Unit] | None:
        """Returns the units of this thread's current call if they include ``units`` and saved tensors reach these hooks. A nested call then
        needs nothing more."""
        if not self._running or self._running[-1].thread != threading.get_ident():
            return None
        around = self._running[-1].units
        if all(unit in around for unit in units) and self._saving.is_ours(_graph._top_saved_tensors_default_hooks(True)) and self._home.still_uses(units):
            return around
        return None

    def _leave(self, module: nn.Module, output: Any) -> None:
        if not self._running or self._running[-1].module is not module or self._home.is_of_another_thread():
            return  # the call failed before it began
        run = self._running.pop()
        if not run.is_within:
            self._saving.off()
        self._end(module)
        self._home.mark(output)
        if not run.is_within:
            self._home.unpin(*run.units)


def _needed(model: nn.Module, units: list[Unit]) -> Iterator[tuple[nn.Module, list[Unit]]]:
    """Yields the modules whose forward needs units, with these units: units' own modules, and modules with parameters of other units.

    A module that contains other units needs none for itself: its own parameters are fetched at their use."""
    owned: dict[int, list[Unit]] = {}
    for unit in units:
        for member in unit.members:
            for module, _ in member.owners:
                found = owned.setdefault(id(module), [])
                if unit not in found:
                    found.append(unit)
    blocks = {id(unit.module): unit for unit in units if unit.is_block}
    for module in model.modules():
        needed = list(owned.get(id(module), ()))
        block = blocks.get(id(module))
        if block is not None and block not in needed:
            needed.append(block)
        if not needed:
            continue
        inside = {unit for part in module.modules() for unit in owned.get(id(part), ())}
        if block is not None or inside <= set(needed):
            yield module, needed
