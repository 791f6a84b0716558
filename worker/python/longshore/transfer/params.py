"""The parameters of a job: the tensors of torch's param groups, checked, named and numbered; and pieces of them that ranks send."""

import gc
import hashlib
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from longshore.errors import GradientError, MissingGradientError, StateError, UsageError, invalid
from longshore.transfer import device

#: Host memory of a gradient or of weights, as the Rust half takes it: the parameter's index in the job, address, number
#: of elements, and name of the type.
Place = tuple[int, int, int, str]

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def dtype_of(wire: str) -> torch.dtype:
    """Returns the type for a name of the Rust half, for example ``torch.bfloat16`` for ``"bf16"``."""
    return next(dtype for dtype, name in DTYPES.items() if name == wire)


@dataclass(frozen=True, slots=True, eq=False)
class Param:
    """A parameter of the job, at its place in the job's order."""

    index: int
    name: str
    group: int
    tensor: Tensor
    shape: torch.Size
    dtype: torch.dtype
    #: The type's name for the Rust half.
    wire: str
    elements: int

    def place(self, memory: Tensor) -> Place:
        """Returns the parameter's place in contiguous memory of the host, for the Rust half."""
        return self.index, memory.data_ptr(), self.elements, DTYPES[memory.dtype]


#: A piece's place in its parameter: the first index and the end index of each dimension.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter that one rank sends. The job has it as a parameter, at its place in the job's order."""

    index: int
    name: str
    param: Param
    rank: int
    shape: tuple[int, ...]
    #: Index of the piece's first element in the parameter, and its number of elements.
    start: int
    elements: int
    #: Index of the piece's first element in the sending rank's part of the bucket.
    offset: int
    #: The piece's place in the parameter if its elements are not consecutive there, for example columns of a matrix.
    box: Box | None = None
    #: All ranks that hold the piece, in ascending order. Empty if only ``rank`` holds it.
    replicas: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        return self.param.group

    @property
    def wire(self) -> str:
        return self.param.wire

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks whose model has the piece."""
        return self.replicas or (self.rank,)

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns the piece's elements as a view of a contiguous tensor of the parameter's shape."""
        if self.box is None:
            return whole.view(-1)[self.start : self.start + self.elements]
        return whole[tuple(slice(first, end) for first, end in self.box)]

    def place(self, part: Tensor) -> Place:
        """Returns the place of the piece's elements, which lie end to end in a CPU tensor."""
        return (self.index, part.data_ptr(), self.elements, DTYPES[part.dtype])


_dtype, _shape = Tensor.dtype.__get__, Tensor.shape.__get__  # type: ignore[attr-defined]
#: torch's getter of ``.grad``. ``map`` calls it for many tensors without the interpreter between them.
grad_of = Tensor.grad.__get__  # type: ignore[union-attr]


class Columns:
    """Parameters whose tensors are read together: ``map`` runs torch's getters for all of them without the interpreter
    between tensors."""

    def __init__(self, params: list[Param]) -> None:
        self.params = params
        self.tensors = [param.tensor for param in params]
        self._shapes = [param.shape for param in params]
        self._dtypes = [param.dtype for param in params]
        self._fixed = [param.index for param in params], [param.elements for param in params], [param.wire for param in params]
        self.indices = frozenset(self._fixed[0])
        #: The addresses and places of the tensors of the last call of :meth:`places`.
        self._addresses: list[int] = []
        self._places: list[Place] = []

    def gradients(self) -> list[Tensor | None]:
        """Returns the gradients in ``.grad``."""
        return list(map(grad_of, self.tensors))

    def places(self, tensors: Sequence[Any]) -> list[Place] | None:
        """Returns the places of tensors of the parameters' shapes and types. None if some differ, or have memory that the Rust half cannot
        use."""
        try:
            addresses = list(map(Tensor.data_ptr, tensors))
            is_usable = all(map(Tensor.is_contiguous, tensors)) and not any(map(Tensor.is_neg, tensors))
        except RuntimeError:  # a sparse tensor
            return None
        if not is_usable or list(map(_dtype, tensors)) != self._dtypes or list(map(_shape, tensors)) != self._shapes:
            return None
        if addresses != self._addresses:
            if device.has_any(tensors):
                return None
            indices, elements, wires = self._fixed
            self._addresses, self._places = addresses, list(zip(indices, addresses, elements, wires, strict=True))
        return self._places


#: Names of parameters that a framework's adapter has learned, since the framework gives its optimizer none.
_NAMES = WeakTensorKeyDictionary()


def learn_names(named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Stores names for parameters of later optimizers that are given none."""
    for name, tensor in named_parameters:
        _NAMES[tensor] = name


def name_of(group: dict[str, Any], group_index: int, index: int) -> str:
    """Returns a parameter's name in the model, or its place if no name is known."""
    names = group.get("param_names")
    return names[index] if names and index < len(names) else _NAMES.get(group["params"][index], f"group{group_index}.param{index}")


def is_place(name: str) -> bool:
    """Returns whether a name is a place, for example ``group0.param3``."""
    return re.fullmatch(r"group\d+\.param\d+", name) is not None


def named(groups: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters of the groups with their names."""
    for group_index, group in enumerate(groups):
        for index, tensor in enumerate(group["params"]):
            yield name_of(group, group_index, index), tensor


def check_group(groups: list[dict[str, Any]], added: list[Any], *, later: bool) -> None:
    """Refuses a group with a parameter of another group, or with a parameter that no server can keep. For the first, torch's own error
    names no parameter. ``later`` is as in :func:`table`."""
    known = {id(tensor): name for name, tensor in named(groups)}
    for index, item in enumerate(added):
        name, tensor = item if isinstance(item, tuple) else (f"group{len(groups)}.param{index}", item)
        if not isinstance(tensor, Tensor):
            continue
        if id(tensor) in known:
            # The message begins with torch's words, for which callers search.
            raise invalid(
                f"some parameters appear in more than one parameter group: {name}",
                f"in a second group, as {known[id(tensor)]} before",
                "in one",
                "tied weights are one parameter: leave it out of one group",
            )
        if tensor.requires_grad or later:
            check(str(name), tensor)


def check(name: str, tensor: Tensor) -> None:
    """Refuses a parameter that no server can keep."""
    if tensor.is_meta:
        remedy = "give the model memory with to_empty(), initialise or load it, and build the optimizer after that"
        raise invalid(name, "on the meta device", "on a device with memory", remedy)
    if tensor.is_complex():
        raise invalid(
            name,
            tensor.dtype,
            "real",
            "servers keep real numbers: optimize torch.view_as_real of it, or leave it to another optimizer",
        )
    if tensor.layout is not torch.strided:
        raise invalid(name, tensor.layout, "dense", "make it dense, or leave it to another optimizer")
    if tensor.dtype not in DTYPES:
        raise invalid(name, tensor.dtype, "fp32, bf16 or fp16", "convert the model, or leave it to another optimizer")


def check_tensor(name: str, found: Any, shape: torch.Size, where: str, *, described: bool = False) -> None:
    """Refuses a value that cannot be a parameter's weights or moments. A tensor that is only ``described`` has no memory."""
    limit = f"a tensor of {list(shape)}"
    if not isinstance(found, Tensor):
        value = "absent" if found is None else type(found).__name__
        remedy = f"{where} lacks it: take one of this model, or start from its weights alone"
        raise invalid(name, value, limit, remedy, StateError)
    if is_sharded(found):
        remedy = "gather it: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict with full_state_dict=True"
        raise invalid(name, "a DTensor", "a whole tensor", remedy, StateError)
    if found.dtype not in DTYPES or found.layout is not torch.strided:
        limit = "dense, of fp32, bf16 or fp16"
        raise invalid(name, f"{found.dtype}, {found.layout}", limit, "convert it with .float() or .to_dense()", StateError)
    if found.shape != shape:
        raise invalid(name, f"of {list(found.shape)}", f"of {list(shape)}, as the parameter", f"{where} is of another model", StateError)
    if found.device.type == "meta" and not described:
        raise invalid(name, "on the meta device", "somewhere with memory", "load the tensors, not their shapes alone", StateError)


def table(groups: list[dict[str, Any]], *, later: bool = False) -> list[Param]:
    """Returns the parameters that train, in the order of the groups. Empty and frozen ones are left to the framework.

    Args:
        later: whether frozen parameters are included, which train once they are unfrozen.

    Raises:
        InvalidError: for two parameters over one memory, or if nothing trains.
    """
    params = _table(groups, which=(True, False) if later else (True,), first=0)
    if not params:
        remedy = "set requires_grad on what shall train, or pass frozen='train-later' if that comes during the job"
        raise invalid("params", "all frozen or empty", "at least one that trains", remedy)
    return params


def frozen_table(groups: list[dict[str, Any]], trained: list[Param]) -> list[Param]:
    """Returns the frozen parameters, which come last in a job that keeps them.

    Raises:
        InvalidError: for two parameters over one memory, or for a name that a trained parameter has.
    """
    frozen = _table(groups, which=(False,), first=len(trained))
    names = {param.name for param in trained}
    for param in frozen:
        if param.name in names:
            raise _named_twice(param.name)
    return frozen


def _named_twice(name: str) -> Exception:
    remedy = "pass model.named_parameters(), and those of several models each with a prefix, for example critic.named_parameters('critic')"
    return invalid(name, "the name of two parameters", "of one", remedy)


def _table(groups: list[dict[str, Any]], *, which: tuple[bool, ...], first: int) -> list[Param]:
    """Returns the parameters whose ``requires_grad`` is in ``which``, numbered from ``first`` on."""
    params: list[Param] = []
    seen: dict[tuple[int, int], tuple[str, Tensor]] = {}
    names: set[str] = set()
    for group_index, group in enumerate(groups):
        for index, tensor in enumerate(group["params"]):
            if tensor.requires_grad not in which or tensor.numel() == 0:
                continue
            name = name_of(group, group_index, index)
            check(name, tensor)
            memory = _memory(tensor)
            if memory in seen and memory[1]:
                if tensor is seen[memory][1]:
                    remedy = "leave one of them out: tied weights are one parameter"
                    raise invalid(name, f"given twice in one group, as {seen[memory][0]} before", "given once", remedy)
                limit = f"memory of its own, and shares it with {seen[memory][0]}"
                raise invalid(name, "tied", limit, "tie weights by assigning one Parameter to both modules")
            if name in names:
                raise _named_twice(name)
            seen[memory] = name, tensor
            names.add(name)
            place, wire = first + len(params), DTYPES[tensor.dtype]
            params.append(Param(place, name, group_index, tensor, tensor.shape, tensor.dtype, wire, tensor.numel()))
    return params


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether the tensor is a DTensor, of any placement."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and absent without FSDP
    return module is not None and isinstance(tensor, module.DTensor)


def _memory(tensor: Any) -> tuple[int, int]:
    """Returns the address and number of the tensor's elements, or its local shard's."""
    if is_sharded(tensor):
        tensor = tensor.detach().to_local()
    if hasattr(tensor, "_longshore_member"):
        return (id(tensor), 0)  # its memory was checked when its model was cut into units, and may be released
    return (tensor.data_ptr(), tensor.numel())


def fingerprint(rule: str, params: Iterable[Param]) -> str:
    """Returns a hash that differs between models and is equal in every process."""
    digest = hashlib.sha256(rule.encode())
    for param in params:
        digest.update(f"{param.name}\0{tuple(param.shape)}\0{param.group}\n".encode())
    return digest.hexdigest()[:32]


def check_unchanged(params: list[Param], frozen: list[tuple[str, Tensor]]) -> None:
    """Refuses parameters whose shape, type or frozen state changed after the job was opened."""
    for param in params:
        tensor = param.tensor
        if tensor.shape != param.shape or tensor.dtype is not param.dtype:
            raise invalid(
                param.name,
                f"{DTYPES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}",
                f"{DTYPES[param.dtype]} {list(param.shape)}, as when the job was opened",
                "build the optimizer after the model is whole, with another job for the changed model",
                UsageError,
            )
    for name, tensor in frozen:
        if tensor.grad is not None:
            raise invalid(
                name,
                "trained now",
                "frozen, as when the job was opened",
                "unfreeze it before the first step, or build a new optimizer, with frozen='train-later' for what is unfrozen between two steps",
                UsageError,
            )


def check_gradient(param: Param, gradient: Tensor) -> None:
    """Refuses a gradient of another type, layout or shape than its parameter, for example after the model was changed."""
    if gradient.dtype is param.dtype and gradient.layout is torch.strided and gradient.shape == param.shape:
        return
    check_unchanged([param], [])
    if gradient.layout is not torch.strided:
        raise invalid(
            f"{param.name}.grad",
            str(gradient.layout),
            "dense",
            "use sparse=False in the embedding, or leave it to torch.optim.SparseAdam",
            GradientError,
        )
    if gradient.dtype is not param.dtype:
        remedy = "let backward make it, or convert it to the parameter's type"
        raise invalid(f"{param.name}.grad", gradient.dtype, str(param.dtype), remedy, GradientError)
    raise invalid(f"{param.name}.grad", list(gradient.shape), str(list(param.shape)), "let backward make it", GradientError)


def check_missing(missing: list[Param], afterwards: str = "") -> None:
    """Refuses a step with missing gradients.

    Args:
        afterwards: how to continue if the others' gradients have left already.
    """
    if not missing:
        return
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise invalid(
        f"{missing[0].name}.grad",
        f"None{others}",
        "there, since other parameters have a gradient",
        "pass missing_gradients='skip' to leave it out of the step, as torch does, or 'zeros' to take zeros, as DeepSpeed does; "
        f"freeze it with requires_grad_(False); or leave it out of the optimizer{afterwards}",
        MissingGradientError,
    )


# By a parameter's ``id``: the parameter, and the optimizer that owns it, once its job is open or it hooks backward.
# With two owners, each would overwrite the other's weights.
_owners: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Any]]] = {}


def claim(named: Sequence[tuple[str, Tensor]], optimizer: Any, *, is_begun: bool = True) -> None:
    """Makes ``optimizer`` the owner of parameters, and closes an earlier owner if its ``give_way`` allows that. For example a scheduler
    may still refer to the optimizer of a notebook cell that runs again.

    Args:
        is_begun: whether the optimizer makes a step now. If not, an earlier owner that stays is no error, since it may end before the first
            step. The owners then stay unchanged.

    Raises:
        UsageError: if an earlier owner stays.
    """
    if owners(named, optimizer):
        gc.collect()  # a dropped optimizer may still wait for collection
    tensors = {id(tensor) for _, tensor in named}
    staying = [name for name, other in owners(named, optimizer) if not other.give_way(tensors)]
    if staying and is_begun:
        raise invalid(
            staying[0],
            "updated by two optimizers",
            "updated by one",
            "give each its own parameters, or close() the other one first",
            UsageError,
        )
    if not staying:
        for _, tensor in named:
            _owners[id(tensor)] = (weakref.ref(tensor), weakref.ref(optimizer))


def owners(named: Sequence[tuple[str, Tensor]], optimizer: Any = None) -> list[tuple[str, Any]]:
    """Returns the other optimizers that own some of the parameters, each with the name of the first such parameter."""
    found: dict[int, tuple[str, Any]] = {}
    for name, mine in named:
        tensor, owner = _owners.get(id(mine), (None, None))
        if tensor is not None and owner is not None and tensor() is mine:
            holder = owner()
            if holder is not None and holder is not optimizer:
                found.setdefault(id(holder), (name, holder))
    return list(found.values())


def owned(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors that some optimizer of this package owns."""
    return [tensor for tensor in tensors if id(tensor) in _owners and _owners[id(tensor)][0]() is tensor]


def release(tensors: Iterable[int]) -> None:
    """Removes the owners of tensors, by ``id``."""
    for tensor in tensors:
        _owners.pop(tensor, None)


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Returns whether both have the same bits, also of NaN."""
    return torch.equal(*(tensor.contiguous().resolve_neg().view(torch.uint8) for tensor in (one, other)))


def is_image(mine: Tensor, theirs: Tensor, image: torch.dtype) -> bool:
    """Returns whether ``theirs`` is ``mine``, rounded as servers round weights to an image."""
    return are_equal(mine.to(image).to(mine.dtype), theirs)


def is_rounding(mine: Tensor, master: Tensor) -> bool:
    """Returns whether ``mine`` are the master weights, rounded to the type of ``mine``, perhaps by way of an image's type."""
    return any(are_equal(mine, master.to(image).to(mine.dtype)) for image in (mine.dtype, *DTYPES))
