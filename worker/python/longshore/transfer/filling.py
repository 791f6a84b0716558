"""The state that a new job begins with: tensors of another optimizer or of files, and frozen parameters.

Tensors are checked before any change, and read one by one on the training thread while rank 0 opens the job. :class:`FrozenParams` has the
frozen parameters that servers keep.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longshore.errors import GroupsError, StateError, UsageError, invalid, warn
from longshore.transfer import device
from longshore.transfer.params import Param, Piece, Place, are_equal, check_tensor, is_rounding, is_sharded
from longshore.transfer.pinned import host_tensor
from longshore.transfer.tensors import is_built, is_in_backward, on_host


def targets(params: list[Param], tensors: list[Tensor]) -> list[Place]:
    """Returns the places of an array's values in ``tensors``, which has a contiguous CPU tensor for each parameter, or
    none at all."""
    return [param.place(tensor) for param, tensor in zip(params if tensors else [], tensors, strict=True)]


class FrozenParams:
    """Frozen parameters that each rank has whole. The job has them after all others.

    Args:
        first: number of other parameters.
        fills: whether this rank fills a new job.
    """

    def __init__(self, params: list[Param], first: int, fills: bool) -> None:
        self._fills = fills
        for param in params:
            if is_sharded(param.tensor):
                remedy = "call fully_shard on the whole model, so that it takes what trains as well, or leave frozen ones to the framework"
                raise invalid(param.name, "sharded (DTensor)", "whole with frozen='keep', as what trains", remedy)
        self._params = [dataclasses.replace(param, index=first + place) for place, param in enumerate(params)]

    def described(self) -> Sequence[Param | Piece]:
        """Returns the frozen parameters for the job's layout."""
        return self._params

    def values(self) -> tuple[list[Place], list[Tensor]]:
        """Returns the frozen parameters' current places, and the tensors that hold their memory. Both are empty unless this rank fills the
        job."""
        held = [on_host(param.tensor) for param in self._params] if self._fills else []
        return targets(self._params, held), held

    def whole(self) -> list[Param]:
        """Returns the frozen parameters that each rank has whole."""
        return self._params

    def own(self) -> list[Param]:
        """Returns the frozen parameters of which each rank has a part."""
        return []

    def read(self, job: Any, version: int, params: list[Param]) -> None:
        """Gives parameters the job's weights, one at a time. Another process may have made these weights."""
        for param in params:
            memory = device.host_empty(param.shape, param.dtype)
            job.pull(version, [param.place(memory)])
            write_frozen(param, memory)


@torch.no_grad()
def write_frozen(param: Param, weights: Tensor) -> None:
    """Writes the job's weights into a frozen parameter.

    Raises:
        UsageError: if a running backward needs the earlier weights.
    """
    if torch.equal(weights, param.tensor.to(weights.device)):
        return
    if is_in_backward():
        # Streaming opens a job with the first gradient. The backward that made the gradient still needs the weights
        # that its forward used.
        raise UsageError(
            f"{param.name} is frozen, and the job's weights of it are not the model's, as with an image_dtype of fewer "
            "bits: call optimizer.open() before the first forward"
        )
    param.tensor.copy_(weights)


#: A new job's state in three values: the number of updates that made the state; pairs of a parameter and its number of
#: missing updates; and a function. The function takes the numbers of an array and of a parameter. Its result is the
#: tensor's place, and an object that holds the tensor's memory.
Source = tuple[int | None, list[tuple[int, int]], Callable[[int, int], tuple[Place, object]]]

#: Index of the array of master weights. The arrays of the rule's moments follow.
MASTER = 0


@dataclass(frozen=True)
class Filling:
    """Tensors for a new job, read one by one as they are sent.

    Attributes:
        applied: number of updates that made the state; None for weights alone.
        read: returns the tensor of an array (0 is the master weights) and a parameter, in its shape.
        check: refuses tensors that do not fit these parameters.
        fewer: number of missing updates, by the name of each parameter that has fewer than ``applied``.
        others: names of parameters whose weights in the model are no rounding of the master weights. Known once the job
            is filled.
    """

    applied: int | None
    read: Callable[[int, Param], Tensor]
    check: Callable[[list[Param]], None]
    fewer: Mapping[str, int] = field(default_factory=dict)
    others: dict[str, None] = field(default_factory=dict)

    def of_job(self, params: list[Param], pieces: list[Piece], first: list[Place], frozen: list[Place]) -> Source:
        """Returns the tensors with which the Rust half fills a new job. Master weights fill it where the model's weights are their
        rounding. Other weights of the model were written on purpose, and fill it themselves.

        Args:
            params: the parameters that train.
            pieces: the job's pieces of ``params``, in its order.
            first: the places of the model's own weights by piece; empty to read them from the parameters.
            frozen: the places of the frozen parameters, which have no state and come last.
        """
        self.check(params)

        def place(array: int, index: int) -> tuple[Place, object]:
            if index >= len(pieces):
                return frozen[index - len(pieces)], None
            piece = pieces[index]
            tensor = self.read(array, piece.param)
            part = piece.part_of(on_host(tensor)).contiguous()
            if array == MASTER and tensor is not piece.param.tensor:
                mine = own(index)
                if not is_rounding(mine, part.view(-1)):
                    if not are_equal(mine.to(part.dtype), part.view(-1)):  # equal if the state has fewer bits
                        self.others[piece.param.name] = None
                    return piece.place(mine), mine
            elif tensor is piece.param.tensor and first:
                return first[index], None
            return piece.place(part), part

        def own(index: int) -> Tensor:
            piece = pieces[index]
            if first:
                _, address, elements, _ = first[index]
                return host_tensor(address, elements, piece.param.dtype)
            return piece.part_of(on_host(piece.param.tensor)).contiguous().view(-1)

        fewer = [(piece.index, self.fewer[piece.param.name]) for piece in pieces if piece.param.name in self.fewer]
        return self.applied, fewer, place

    def warn_of_others(self) -> None:
        """Warns of parameters that filled the job themselves, since they differ from the state's master weights."""
        if self.others:
            more = f" and {len(self.others) - 1} more" if len(self.others) > 1 else ""
            warn(
                f"the model's weights of {next(iter(self.others))}{more} are not those of the loaded state, for example averages or a fresh "
                "model. The model's count, as with torch.optim. To go on from the state's, load the model that was saved with it before the "
                "first step"
            )


def of_init(params: list[Param]) -> Filling | None:
    """Returns the weights that fill a new job parameter by parameter; None if :class:`longshore.Init` built no parameter."""
    if not any(is_built(param.tensor) for param in params):
        return None
    return Filling(None, lambda _, param: param.tensor, lambda _: None)


def steps_of(named: Mapping[str, Any], where: str) -> tuple[int, dict[str, int]]:
    """Returns the number of updates that made the state, and each parameter's missing updates: steps without its gradient do not count."""
    counts: dict[str, int] = {}
    for name, given in named.items():
        count = float(given)
        if count != int(count) or count < 0:
            raise invalid(f"{name}.step", count, "a whole number", f"look at how {where} was made", StateError)
        counts[name] = int(count)
    most = max(counts.values())
    return most, {name: most - count for name, count in counts.items() if count < most}


def of_torch(
    state_dict: Mapping[str, Any], tensors: dict[int, Tensor], names: dict[int, str], moments: Sequence[str], *, later: bool
) -> Filling | None:
    """Returns the state of a torch optimizer, or a full state of this package. A state saved before the first update has the master weights
    alone; without these the result is None. A parameter without state, for example an expert that was never used, begins with moments
    of zero, as in torch.

    Args:
        state_dict: the result of ``state_dict``, checked by :func:`check_groups`.
        tensors: this optimizer's parameters, by their numbers in the state.
        names: their names, by the same numbers.
        moments: torch's names of this optimizer's arrays.
        later: whether frozen parameters train later.

    Raises:
        StateError: naming the tensor that is missing, unknown or of another shape.
    """
    where = "state_dict"
    states = state_dict["state"]
    trained = {number: tensor for number, tensor in tensors.items() if (tensor.requires_grad or later) and tensor.numel()}
    begin = [number for number in trained if not states.get(number)]
    for number, state in states.items():
        name = names[number]
        for key, value in state.items():
            if key not in (*moments, "step", "master") and value is not None:
                limit = f"one of {', '.join(moments)}"
                remedy = "servers keep no such state: load it into an optimizer of the class that saved it (amsgrad is not here)"
                raise invalid(f"{name}.{key}", "there", limit, remedy, StateError)
        if number not in trained and tensors[number].numel() and any(key in state for key in moments):
            remedy = "set requires_grad on it, or take it out of the state"
            raise invalid(f"{name}.{moments[0]}", "there", "absent, since the parameter is frozen", remedy, StateError)
    steps = {names[number]: state["step"] for number, state in states.items() if number in trained and "step" in state}
    # torch keeps no step count with momentum alone. A count of 1 then stands for any number of updates.
    applied, fewer = steps_of(steps, where) if steps else (1, {})
    with_master = any("master" in states.get(number, {}) for number in trained)
    has_begun = applied > 0 and any(state.get(key) is not None for state in states.values() for key in moments)
    if not has_begun and not with_master:
        return None
    wanted = [*(("master",) if with_master else ()), *(moments if has_begun else ())]
    fewer |= {names[number]: applied for number in begin}
    none_yet = {id(trained[number]) for number in begin}
    by_tensor = {id(tensor): states.get(number, {}) for number, tensor in trained.items()}

    def check(params: list[Param]) -> None:
        for param in params:
            if id(param.tensor) in none_yet:
                continue
            state = by_tensor.get(id(param.tensor), {})
            for key in wanted:
                check_tensor(f"{param.name}.{key}", state.get(key), param.shape, where)
            if steps and "step" not in state:
                raise invalid(f"{param.name}.step", "absent", str(applied), "take a state in which every parameter has it", StateError)

    def read(array: int, param: Param) -> Tensor:
        state = by_tensor.get(id(param.tensor), {})
        if array == MASTER:
            return state.get("master", param.tensor)
        return device.host_empty(param.shape, torch.float32).zero_() if id(param.tensor) in none_yet else state[moments[array - 1]]

    return Filling(applied if has_begun else None, read, check, fewer=fewer if has_begun else {})


def check_sizes(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Refuses a state whose param groups differ in number or size, in torch's words."""
    saved = state_dict["param_groups"]
    remedy = "build the optimizer with the param groups that the state was saved with"
    if len(saved) != len(groups):
        torchs = "loaded state dict has a different number of parameter groups"
        raise invalid("param_groups", f"{len(saved)} in the state", str(len(groups)), f"{torchs}: {remedy}", GroupsError)
    for index, (theirs, mine) in enumerate(zip(saved, groups, strict=True)):
        if len(theirs["params"]) != len(mine["params"]):
            value, limit = (f"of {len(group['params'])}" for group in (theirs, mine))
            torchs = "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            raise invalid(f"param_groups[{index}]", f"{value} parameters", limit, f"{torchs}: {remedy}", GroupsError)


def check_groups(state_dict: Mapping[str, Any], groups: list[dict[str, Any]], rule: str) -> None:
    """Refuses a state of other param groups, as torch does, or of parameters with other names."""
    check_sizes(state_dict, groups)
    for index, (theirs, mine) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        decoupled = theirs.get("decoupled_weight_decay", rule == "adamw")
        if rule in ("adam", "adamw") and decoupled != (rule == "adamw"):
            kind = "AdamW" if decoupled else "Adam"
            field = f"param_groups[{index}]['decoupled_weight_decay']"
            raise invalid(field, decoupled, f"{not decoupled} in {rule}", f"use longshore.{kind}", StateError)
        their_names, my_names = theirs.get("param_names"), mine.get("param_names")
        for theirs_, mine_ in zip(their_names or (), my_names or (), strict=False):
            if theirs_ != mine_:
                remedy = "build the optimizer with the param groups that the state was saved with"
                raise invalid(f"param_groups[{index}]", theirs_, f"{mine_}, as in this optimizer", remedy, StateError)
