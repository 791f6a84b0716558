"""Parameters without resident memory. Any use of one fetches its weights first.

Awaited parameters have newer weights under way, which the first use reads. Parameters of a unit may have no memory
while none of their modules runs. Both are tensor subclasses: torch calls them before any of its functions touches their
memory. Examples are a forward, ``state_dict``, ``copy.deepcopy`` and printing. Code that reaches the memory past
torch's functions is not noticed: see :class:`longshore.transfer.weights.Weights`.
"""

import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from longshore.errors import LongshoreError, UsageError, invalid
from longshore.transfer import device

# The function that reads an awaited parameter's weights, by the parameter's id.
_readers: dict[int, Callable[[], None]] = {}
# True once torch's compiler has been told not to compile uses of awaited tensors.
_is_kept_out = False

_LOOKED_AT = (
    "shape grad requires_grad dtype device is_leaf grad_fn layout ndim names output_nr itemsize nbytes is_cpu is_cuda is_xpu is_mps "
    "is_meta is_sparse is_quantized is_nested _version _backward_hooks _base"
).split()
_ASKED = (
    "size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex get_device storage_offset "
    "requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __hash__ __len__"
).split()


#: Functions of torch that read no weights of an awaited or released parameter. This torch may lack some getters.
OF_NO_ELEMENT = frozenset(
    [getattr(Tensor, name).__get__ for name in _LOOKED_AT if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _ASKED]
    + [Tensor.grad.__set__, Tensor.grad.__delete__, Tensor.requires_grad.__set__]  # type: ignore[union-attr,attr-defined]
)


class _Awaited:
    """Common part of both classes of awaited parameters."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_NO_ELEMENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = list(_among((args, kwargs), _Awaited))
        if not found:  # an unknown container hides the tensor, so all are read
            read_all()
        for tensor in found:
            read(tensor)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        read(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        read(self)
        return self.__reduce_ex__(protocol)


class AwaitedParameter(_Awaited, nn.Parameter):
    """An ``nn.Parameter`` that is awaited."""


class AwaitedTensor(_Awaited, Tensor):
    """A plain tensor that is trained and awaited."""


_KINDS: dict[type, type] = {nn.Parameter: AwaitedParameter, Tensor: AwaitedTensor}
_PLAIN = {awaited: plain for plain, awaited in _KINDS.items()}


def can_await(tensor: Tensor) -> bool:
    """Returns whether the tensor's use can be noticed. Subclasses of other libraries have a ``__torch_function__`` of their own."""
    return type(tensor) in _KINDS


def can_await_all(tensors: Sequence[Tensor]) -> bool:
    """Returns whether the use of each tensor can be noticed."""
    return _KINDS.keys() >= set(map(type, tensors))


def begin(tensors: Sequence[Tensor], reader: Callable[[], None]) -> None:
    """Makes the tensors awaited: ``reader`` is called before the first use of their elements, and calls :func:`end`."""
    _keep_compilers_out()
    _readers.update(dict.fromkeys(map(id, tensors), reader))
    for tensor, awaited in zip(tensors, map(_KINDS.__getitem__, map(type, tensors)), strict=True):
        tensor.__class__ = awaited


def _keep_compilers_out() -> None:
    """Disables ``torch.compile`` for ``__torch_function__``: a compiled use of an awaited tensor would not read its weights. The compiler
    is slow to import, so only an imported one is told."""
    global _is_kept_out
    if not _is_kept_out and "torch._dynamo.eval_frame" in sys.modules:
        ask: Any = vars(_Awaited)["__torch_function__"]
        _Awaited.__torch_function__ = classmethod(torch.compiler.disable(ask.__func__))  # type: ignore[method-assign,assignment]
        _is_kept_out = True


def end(tensors: Sequence[Tensor]) -> None:
    """Makes tensors plain again once they have their weights."""
    for tensor, plain in zip(tensors, map(_PLAIN.get, map(type, tensors)), strict=True):
        if plain is not None:
            tensor.__class__ = plain
    for known in map(id, tensors):
        _readers.pop(known, None)


def read(tensor: Any) -> None:
    """Reads the weights of a tensor, if it is awaited."""
    reader = _readers.get(id(tensor))
    if reader is not None:
        reader()


def read_all() -> None:
    """Reads the weights of all awaited tensors."""
    for reader in list(_readers.values()):
        reader()


def _before_fork() -> None:
    """Reads awaited weights before a fork, which has no connection to read them. If the read fails, the error that the
    fork's use of a parameter raises names the remedy."""
    with contextlib.suppress(LongshoreError):
        read_all()


os.register_at_fork(before=_before_fork)


def _among(given: Any, kind: type) -> Iterator[Any]:
    """Yields the tensors of a kind in arguments, and in lists, tuples and dicts among them."""
    if isinstance(given, kind):
        yield given
    elif isinstance(given, (tuple, list)):
        for item in given:
            yield from _among(item, kind)
    elif isinstance(given, dict):
        yield from _among(list(given.values()), kind)


_SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
#: Functions that return a view of the whole tensor, and work while the tensor's memory is released.
_DETACHES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
#: Functions that give a tensor's memory to an array of another library. A unit's parameter gives a copy: its own memory
#: may go to other weights while the array lives.
_LENDS = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)


#: Functions that run a backward pass. The call itself fetches no unit, since each node fetches the units that it needs.
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


#: A :class:`longshore.units.model.Member` and a :class:`longshore.units.residency.Residency`, whose modules import this one.
Member = Any
Home = Any


class _OfUnit:
    """Common part of both classes of units' parameters. An instance has the attributes ``_longshore_member`` and ``_longshore_home``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            return _run_backward(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_NO_ELEMENT:
                return func(*args, **kwargs)
            if func == _SETS_DATA or (func == Tensor.set_ and len(args) == 2 and isinstance(args[1], Tensor)):
                _set_data(*args)
                return args[0]
            if func in _LENDS:
                return func(_clone_of(args[0]), *args[1:], **kwargs)
            found = list(_among((args, kwargs), _OfUnit))
            if func in _DETACHES:
                view = func(*args, **kwargs)
                found[0]._longshore_home.mark(view)
                return view
            homes: list[Home] = []
            for tensor in found:
                if all(tensor._longshore_home is not home for home in homes):
                    homes.append(tensor._longshore_home)
            return _within(homes, found, func, args, kwargs)

    # torch calls no ``__torch_function__`` for ``as_subclass`` and ``share_memory_``, so both are overridden.
    def as_subclass(self: Any, cls: Any) -> Any:
        if cls is Tensor:
            return self.view_as(self)
        raise _refused(self, f"of {cls.__name__}", "a plain Tensor", "call .clone() on it first")

    def share_memory_(self: Any) -> Any:
        raise _refused(self, "given shared memory", "in memory of this process", "share the tensors of state_dict() instead")

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        copied = copy_of(self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return copy_of(self).__reduce_ex__(protocol)


def _refused(tensor: Any, act: str, limit: str, remedy: str) -> LongshoreError:
    """Returns the error for an act that is refused, since later uses of the unit's memory would go unnoticed."""
    return invalid(tensor._longshore_member.name, act, f"{limit} while its model is in units", remedy, UsageError)


def parameter_of(data: Any) -> Any:
    """Returns data for a new parameter. Data of a unit are copied, since a unit's memory cannot belong to a second
    parameter."""
    return _clone_of(data).detach() if isinstance(data, _OfUnit) else data


class UnitParameter(_OfUnit, nn.Parameter):
    """An ``nn.Parameter`` of a unit, outside its modules."""


class UnitTensor(_OfUnit, Tensor):
    """A view of a unit's parameter."""


def _run_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a backward pass that is given weights of units, with the weights' edges in the graph in their place. So the
    call needs no unit, and torch still calls ``__torch_function__`` for hooks, which may use any unit."""
    is_grad = func is torch.autograd.grad
    inputs = args[1] if is_grad else kwargs.pop("inputs", None)
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in () if is_grad else _among(inputs, _OfUnit):
            tensor.retain_grad()  # torch does so for tensors, and not for edges
        outputs, edges = _edges_of(args[0]), _edges_of(inputs)
    if not is_grad:
        kwargs.setdefault("grad_tensors", kwargs.pop("gradient", None))
        return torch.autograd.backward(outputs, inputs=edges, **kwargs)
    has_zeros = kwargs.pop("materialize_grads", False)  # torch makes no zeros for edges
    found = func(outputs, edges, **kwargs)
    if not has_zeros:
        return found
    zeros = functools.partial(torch.zeros_like, requires_grad=kwargs["create_graph"])
    return tuple(zeros(tensor) if gradient is None else gradient for gradient, tensor in zip(found, inputs, strict=True))


def is_in_backward() -> bool:
    """Returns whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _edges_of(given: Any) -> Any:
    if isinstance(given, (tuple, list)):
        return tuple(map(_edges_of, given))
    if not isinstance(given, _OfUnit):
        return given
    # A tensor without an edge passes as a tensor, so that torch refuses it in its own words.
    return get_gradient_edge(given) if given.requires_grad else given.detach()  # type: ignore[attr-defined,arg-type]


def _within(homes: list[Home], found: list[Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of torch while the units of ``found`` are resident."""
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
    """Handles ``tensor.data = value`` and ``tensor.set_(value)``, as ``Module.to`` and parametrizations do it. An assignment that changes
    nothing passes, and a model that is being built takes the values."""
    if value is tensor or value.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        return
    if is_built(tensor) and (value.shape, value.dtype, value.device) == (tensor.shape, tensor.dtype, tensor.device):
        found = list(_among((tensor, value), _OfUnit))
        with torch.no_grad():
            _within(list(dict.fromkeys(one._longshore_home for one in found)), found, Tensor.copy_, (tensor, value), {})
        return
    # An equal copy passes. ``to("cpu:0")`` makes one, since torch tells cpu:0 from cpu, and Accelerate calls that in
    # processes started by a launcher.
    if value.device.type == tensor.device.type == "cpu" and value.dtype == tensor.dtype:
        with tensor._longshore_home.using([tensor._longshore_member]):
            if torch.equal(tensor, value):
                return
    member = getattr(tensor, "_longshore_member", None)
    name = member.name if member is not None else "a view of a unit's parameter"
    if is_built(tensor):
        raise UsageError(
            f"{name} got memory of another shape, type or device within longshore.Init: assign a new nn.Parameter to its module instead, or build "
            "the module with longshore.Init(dtype=)"
        )
    raise UsageError(
        f"{name} got other memory after shard(): move and cast the model before the optimizer is built, and load weights before shard()"
    )


def _clone_of(tensor: Any) -> Tensor:
    with tensor._longshore_home.using([tensor._longshore_member]), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        cloned: Tensor = tensor.detach().clone()
        return cloned.requires_grad_(tensor.requires_grad)


def copy_of(tensor: Any) -> Any:
    """Returns a plain copy in the host's memory."""
    with tensor._longshore_home.using([tensor._longshore_member]), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        copied = tensor.detach().to("cpu", copy=True)
        return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def is_built(tensor: Tensor) -> bool:
    """Returns whether :class:`longshore.Init` built the tensor, and no unit has it yet."""
    return isinstance(tensor, UnitParameter) and tensor._longshore_home.is_building  # type: ignore[attr-defined]


def built(tensor: Tensor) -> Tensor | None:
    """Returns the weights of a parameter built by :class:`longshore.Init`, in the memory that keeps them until a unit has it. None for any
    other parameter."""
    if not is_built(tensor):
        return None
    kept: Tensor = tensor._longshore_home.kept(tensor._longshore_member)  # type: ignore[attr-defined]
    return kept


def on_host(tensor: Tensor) -> Tensor:
    """Returns a tensor's values end to end in the host's memory: its own memory if it has that form, or the memory of ``Init``."""
    kept = built(tensor)
    memory = tensor.detach() if kept is None else kept
    if device.accelerator.has(memory):
        memory = device.accelerator.to_host(memory)
    return memory.contiguous().resolve_neg()


def hide(tensor: Tensor, member: Member, home: Home) -> None:
    """Makes the tensor a unit's: each later use fetches its unit."""
    tensor._longshore_member, tensor._longshore_home = member, home  # type: ignore[attr-defined]
    tensor.__class__ = UnitParameter if isinstance(tensor, nn.Parameter) else UnitTensor


def show(tensor: Tensor) -> None:
    """Makes the tensor plain again."""
    if isinstance(tensor, _OfUnit):
        tensor.__class__ = type(tensor).__bases__[-1]
