"""Units: parts of a model whose weights are acquired and released together, and the order of their use.

:func:`members` and :func:`cut` run once in ``longshore.shard``. :class:`Order` learns the order in a step, and predicts the next step by
it.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from longshore.errors import UsageError, invalid
from longshore.transfer.params import DTYPES, Param, Place

#: An item of ``units=``: a module, a class of modules, or a module's name. In a name * stands for any one part
#: ("layers.*").
Named = str | type | nn.Module


@dataclass(eq=False, slots=True)
class Member:
    """A parameter of a unit, whose memory is acquired and released."""

    name: str
    tensor: Tensor
    #: The modules that have the parameter, and its name in each.
    owners: list[tuple[nn.Module, str]]
    #: The parameter in the job; None if frozen.
    param: Param | None
    #: The parameter in the job if it is frozen and servers keep it.
    kept: Param | None = None
    unit: "Unit" = None  # type: ignore[assignment]
    is_here: bool = False
    #: torch's count of writes to the tensor when the weights arrived.
    changes: int = 0
    nbytes: int = 0
    #: The parameter's whole storage, empty while released.
    memory: torch.UntypedStorage = None  # type: ignore[assignment]

    @property
    def is_trained(self) -> bool:
        return self.param is not None


@dataclass(eq=False, slots=True)
class Unit:
    """Parameters that are resident together."""

    name: str
    members: list[Member] = field(default_factory=list)
    #: The module that has the unit's parameters.
    module: nn.Module | None = None
    #: True if the unit has all parameters within its module, also those of the module's children.
    is_block: bool = False
    #: Number of pins: the unit stays resident while there is one.
    pins: int = 0
    #: Number of pins by running modules, during which the parameters are plain tensors.
    runs: int = 0

    @property
    def nbytes(self) -> int:
        return sum(member.nbytes for member in self.members)

    @property
    def gradient_bytes(self) -> int:
        return sum(member.nbytes for member in self.members if member.is_trained)


def members(model: nn.Module, params: Iterable[Param], frozen: Iterable[Param] = ()) -> list[Member]:
    """Returns the model's parameters that are in the job or frozen. Parameters trained by another optimizer stay on their device.

    Args:
        frozen: frozen parameters that servers keep.
    """
    trained = {id(param.tensor): param for param in params}
    kept = {id(param.tensor): param for param in frozen}
    found: dict[int, Member] = {}
    for module_name, module in model.named_modules():
        for name, tensor in module._parameters.items():
            if tensor is None or tensor.numel() == 0:
                continue
            if id(tensor) in found:
                found[id(tensor)].owners.append((module, name))
                continue
            param = trained.get(id(tensor))
            if param is None and tensor.requires_grad:
                continue
            whole = f"{module_name}.{name}" if module_name else name
            nbytes = tensor.numel() * tensor.element_size()
            found[id(tensor)] = Member(whole, tensor, [(module, name)], param, kept.get(id(tensor)), nbytes=nbytes)
    outside = [param.name for param in trained.values() if id(param.tensor) not in found]
    if outside:
        raise invalid(
            outside[0],
            "a parameter of the optimizer, and of no module of the model",
            "both",
            "build the optimizer from model.named_parameters() of the model that is given to shard",
            UsageError,
        )
    return list(found.values())


def cut(model: nn.Module, of_model: list[Member], named: Sequence[Named] | None, room: int | None, copies: int = 1) -> list[Unit]:
    """Cuts the model into units, which together have all its parameters.

    Args:
        named: the units' modules. The default is the model's repeated blocks, cut further if they do not fit.
        room: bytes for a unit's weights and the largest unit's gradients together; None cuts nothing further.
        copies: number of units that have gradients at a time.

    Raises:
        InvalidError: naming the unit that does not fit, and the remedy.
    """
    roots = _named(model, named) if named is not None else _blocks(model)
    while True:
        units = _deal(model, of_model, roots)
        if room is None:
            return units
        largest = max((unit.gradient_bytes for unit in units), default=0)
        reserve = copies * largest
        large = [unit for unit in units if unit.nbytes + reserve > room]
        if not large:
            return units
        large += [unit for unit in units if unit.gradient_bytes == largest]
        smaller = None if named is not None else _cut_further(roots, large)
        if smaller is None:
            raise _too_large(max(units, key=lambda unit: unit.nbytes), reserve, room)
        roots = smaller


def _too_large(unit: Unit, reserve: int, room: int) -> Exception:
    needed = f"raise the budget by {unit.nbytes + reserve - room} bytes"
    if isinstance(unit.module, nn.Linear):
        remedy = f"{needed}, or call longshore.tiled before the optimizer is built, which cuts this layer"
    else:
        remedy = f"name smaller units, or {needed}" if len(unit.members) > 1 else needed
    return invalid(
        "budget",
        f"{room} bytes for units",
        f"at least {unit.nbytes + reserve}: unit {unit.name} has {unit.nbytes} bytes of weights, and gradients take up to {reserve}",
        remedy,
    )


def _deal(model: nn.Module, of_model: list[Member], roots: dict[str, nn.Module]) -> list[Unit]:
    """Returns a unit for each root with parameters, and one for each other module with direct parameters."""
    unit_of_module: dict[int, Unit] = {}
    for name, root in roots.items():
        unit = Unit(name, module=root, is_block=True)
        for module in root.modules():
            unit_of_module.setdefault(id(module), unit)
    names = {id(module): name for name, module in model.named_modules()}
    units: dict[int, Unit] = {}
    for member in of_model:
        owner = member.owners[0][0]
        if id(owner) not in unit_of_module:
            unit_of_module[id(owner)] = Unit(names[id(owner)] or "(model)", module=owner)
        unit = unit_of_module[id(owner)]
        unit.members.append(member)
        units[id(unit)] = unit
        member.unit = unit
    return list(units.values())


def _cut_further(roots: dict[str, nn.Module], large: list[Unit]) -> dict[str, nn.Module] | None:
    """Returns roots in which the large units are replaced by their children; None if nothing can be cut."""
    names = {unit.name for unit in large}
    smaller: dict[str, nn.Module] = {}
    for name, root in roots.items():
        if name not in names:
            smaller[name] = root
            continue
        smaller |= {f"{name}.{child}": module for child, module in root.named_children() if _has_parameters(module)}
    # A root is replaced by its children. Parameters that belong to the root directly become a unit of their own.
    return smaller if smaller.keys() != roots.keys() else None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks that a Hugging Face model names, or else the items of the outermost lists of modules."""
    classes = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found = {name: module for name, module in model.named_modules() if name and type(_inner(module)).__name__ in classes}
    if not found:
        found = dict(_in_lists(model, ""))
    return {
        name: module
        for name, module in found.items()
        if not any(name.startswith(other + ".") for other in found if other != name)
    }


def _inner(module: nn.Module) -> nn.Module:
    """Returns the module inside a torch.compile wrapper, or the module itself."""
    return getattr(module, "_orig_mod", module)


def _in_lists(module: nn.Module, lead: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and _has_parameters(child):
            yield lead + name, child
        else:
            yield from _in_lists(child, f"{lead}{name}.")


def _named(model: nn.Module, named: Sequence[Named]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for item in named:
        hits = {name: module for name, module in modules.items() if _is_meant(item, name, module)}
        if not hits:
            shown = repr(item) if isinstance(item, str) else getattr(item, "__name__", type(item).__name__)
            raise invalid("units", shown, "a module of the model", "print(model) shows its modules' names and classes")
        found |= hits
    for name, module in found.items():
        inside = [other for other, part in found.items() if part is not module and any(part is m for m in module.modules())]
        if inside:
            raise invalid("units", f"{name} and {inside[0]}", "apart", f"the one has the other in it: leave out {name} or {inside[0]}")
    return found


def _is_meant(item: Named, name: str, module: nn.Module) -> bool:
    if isinstance(item, str):
        return re.fullmatch(re.escape(item).replace(r"\*", r"[^.]+"), name) is not None
    if isinstance(item, type):
        return isinstance(_inner(module), item)
    return module is item


_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def budget(given: int | str) -> int:
    """Returns bytes for a number or a text such as ``"6GiB"``."""
    if isinstance(given, str):
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([KMGT]I?)?B?", given.strip().upper())
        if match is None:
            raise invalid("budget", repr(given), "a number of bytes", 'write it as "6GiB", "500MB" or a number')
        room = int(float(match[1]) * _FACTORS[match[2] or ""])
    else:
        room = int(given)
    if room <= 0:
        raise invalid("budget", repr(given), "above 0", "say how many bytes weights and gradients may take")
    return room


def own_memory(member: Member) -> None:
    """Gives a parameter a resizable storage of its own."""
    tensor = member.tensor
    storage = tensor.untyped_storage()
    is_own = storage.nbytes() == member.nbytes and storage.resizable() and tensor.storage_offset() == 0 and not tensor.is_shared()
    if is_own and not tensor.is_neg():
        return
    with torch.no_grad():
        tensor.data = tensor.detach().clone()
    if tensor.untyped_storage().nbytes() != member.nbytes:
        tensor.data = tensor.detach().contiguous().clone(memory_format=torch.contiguous_format)


#: A run of a parameter's elements in the job: the job's parameter, the run's first element in it, and its length.
Span = tuple[int, int, int]
#: Returns the spans of a parameter's elements, from a first element on, for a number of elements.
Spans = Callable[[Param, int, int], Iterable[Span]]


def in_one_piece(param: Param, start: int, elements: int) -> Iterable[Span]:
    """Returns the span of elements of a parameter that the job has whole."""
    return [(param.index, start, elements)]


def places_of(spans: Spans, member: Member, memory: Tensor, start: int) -> list[tuple[Place, int]]:
    """Returns places in ``memory`` for a member's elements from ``start`` on, each with its first element in the job's parameter. The
    memory has no gaps. A frozen member is one run in the job."""
    address, wire, size, found = memory.data_ptr(), DTYPES[memory.dtype], memory.element_size(), []
    if member.param is not None:
        of_job = spans(member.param, start, memory.numel())
    else:
        assert member.kept is not None
        of_job = in_one_piece(member.kept, start, memory.numel())
    for index, first, elements in of_job:
        found.append(((index, address, elements, wire), first))
        address += elements * size
    return found


#: Distance of a unit without a known next use, larger than any other.
_NEVER = 1 << 40


class Order:
    """The order of uses that the previous step has taught, and the current step's position in it."""

    def __init__(self) -> None:
        self._learned: list[Unit] = []
        self._places: dict[Unit, list[int]] = {}
        self._seen: list[Unit] = []
        self._at = -1
        #: The step's position before a run of uses that do not count, to which the next counted use returns. None after
        #: a use that counts.
        self._was_at: int | None = None
        #: The last used unit, and whether its use counted.
        self._last: tuple[Unit, bool] | None = None
        #: Value of `_clock`, the number of uses so far, at each unit's last use.
        self._used: dict[Unit, int] = {}
        self._clock = 0

    def note(self, unit: Unit, *, counts: bool) -> bool:
        """Notes a use of a unit. A use that does not count, as in an evaluation, is not learned and does not move the step.

        Returns:
            True if the previous use was of another unit. Several modules of a unit run one after the other.
        """
        self._clock += 1
        self._used[unit] = self._clock
        if self._last == (unit, counts):
            return False
        self._last = unit, counts
        if not counts and self._was_at is None:
            self._was_at = self._at
        elif counts and self._was_at is not None:
            self._at, self._was_at = self._was_at, None
        if counts and self._seen and self._seen[-1] is unit:
            return True
        if counts:
            self._seen.append(unit)
        places = self._places.get(unit, ())
        after = bisect_right(places, self._at)
        if after < len(places):
            self._at = places[after]
        elif places:
            # The unit is used again after its last place in the order, as in one more micro-step than the previous step
            # had.
            self._at = places[0]
        return True

    def end(self) -> None:
        """Ends a step: its uses become the learned order."""
        if self._seen:
            self._learned, self._seen = self._seen, []
            self._places = {}
            for place, unit in enumerate(self._learned):
                self._places.setdefault(unit, []).append(place)
        self._at, self._was_at, self._last = -1, None, None

    def distance(self, unit: Unit) -> int:
        """Returns the number of other uses before the unit's next one. Among units with no further use in this step, the last used one is
        nearest."""
        places = self._places.get(unit, ())
        after = bisect_right(places, self._at)
        if after < len(places):
            return places[after] - self._at
        return _NEVER + self._clock - self._used.get(unit, 0)

    def upcoming(self, most: int) -> Iterator[Unit]:
        """Yields the next units in the learned order, at most ``most``."""
        yield from self._learned[self._at + 1 : self._at + 1 + most]
