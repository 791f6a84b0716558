"""Parameters whose first weights servers make: what initialises one is noted instead of done, and it never has memory.

Such a parameter, and what ``.data`` and ``detach()`` return of it, is of a subclass that torch asks before any of its functions
touches it. Functions that fill all of it with a constant or from a distribution are noted. Any other is refused by name.
"""

import contextlib
import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longshore import _units, init
from longshore._awaited import OF_NO_ELEMENT
from longshore._filling import Given
from longshore._host import Place
from longshore._params import Param
from longshore._partition import Piece
from longshore._unit_tensors import UnitParameter, UnitTensor, among
from longshore._weights import on_host
from longshore.errors import UsageError, invalid

#: A parameter that was given other values than one constant before it was registered keeps them, if these are no more.
_MOST_VALUES = 65_536

_IN_TORCH: Any = nn.init


class Record:
    """What is known of a parameter, or of some rows of one."""

    def __init__(self, name: str, of: "Record | None" = None, start: int = 0) -> None:
        self.name = name
        #: The whole parameter's, and the element of that where this one begins.
        self.whole: Record = self if of is None else of.whole
        self.start = start if of is None else of.start + start
        #: None where nothing has initialised it.
        self.initial: init.Init | None = None
        #: The weights of one that is uploaded.
        self.value: Tensor | None = None
        #: It is alone in its unit until the model is cut.
        self.unit = self


class Recording:
    """The parameters that were built within one :class:`longshore.Init`.

    Attributes:
        seed: what random weights depend on.
        peak: the most bytes of weights that were ever in memory.
    """

    #: No server has the weights yet.
    is_building = True

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**64:
            raise invalid("seed", seed, f"in 0..{2**64}", "choose another number")
        self.seed = seed
        self.peak = self._held = 0
        self._records: weakref.WeakSet[Record] = weakref.WeakSet()

    def take(self, name: str, tensor: nn.Parameter) -> None:
        """Notes what a new parameter was filled with, and lets go of its memory."""
        record = Record(name)
        nbytes = tensor.numel() * tensor.element_size()
        self.peak = max(self.peak, self._held + nbytes)
        constant = _constant(tensor)
        if constant is not None:
            record.initial = init.constant(constant)
        elif tensor.numel() <= _MOST_VALUES:
            record.initial, record.value = init.UPLOADED, tensor.detach().clone(memory_format=torch.contiguous_format)
            self._held += nbytes
        self._let_go(tensor, record)

    def rows(self, whole: nn.Parameter, start: int, count: int) -> nn.Parameter:
        """Some rows of a parameter, as one of their own. They have the weights that they would have had in it."""
        of: Record = whole._longshore_member  # type: ignore[attr-defined]
        record = Record(of.name, of, start * math.prod(whole.shape[1:]))
        record.initial = of.initial
        if of.value is not None:
            record.value = of.value[start : start + count].clone()
        rows = nn.Parameter(torch.empty(count, *whole.shape[1:], dtype=whole.dtype, device="cpu"), whole.requires_grad)
        self._let_go(rows, record)
        return rows

    def _let_go(self, tensor: nn.Parameter, record: Record) -> None:
        self._records.add(record)
        _units.own_memory(_units.Member(record.name, tensor, [], None, nbytes=tensor.numel() * tensor.element_size()))
        tensor.untyped_storage().resize_(0)
        _hide(tensor, record, self)

    def note(self, tensor: Any, initial: init.Init) -> None:
        """A parameter is filled so."""
        record = tensor._longshore_member
        if record.value is not None:
            self._held -= record.value.numel() * record.value.element_size()
        record.initial, record.value = initial, None

    def check(self) -> None:
        """Refuses a parameter that nothing has initialised."""
        if any(record.initial is None for record in self._records):
            gc.collect()  # one that the model does not have any more may still wait for this
        for record in self._records:
            if record.initial is None:
                limit = f"initialised by {_FUNCTIONS}, or given no more than {_MOST_VALUES} values"
                raise invalid(record.name, "filled with other values, or with none", limit, _REMEDY, UsageError)

    @contextlib.contextmanager
    def truncating(self) -> Iterator[None]:
        """While this is on, ``trunc_normal_`` is noted as well. It asks no subclass."""
        name = "_no_grad_trunc_normal_"
        theirs = getattr(_IN_TORCH, name, None)
        if theirs is None:  # then what it does is refused step by step
            yield
            return

        def trunc_normal(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
            if not isinstance(tensor, _Recorded):
                filled: Tensor = theirs(tensor, mean, std, a, b, generator=generator)
                return filled
            _refuse_generator(tensor, generator)
            self.note(tensor, init.trunc_normal(mean, std, a, b))
            return tensor

        setattr(_IN_TORCH, name, trunc_normal)
        try:
            yield
        finally:
            setattr(_IN_TORCH, name, theirs)

    # What is asked of whoever has a parameter

    def using(self, members: list[Record]) -> Any:
        raise _refused(members[0], "read")

    saving = staticmethod(contextlib.nullcontext)

    def pin(self, unit: Record, *, alone: bool = False) -> None:
        raise _refused(unit, "read")

    def kept(self, record: Record) -> Tensor:
        """The weights of a parameter that this process has to give: one that is uploaded, or frozen."""
        if record.value is not None:
            return record.value
        raise _refused(record, "frozen, or loaded without weights, and so comes from this process,")


def is_recorded(tensor: Tensor) -> bool:
    """Whether servers make its first weights, or get its few values."""
    return isinstance(tensor, _Recorded)


def rows(parameter: nn.Parameter, start: int, count: int) -> nn.Parameter:
    """Some rows of a parameter that was recorded, as one of their own."""
    home: Recording = parameter._longshore_home  # type: ignore[attr-defined]
    return home.rows(parameter, start, count)


def made(params: list[Param], pieces: list[Piece]) -> tuple[list[Place], list[Tensor], Given]:
    """What fills a new job with parameters of which some were recorded: the places of those pieces that are uploaded, what holds these,
    and for the servers the seed and what each piece is made from. A piece has the weights that it would have in its parameter.

    Args:
        params: the parameters in the optimizer's order.
        pieces: what the job has of them, in its order.

    Raises:
        UsageError: where parameters are of several recordings.
    """
    homes = {id(home): home for param in params if (home := _recording(param.tensor)) is not None}
    recording = next(iter(homes.values()))
    # By parameter of the optimizer what it is made from, and its weights if it is uploaded.
    initial: dict[int, init.Part] = {}
    uploaded: dict[int, Tensor] = {}
    # By parameter: its place in the model as it was built, where one that was cut into rows counts once.
    numbers: dict[Record | int, int] = {}
    for param in params:
        if len(homes) > 1 or (isinstance(param.tensor, UnitParameter) and not is_recorded(param.tensor)):
            limit = "built in the same longshore.Init(on_servers=True) as the others"
            raise invalid(param.name, "built in another one", limit, "build the model in one", UsageError)
        record: Record | None = param.tensor._longshore_member if is_recorded(param.tensor) else None  # type: ignore[attr-defined]
        if record is not None and record.initial is None:
            raise invalid(param.name, "not initialised", f"initialised by {_FUNCTIONS}", _REMEDY, UsageError)
        by = init.UPLOADED if record is None or record.initial is None else record.initial
        number = numbers.setdefault(param.index if record is None else record.whole, len(numbers))
        initial[param.index] = (by.kind, by.numbers, number, 0 if record is None else record.start)
        if by == init.UPLOADED:
            uploaded[param.index] = on_host(param.tensor)
    places: list[Place] = []
    of_pieces: list[init.Part] = []
    for piece in pieces:
        kind, given, number, start = initial[piece.param.index]
        of_pieces.append((kind, given, number, start + piece.start))
        whole = uploaded.get(piece.param.index)
        places.append((piece.index, 0, 0, piece.wire) if whole is None else piece.place(piece.part_of(whole)))
    return places, list(uploaded.values()), (recording.seed, of_pieces)


def _recording(tensor: Tensor) -> Recording | None:
    return tensor._longshore_home if is_recorded(tensor) else None  # type: ignore[attr-defined]


class _Recorded:
    """What both classes do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_NO_ELEMENT:
                return func(*args, **kwargs)
            found: Any = next(among((args, kwargs)))
            if func in _DETACHES:
                view = func(*args, **kwargs)
                _hide(view, found._longshore_member, found._longshore_home)
                return view
            reading = _reading(func)
            target, given, named = _bound(args, kwargs)
            if reading is None or not isinstance(target, _Recorded):
                raise _refused(found._longshore_member, f"touched by {_name(func)}")
            _refuse_generator(target, named.pop("generator", None))
            found._longshore_home.note(target, reading(target, *given, **named))
            return target


class RecordedParameter(_Recorded, UnitParameter, nn.Parameter):
    """An ``nn.Parameter`` that was recorded."""


class RecordedTensor(_Recorded, UnitTensor, Tensor):
    """A view of all of one."""


_DETACHES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


def _reading(func: Any) -> Callable[..., init.Init] | None:
    """What a function is for servers, if it is known."""
    name = getattr(func, "__name__", "")
    return _IN_INIT.get(name) if getattr(_IN_TORCH, name, None) is func else _KNOWN.get(func)


def _bound(args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The tensor that is filled, and the other arguments."""
    if "tensor" in kwargs:
        return kwargs["tensor"], args, {name: value for name, value in kwargs.items() if name != "tensor"}
    return args[0], args[1:], dict(kwargs)


def _normal(_: Tensor, mean: float = 0.0, std: float = 1.0) -> init.Init:
    return init.normal(mean, std)


def _uniform(_: Tensor, *bounds: float, **named: float) -> init.Init:
    low, high = [*bounds, *named.values(), *(0.0, 1.0)[len(bounds) + len(named) :]]
    return init.uniform(low, high) if low != high else init.constant(low)


def _filled(_: Tensor, value: Any) -> init.Init:
    return init.constant(float(value))


def _zero(_: Tensor) -> init.Init:
    return init.zeros()


def _kaiming_uniform(tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> init.Init:
    gain = _IN_TORCH.calculate_gain(nonlinearity, a)
    bound = math.sqrt(3.0) * gain / math.sqrt(_IN_TORCH._calculate_correct_fan(tensor, mode))
    return init.uniform(-bound, bound)


#: What fills a tensor, and what that is for servers. Most functions of ``torch.nn.init`` call these.
_KNOWN: dict[Any, Callable[..., init.Init]] = {
    Tensor.normal_: _normal,
    Tensor.uniform_: _uniform,
    Tensor.fill_: _filled,
    Tensor.zero_: _zero,
}
#: Those of ``torch.nn.init`` that ask a tensor's subclass, by name: others put functions of their own there.
_IN_INIT: dict[str, Callable[..., init.Init]] = {
    "normal_": _normal,
    "uniform_": _uniform,
    "constant_": _filled,
    "kaiming_uniform_": _kaiming_uniform,
}
_FUNCTIONS = "the normal, uniform, trunc_normal, kaiming, xavier, constant, zeros or ones functions of torch.nn.init, on all of it"
_REMEDY = "initialise it so, or build the model without on_servers=True"


def _constant(tensor: Tensor) -> float | None:
    """The one value of all elements, if it is one."""
    flat = tensor.detach().reshape(-1)
    first = flat[:1].float()
    if not torch.isfinite(first) or not all(bool((part == flat[0]).all()) for part in flat.split(_MOST_VALUES)):
        return None
    return float(flat[0])


def _hide(tensor: Any, record: Record, home: Recording) -> None:
    tensor._longshore_member, tensor._longshore_home = record, home
    tensor.__class__ = RecordedParameter if isinstance(tensor, nn.Parameter) else RecordedTensor


def _refuse_generator(tensor: Any, generator: Any) -> None:
    if generator is not None:
        remedy = "leave generator= out: Init's seed= says what servers draw"
        raise invalid(tensor._longshore_member.name, "drawn with generator=", "drawn by servers", remedy, UsageError)


def _refused(record: Record, how: str) -> Exception:
    limit = f"made by servers, and nothing but initialised by {_FUNCTIONS}, until longshore.shard"
    return invalid(record.name, how, limit, _REMEDY, UsageError)


def _name(func: Any) -> str:
    """The function of ``torch.nn.init`` that was called, or else the one that it was asked for."""
    named = torch.overrides.resolve_name(func) or getattr(func, "__name__", repr(func))
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _IN_TORCH.__name__ and not frame.f_code.co_name.startswith("_"):
            named = f"{_IN_TORCH.__name__}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return named
