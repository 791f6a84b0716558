"""Parameters whose memory may be away. Any use of one past its unit's modules has it fetched.

Such a parameter, and every view that was made of one, is of a subclass that torch asks before any of its functions touches it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longshore._awaited import OF_NO_ELEMENT
from longshore.errors import UsageError

_SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
#: What makes a view of all of it, and needs no memory for that.
_DETACHES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
#: What lends the memory to arrays of others, which would have it when it is away or another's.
_LENDS = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)


class Member(Protocol):
    """What is asked of a :class:`longshore._units.Member` here."""

    name: str


class Home(Protocol):
    """What is asked of a :class:`longshore._residency.Residency` here."""

    def using(self, members: list[Any]) -> AbstractContextManager[None]: ...

    def changed(self, member: Any) -> None: ...

    def mark(self, result: Any) -> None: ...


class _OfUnit:
    """What both classes do. An instance has the attributes ``_longshore_member`` and ``_longshore_home``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_NO_ELEMENT:
                return func(*args, **kwargs)
            if func == _SETS_DATA:
                return _set_data(*args)
            if func in _LENDS:
                return func(_clone_of(args[0]), *args[1:], **kwargs)
            found = list(among((args, kwargs)))
            if func in _DETACHES:
                view = func(*args, **kwargs)
                found[0]._longshore_home.mark(view)
                return view
            homes: list[Home] = []
            for tensor in found:
                if all(tensor._longshore_home is not home for home in homes):
                    homes.append(tensor._longshore_home)
            return _within(homes, found, func, args, kwargs)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        copied = copy_of(self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return copy_of(self).__reduce_ex__(protocol)


class UnitParameter(_OfUnit, nn.Parameter):
    """An ``nn.Parameter`` of a unit, outside its modules."""


class UnitTensor(_OfUnit, Tensor):
    """A view of such a parameter."""


def _within(homes: list[Home], found: list[Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of torch while the units of these are here."""
    if homes:
        with homes[0].using([tensor._longshore_member for tensor in found if tensor._longshore_home is homes[0]]):
            return _within(homes[1:], found, func, args, kwargs)
    before = [tensor._version for tensor in found]
    result = func(*args, **kwargs)
    for tensor, changes in zip(found, before, strict=True):
        if tensor._version != changes:
            tensor._longshore_home.changed(tensor._longshore_member)
    if found:
        found[0]._longshore_home.mark(result)
    return result


def _set_data(tensor: Any, value: Tensor) -> None:
    """``tensor.data = value``, as ``Module.to`` does it. What changes nothing is let through."""
    if value is tensor or value.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        return
    # To torch cpu:0 is another device than cpu, so ``to`` copies. Accelerate asks for it where a launcher started the process.
    if value.device.type == tensor.device.type == "cpu" and value.dtype == tensor.dtype:
        with tensor._longshore_home.using([tensor._longshore_member]):
            if torch.equal(tensor, value):
                return
    member = getattr(tensor, "_longshore_member", None)
    name = member.name if member is not None else "a view of a unit's parameter"
    raise UsageError(
        f"{name} got other memory after shard(): move and cast the model before the optimizer is built, and load weights before shard()"
    )


def _clone_of(tensor: Any) -> Tensor:
    """A plain tensor with memory of its own, where the weights are."""
    with tensor._longshore_home.using([tensor._longshore_member]), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        cloned: Tensor = tensor.detach().clone()
        return cloned.requires_grad_(tensor.requires_grad)


def copy_of(tensor: Any) -> Any:
    """A plain copy in the host's memory."""
    with tensor._longshore_home.using([tensor._longshore_member]), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        copied = tensor.detach().to("cpu", copy=True)
        return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def is_built(tensor: Tensor) -> bool:
    """Whether :class:`longshore.Init` built it, and it is in no unit yet."""
    return isinstance(tensor, UnitParameter) and tensor._longshore_home.is_building  # type: ignore[attr-defined]


def built(tensor: Tensor) -> Tensor | None:
    """The weights of a parameter that :class:`longshore.Init` built, in the memory that they are kept in until it is in a unit. None for
    any other parameter."""
    if not is_built(tensor):
        return None
    kept: Tensor = tensor._longshore_home.kept(tensor._longshore_member)  # type: ignore[attr-defined]
    return kept


def hide(tensor: Tensor, member: Member, home: Home) -> None:
    """From now on each use of it is asked for."""
    tensor._longshore_member, tensor._longshore_home = member, home  # type: ignore[attr-defined]
    tensor.__class__ = UnitParameter if isinstance(tensor, nn.Parameter) else UnitTensor


def show(tensor: Tensor) -> None:
    """The tensor is a plain one again."""
    if isinstance(tensor, _OfUnit):
        tensor.__class__ = type(tensor).__bases__[-1]


def among(given: Any) -> Iterator[Any]:
    """The tensors of units in arguments, and in lists, tuples and dicts among them."""
    if isinstance(given, _OfUnit):
        yield given
    elif isinstance(given, (tuple, list)):
        for item in given:
            yield from among(item)
    elif isinstance(given, dict):
        for item in given.values():
            yield from among(item)
