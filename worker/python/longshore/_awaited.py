"""Parameters whose newest weights have been asked for and not been read. The first use of one reads them.

Until then the parameter is of a subclass that torch asks before any of its functions touches it. So whatever uses a
parameter gets the newest weights: its module's forward, another module's, ``state_dict``, ``copy.deepcopy``, printing.
What reaches its memory past torch's functions does not: see :func:`longshore._weights.Weights.is_awaited`.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# What reads the weights of an awaited parameter, by its id.
_readers: dict[int, Callable[[], None]] = {}
# Whether torch's compiler leaves awaited tensors alone.
_is_kept_out = False

_LOOKED_AT = (
    "shape grad requires_grad dtype device is_leaf grad_fn layout ndim names output_nr itemsize nbytes is_cpu is_cuda is_xpu is_mps "
    "is_meta is_sparse is_quantized is_nested _version _backward_hooks _base"
).split()
_ASKED = (
    "size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex get_device storage_offset "
    "requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __hash__ __len__"
).split()


def _of_no_element() -> Iterator[Any]:
    """The functions of torch that look at a tensor and at none of its elements, as far as this torch has them."""
    for name in _LOOKED_AT:
        if hasattr(Tensor, name):
            yield getattr(Tensor, name).__get__
    for name in ("grad", "requires_grad"):
        yield getattr(Tensor, name).__set__
    yield Tensor.grad.__delete__
    for name in _ASKED:
        yield getattr(Tensor, name)


#: The functions of torch that need no weights.
OF_NO_ELEMENT = frozenset(_of_no_element())


class _Awaited:
    """What both classes of awaited parameters do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_NO_ELEMENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = list(_among((args, kwargs)))
        if not found:  # it lies in a container that is not looked into
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
    """Whether its use can be noticed: subclasses of other libraries have ways of their own."""
    return type(tensor) in _KINDS


def is_awaited(tensor: Tensor) -> bool:
    """Whether a tensor's elements are still to be read."""
    return id(tensor) in _readers


def begin(tensors: Sequence[Tensor], reader: Callable[[], None]) -> None:
    """From now on ``reader`` is called before the elements of one of these are used. It calls :func:`end`."""
    _keep_compilers_out()
    _readers.update(dict.fromkeys(map(id, tensors), reader))
    for tensor in tensors:
        tensor.__class__ = _KINDS[type(tensor)]


def _keep_compilers_out() -> None:
    """``torch.compile`` would compile what is done at the use of an awaited tensor, without its weights coming. torch's compiler is slow to
    import, so it is told only where it was."""
    global _is_kept_out
    if not _is_kept_out and "torch._dynamo.eval_frame" in sys.modules:
        ask: Any = vars(_Awaited)["__torch_function__"]
        _Awaited.__torch_function__ = classmethod(torch.compiler.disable(ask.__func__))  # type: ignore[method-assign,assignment]
        _is_kept_out = True


def end(tensors: Sequence[Tensor]) -> None:
    """These have their weights."""
    for tensor in tensors:
        tensor.__class__ = _PLAIN.get(type(tensor), type(tensor))
        _readers.pop(id(tensor), None)


def read(tensor: Any) -> None:
    """Has an awaited tensor read its weights."""
    reader = _readers.get(id(tensor))
    if reader is not None:
        reader()


def read_all() -> None:
    """Has all awaited tensors read their weights."""
    for reader in list(_readers.values()):
        reader()


def _among(given: Any) -> Iterator[Any]:
    """The awaited tensors in arguments, and in lists, tuples and dicts among them."""
    if isinstance(given, _Awaited):
        yield given
    elif isinstance(given, (tuple, list)):
        for item in given:
            yield from _among(item)
    elif isinstance(given, dict):
        for item in given.values():
            yield from _among(item)
