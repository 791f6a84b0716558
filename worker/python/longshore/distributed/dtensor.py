"""DTensors, as FSDP2, HSDP and tensor parallelism make them: this rank's part of a parameter and of its gradient.

The part follows from the parameter's placements, and is cut into pieces. Several ranks may hold the same piece: one of them sends it, and
all of them read it.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from longshore.distributed import collectives
from longshore.errors import GradientError, invalid
from longshore.transfer.params import Box, Param, Piece, Place
from longshore.transfer.tensors import on_host


def local_shard(tensor: Any) -> Tensor:
    """Returns this rank's part of a parameter as memory. Writes to it change the parameter."""
    with torch.no_grad():
        held = tensor.detach()
        shard: Tensor = held.to_local() if isinstance(held, DTensor) else held
    return shard


def fill(param: Param, whole: Tensor) -> None:
    """Writes this rank's part of a whole tensor into the parameter."""
    box = box_of(param)
    if _elements(box):
        local_shard(param.tensor).copy_(whole[tuple(slice(first, end) for first, end in box)])


def box_of(param: Param) -> Box:
    """Returns the place of this rank's part in a parameter. The part may be empty.

    Raises:
        InvalidError: naming the parameter and the remedy, for a placement that servers do not support.
    """
    tensor: Any = param.tensor
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in param.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise invalid(
            param.name,
            f"on a mesh without rank {distributed.get_rank()}",
            "on a mesh that has each rank of the job",
            "place it on a mesh of all ranks, with Replicate where several have the same; pipeline stages need a job and a process group each",
        )
    runs = [[range(size)] for size in param.shape]
    for place, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            remedy = "redistribute the parameter before the optimizer is built"
            raise invalid(param.name, f"placed as {list(placements)}", "placed by Shard and Replicate", remedy)
        # For a strided placement a later dimension of the mesh has made ``split_factor`` parts, and each of them is
        # cut.
        parts = int(getattr(placement, "split_factor", 1))
        of_each = [_cut(_cut(runs[placement.dim], parts, part), mesh.size(place), coordinate[place]) for part in range(parts)]
        runs[placement.dim] = [run for of_part in of_each for run in of_part]
    box = tuple((of_dim[0].start, of_dim[-1].stop) if of_dim else (0, 0) for of_dim in runs)
    held = local_shard(tensor)
    lengths = [sum(map(len, of_dim)) for of_dim in runs]
    is_box = list(held.shape) == lengths == [end - first for first, end in box]
    if held.numel() != math.prod(lengths) or (held.numel() and not is_box):
        raise invalid(
            param.name,
            f"placed as {list(placements)}, of {list(param.shape)} with {list(held.shape)} on rank {distributed.get_rank()}",
            "cut so that each rank holds neighbours",
            "shard dimensions whose size the ranks divide",
        )
    return box


def _cut(runs: list[range], parts: int, part: int) -> list[range]:
    """Returns part number ``part`` of the indices in ``runs``, cut as ``torch.chunk`` cuts all of them end to end."""
    room = math.ceil(sum(map(len, runs)) / parts)
    skipped, cut = part * room, []
    for run in runs:
        taken = run[skipped : skipped + room]
        skipped = max(skipped - len(run), 0)
        room -= len(taken)
        if taken:
            cut.append(taken)
    return cut


def _elements(box: Box) -> int:
    return math.prod(end - first for first, end in box)


def cuts(params: list[Param], world_size: int) -> dict[int, list[Piece]]:
    """Returns each parameter's pieces: the distinct parts that ranks hold. Each piece is sent by the holder that has
    the fewest elements to send so far. So each rank of a replicated model sends some.

    Raises:
        InvalidError: naming the parameter and the remedy, on all ranks, for a parameter that cannot be trained so.
    """
    if not params:
        return {}
    everyones: list[dict[str, Box]] = collectives.together(lambda: {param.name: box_of(param) for param in params})
    loads = [0] * world_size
    found: dict[int, list[Piece]] = {}
    for param in params:
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(everyones):
            if param.name not in boxes:
                remedy = "give all ranks the same model; pipeline stages need a job and a process group each"
                raise invalid(param.name, f"not on rank {rank}", "on all ranks", remedy)
            if _elements(boxes[param.name]):
                holders.setdefault(boxes[param.name], []).append(rank)
        if sum(map(_elements, holders)) != param.elements:
            remedy = "place it alike on all ranks"
            raise invalid(param.name, "in parts that are not the parameter together", f"{param.elements} elements in all", remedy)
        firsts = [sorted({box[dim][0] for box in holders}) for dim in range(len(param.shape))]
        found[param.index] = []
        for box, ranks in sorted(holders.items()):
            rank = min(ranks, key=lambda rank: (loads[rank], rank))
            loads[rank] += _elements(box)
            name = _name(param, [starts.index(first) for starts, (first, _) in zip(firsts, box, strict=True)])
            found[param.index].append(_piece(name, param, box, rank, ranks))
    return found


def _name(param: Param, at: list[int]) -> str:
    """Returns the parameter's name, with a part number and count for each dimension up to the last cut one: ``w#0/2``."""
    parts = [0] * len(at)
    if isinstance(param.tensor, DTensor):
        for place, placement in enumerate(param.tensor.placements):
            if isinstance(placement, Shard | _StridedShard):
                parts[placement.dim] = max(parts[placement.dim], 1) * param.tensor.device_mesh.size(place)
    last = max((dim for dim, of in enumerate(parts) if of), default=-1)
    return param.name + "".join(f"#{at[dim]}/{max(parts[dim], 1)}" for dim in range(last + 1))


def _piece(name: str, param: Param, box: Box, rank: int, holders: list[int]) -> Piece:
    shape = tuple(end - first for first, end in box)
    wide = next((dim for dim, length in enumerate(shape) if length > 1), len(shape))
    is_run = shape[wide + 1 :] == tuple(param.shape[wide + 1 :])
    start = 0
    for (first, _), size in zip(box, param.shape, strict=True):
        start = start * size + first
    replicas = tuple(holders) if len(holders) > 1 else ()
    return Piece(0, name, param, rank, shape, start, _elements(box), 0, None if is_run else box, replicas)


def to_first_rank(pieces: Iterable[Piece], rank: int) -> tuple[list[Place], list[Tensor]]:
    """Sends each piece from its first holder to rank 0, one after the other. On rank 0 returns all of them, with the tensors that hold
    their memory."""
    places: list[Place] = []
    held: list[Tensor] = []
    for piece in pieces:
        shard, source = local_shard(piece.param.tensor), piece.holders[0]
        if rank == 0:
            memory = shard
            if source != 0:
                memory = torch.empty(piece.shape, dtype=piece.param.dtype, device=shard.device)
                _wait_for(functools.partial(distributed.recv, memory, source), piece, memory.device)
            memory = on_host(memory)
            held.append(memory)
            places.append((piece.index, memory.data_ptr(), piece.elements, piece.wire))
        elif source == rank:
            _wait_for(functools.partial(distributed.send, shard.contiguous().resolve_neg(), 0), piece, shard.device)
    return places, held


def _wait_for(act: Callable[[], object], piece: Piece, device: torch.device) -> None:
    """Moves a piece to rank 0. A device's stream waits for it; on hosts Ctrl-C and other ranks' failures end the wait."""
    if device.type == "cpu":
        collectives.wait(collectives.Apart(act), f"the first weights of {piece.param.name}, which rank {piece.holders[0]} sends to rank 0")
    else:
        act()


#: Number of elements of a gradient that the holders of a piece compare.
_SAMPLES = 64
#: Difference that is allowed between two holders, relative to the largest compared element of the gradient.
_APART = 0.05
#: Difference that is allowed relative to the largest compared element of all gradients. A gradient that is zero in
#: theory is only rounding noise, of which two holders have different values.
_NOISE = 1e-5


def local_gradient(param: Param, gradient: Any) -> Tensor:
    """Returns this rank's part of a gradient in its parameter's placement. Tensor parallelism leaves partial sums,
    which this call adds over ranks."""
    if not isinstance(param.tensor, DTensor):
        return local_shard(gradient)
    if not isinstance(gradient, DTensor) or gradient.device_mesh != param.tensor.device_mesh:
        raise invalid(
            f"{param.name}.grad",
            "not sharded as its parameter is",
            "a DTensor on its parameter's mesh",
            "let backward make it, in the model that was given to fully_shard or parallelize_module",
            GradientError,
        )
    if gradient.placements != param.tensor.placements:
        gradient = gradient.redistribute(placements=param.tensor.placements)
    return local_shard(gradient)


def sample(gradient: Tensor) -> list[float]:
    flat = gradient.reshape(-1)
    sampled: list[float] = flat[:: max(len(flat) // _SAMPLES, 1)][:_SAMPLES].double().tolist()
    return sampled


def compare(pieces: list[Piece], everyones: list[Any]) -> None:
    """Refuses a first gradient that differs between holders of the same piece: it was not reduced.

    Args:
        everyones: by rank, the samples of :func:`sample` by parameter.
    """
    noise = _NOISE * _largest([value for sample in everyones[0].values() for value in sample])
    for piece in pieces:
        first, *others = piece.holders
        ours = everyones[first].get(piece.param.name, [])
        for rank in others:
            theirs = everyones[rank].get(piece.param.name, [])
            if len(ours) != len(theirs) or _are_apart(ours, theirs, noise):
                error = invalid(
                    f"{piece.param.name}.grad",
                    f"another on rank {rank} than on rank {first}",
                    "the same on all ranks that hold the same of the parameter",
                    "reduce it over them: call fully_shard on the whole model, so that it takes every parameter, on a mesh of all ranks that "
                    "have data of their own; where the mesh has a dimension for tensor parallelism, give its ranks the same data",
                    GradientError,
                )
                raise collectives.known(error)


def _are_apart(ours: list[float], theirs: list[float], noise: float) -> bool:
    """Returns whether the samples differ by more than rounding. Pairs with an overflow are ignored."""
    pairs = [pair for pair in zip(ours, theirs, strict=True) if all(map(math.isfinite, pair))]
    allowed = max(_APART * _largest([value for pair in pairs for value in pair]), noise)
    return any(abs(one - other) > allowed for one, other in pairs)


def _largest(values: list[float]) -> float:
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)
