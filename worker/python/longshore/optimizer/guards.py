"""Guards against uses of an optimizer's parameters that would silently train something else.

====================== ============================================ =======================================
guard                  refuses                                      looks
====================== ============================================ =======================================
:func:`guard_clipping` clipping of gradients that have left, or     in torch's clipping functions
                       that servers clip
:class:`Groups`        param groups with other parameters than the  in ``step``
                       job's
:class:`Writes`        trained weights that differ from the         when a step begins, and in ``shard()``
                       servers' after a write, or lie elsewhere
:class:`Watch`         a parameter that another one replaced        when a step begins, and in saves
:class:`Absent`        (names) a parameter without any gradient     after the first steps
====================== ============================================ =======================================

All run on the training thread, called by the optimizer. docs/pytorch.md says which mistakes no guard finds.
"""

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook

from longshore.errors import UsageError, invalid
from longshore.transfer import params as _params
from longshore.transfer.params import Columns, Param
from longshore.transfer.tensors import on_host

#: Number of steps after which a warning names parameters that never had a gradient. An expert used by one batch in
#: twenty has no gradient that long in 0.6 % of cases.
FIRST_STEPS = 100
#: Parameters that torch's clipping functions refuse, by ``id``: the parameter, its optimizer, its name and the reason.
_clipped: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Any], str, str]] = {}

STREAMING = "its gradient leaves as backward makes it"
SCALED = "its gradient carries the loss scale, which the servers take off"
SERVERS = "its optimizer clips on the servers, since it has max_grad_norm"


def guard_clipping(optimizer: Any, names: Iterable[tuple[str, Tensor]], why: str) -> None:
    """Makes torch's clipping functions refuse these parameters for as long as their optimizer lives."""
    _install()
    for name, tensor in names:
        _clipped[id(tensor)] = (weakref.ref(tensor), weakref.ref(optimizer), name, why)


def release_clipping(tensors: Iterable[int]) -> None:
    """Ends :func:`guard_clipping` for parameters, by ``id``."""
    for tensor in tensors:
        _clipped.pop(tensor, None)


@functools.cache
def _install() -> None:
    """Makes torch's clipping functions check their parameters first. The function inside torch's wrapper is replaced,
    through the wrapper's closure, so that a name imported earlier checks too."""
    for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
        function: Any = getattr(clip_grad, name, None)
        inner = getattr(function, "__wrapped__", None)
        for cell in getattr(function, "__closure__", None) or ():
            if inner is not None and cell.cell_contents is inner:
                cell.cell_contents = torch.compiler.disable(_looking(inner))


def _looking(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def clip(parameters: Any, *limit: Any, **others: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # An infinite limit clips nothing: frameworks pass it to get the norm.
        clips = (limit[0] if limit else others.get("max_norm")) != math.inf
        for tensor in parameters if clips else ():
            of, optimizer, name, why = _clipped.get(id(tensor), (None, None, "", ""))
            if of is not None and of() is tensor and optimizer is not None and optimizer() is not None:
                raise invalid(
                    f"clipping of {name}",
                    "done outside",
                    "left to the optimizer",
                    f"{why}: give the optimizer max_grad_norm= and do not clip yourself (Trainer: max_grad_norm=0)",
                    UsageError,
                )
        return inner(parameters, *limit, **others)

    return clip


class Groups:
    """The param groups at the time when the job was opened. Servers have each parameter in its group of that time.

    Attributes:
        count: number of the job's groups.
    """

    def __init__(self, groups: list[dict[str, Any]], params: Iterable[Param]) -> None:
        self.count = len(groups)
        self._held = [list(group["params"]) for group in groups]
        #: All tensors of the groups, by id.
        self._known = {id(tensor): tensor for tensors in self._held for tensor in tensors}
        #: The parameters that the job has, by id of their tensors.
        self._params = {id(param.tensor): param for param in params}

    def in_order(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the param groups in the job's order. Groups may be sorted, and so may parameters within a group.

        Raises:
            UsageError: naming a parameter that was replaced, moved, added or removed.
        """
        tensors = [group["params"] for group in groups]
        if list(map(len, tensors)) == list(map(len, self._held)) and all(map(is_, chain(*tensors), chain(*self._held))):
            return groups
        found: dict[int, dict[str, Any]] = {}
        here: set[int] = set()
        new: list[tuple[str, int]] = []
        for place, group in enumerate(groups):
            params = [self._params.get(id(tensor)) for tensor in group["params"]]
            counts = Counter(param.group for param in params if param is not None)
            number = max(counts, key=lambda number: (counts[number], number == place), default=None)
            for index, (tensor, param) in enumerate(zip(group["params"], params, strict=True)):
                if param is not None:
                    here.add(id(tensor))
                    if param.group != number or found.setdefault(number, group) is not group:
                        raise _other_group(param.name, f"in param_groups[{place}]", f"in group {param.group}, as at the first step")
                elif tensor.requires_grad and tensor.numel() and id(tensor) not in self._known:
                    new.append((_params.name_of(group, place, index), place))
        for tensor, param in self._params.items():
            if tensor not in here:
                raise _other_group(param.name, "out of param_groups", f"in group {param.group}, as at the first step")
        for name, place in new:
            raise _other_group(name, f"new in param_groups[{place}]", "there at the first step")
        # No parameter of the job is in a group that was not found. Any group may stand for it, without an effect.
        return [found.get(place, groups[0]) for place in range(self.count)]


def _other_group(name: str, value: str, limit: str) -> Exception:
    return invalid(
        name,
        value,
        limit,
        "put the groups' parameters back, and change values of groups, or requires_grad of what shall rest; or close() this optimizer and build "
        "another one for the changed model, with another job=",
        UsageError,
    )


class Writes:
    """Notices writes to a job's parameters. Notes torch's counts of writes and the parameters' addresses once they have
    the job's weights.

    Only parameters whose count or address has changed are compared with the servers' weights. So averages that an evaluation swaps in and
    back out pass. Writes through ``.data`` into the same memory are not counted and pass unseen.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._has_shards = any(map(_params.is_sharded, columns.tensors))
        #: All parameters' counts of writes and addresses; None while nothing is watched.
        self._noted: tuple[list[int], list[int]] | None = None
        _count_steps_of_others()

    def note(self, params: list[Param] | None = None) -> None:
        """Notes parameters that have the job's weights now: ``params``, or all."""
        if params is None or len(params) == len(self._columns.params):
            self._noted = self._marks(self._columns.tensors)
        elif self._noted is not None:
            first, last = params[0].index, params[-1].index
            is_run = last - first + 1 == len(params)  # indices ascend
            for noted, marks in zip(self._noted, self._marks([param.tensor for param in params]), strict=True):
                if is_run:
                    noted[first : last + 1] = marks
                    continue
                for param, mark in zip(params, marks, strict=True):
                    noted[param.index] = mark

    def forget(self) -> None:
        """Ends the watch: :meth:`written` finds nothing until the next :meth:`note`."""
        self._noted = None

    def written(self) -> list[Param]:
        """Returns the parameters whose count or address has changed since :meth:`note`."""
        if self._noted is None:
            return []
        marks = self._marks(self._columns.tensors)
        if marks == self._noted:
            return []
        pairs = zip(self._columns.params, zip(*marks, strict=True), zip(*self._noted, strict=True), strict=True)
        return [param for param, now, then in pairs if now != then]

    def _marks(self, tensors: list[Tensor]) -> tuple[list[int], list[int]]:
        """Returns torch's counts of writes, and the addresses. Reading them does not wait for awaited weights."""
        with torch._C.DisableTorchFunctionSubclass():
            memory: list[Any] = tensors
            if self._has_shards:
                memory = [tensor._local_tensor if _params.is_sharded(tensor) else tensor for tensor in memory]
            return list(map(_version, tensors)), list(map(Tensor.data_ptr, memory))

    @torch.no_grad()
    def refuse(self, written: list[Param], read: Callable[[Param, Tensor], None], image: torch.dtype, job: str) -> None:
        """Raises if a parameter differs from the servers' rounded weights. Equal ones are noted again.

        Args:
            read: writes the servers' weights of a parameter into memory of its shape, or of its shard's.
            image: the type that servers round weights to.
        """
        # A changed shape is refused first, since servers' weights are read into memory of the tensor's shape.
        _params.check_unchanged(written, [])
        for param in written:
            mine = on_host(_memory(param))
            theirs = torch.empty_like(mine)
            if theirs.numel():
                read(param, theirs)
            if not _params.is_image(mine.view(-1), theirs.view(-1), image):
                raise invalid(
                    param.name,
                    f"another in the model than on the servers, which have had job {job} since before it was written",
                    "the servers' when a step begins, which replaces what is in the model",
                    "load weights before the optimizer or engine opens its job, with another job= to start from them; put back what was "
                    "there to the bit, as after an evaluation with averages; go back to earlier weights by checkpoint() and load_state_dict(); "
                    "or pass written_weights='drop' if what is written may be lost",
                    UsageError,
                )
        self.note(written)


def _memory(param: Param) -> Tensor:
    memory = param.tensor.detach()
    return memory.to_local() if _params.is_sharded(memory) else memory  # type: ignore[attr-defined,no-any-return]


_version = Tensor._version.__get__  # type: ignore[attr-defined]


@functools.cache
def _count_steps_of_others() -> None:
    """Makes torch count each step of another optimizer as a write. torch's fused optimizers write uncounted."""

    def count(other: Any, *_: Any) -> None:
        if not hasattr(other, "_connection"):  # not of this package
            tensors = [tensor for group in other.param_groups for tensor in group["params"] if tensor.grad is not None]
            torch.autograd.graph.increment_version(_params.owned(tensors))

    register_optimizer_step_post_hook(count)


class Watch:
    """The places of an optimizer's parameters in its models. Refers weakly to the models."""

    def __init__(self, models: Iterable[nn.Module], params: Iterable[tuple[str, Tensor]]) -> None:
        self._models = [weakref.ref(model) for model in models]
        # Sharded parameters are left out: FSDP2 itself replaces them by whole ones while a module computes.
        self._params = [(name, tensor) for name, tensor in params if not _params.is_sharded(tensor)]
        #: The models' parameters at the last check that passed.
        self._known: list[weakref.ref[Tensor]] = []
        #: Links from a module to a child or parameter, along the paths to the optimizer's parameters. A link has an
        #: entry in each of three lists: a dictionary of the module, a key, and the expected value.
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._held: list[object] = []
        self._note()

    def check(self) -> None:
        """Refuses a model in which another parameter has replaced one of the optimizer's. A parameter that moved within the model, or was
        removed without a replacement, passes."""
        if all(map(is_, map(dict.get, self._holders, self._keys), self._held)):
            return
        here = list(self._parameters())
        ids = {id(tensor) for _, tensor in here}
        gone = [_plain(name) for name, tensor in self._params if id(tensor) not in ids]
        # A frozen tensor counts only under the name of a parameter that is gone, since it may train later.
        known = {id(found) for found in (ref() for ref in self._known) if found is not None}
        new = {name: tensor for name, tensor in here if (tensor.requires_grad or name in gone) and id(tensor) not in known}
        if gone and new:
            name = next((name for name in gone if name in new), gone[0])
            other = name if name in new else next(iter(new))
            shown = f"{_params.DTYPES.get(new[other].dtype, new[other].dtype)} {list(new[other].shape)}"
            raise invalid(
                name,
                f"out of the model, which has another parameter in its place now: {other}, {shown}",
                "the model's for as long as its optimizer trains it, since the other one would get no update",
                "change the model first and build the optimizer, engine or Trainer after that, with another job= for the changed model; or put the "
                "old parameter back",
                UsageError,
            )
        self._note()

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for model in filter(None, (found() for found in self._models)):
            for name, tensor in model.named_parameters(remove_duplicate=False):
                yield _plain(name), tensor

    def _note(self) -> None:
        self._known = [weakref.ref(tensor) for _, tensor in self._parameters()]
        ours = {id(tensor) for _, tensor in self._params}
        self._holders, self._keys, self._held = [], [], []
        seen: dict[int, bool] = {}
        for model in filter(None, (found() for found in self._models)):
            self._has_any(model, ours, seen)

    def _has_any(self, module: nn.Module, ours: set[int], seen: dict[int, bool]) -> bool:
        """Notes a module's links to the optimizer's parameters. Returns whether the module has any."""
        if id(module) in seen:
            return seen[id(module)]
        seen[id(module)] = False  # ends the recursion for a module within itself
        held: list[tuple[dict[str, Any], str, object]] = [
            (module._parameters, name, tensor) for name, tensor in module._parameters.items() if id(tensor) in ours
        ]
        for name, child in module._modules.items():
            if child is not None and self._has_any(child, ours, seen):
                held.append((module._modules, name, child))
        for holder, key, value in held:
            self._holders.append(holder)
            self._keys.append(key)
            self._held.append(value)
        seen[id(module)] = bool(held)
        return seen[id(module)]


def _plain(name: str) -> str:
    """Returns a parameter's name without the prefixes of DistributedDataParallel and torch.compile."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


class Absent:
    """Parameters without a gradient in any of the first steps."""

    def __init__(self) -> None:
        self._left: set[int] | None = None
        self._steps = 0

    def note(self, missing: Sequence[Param]) -> None:
        """Notes parameters without a gradient in a backward pass. Frozen ones are ignored."""
        if self._steps < FIRST_STEPS and self._left != set():
            here = {param.index for param in missing if param.tensor.requires_grad}
            self._left = here if self._left is None else self._left & here

    def end_step(self) -> set[int]:
        """Ends a step. At the last of the first steps, returns the parameters that never had a gradient; otherwise an empty set."""
        self._steps += 1
        return (self._left or set()) if self._steps == FIRST_STEPS else set()
