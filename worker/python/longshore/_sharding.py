"""Parameters that are DTensors: which part of each this rank holds, how they are cut into pieces, and their local shards."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from longshore import _agree, _waits
from longshore._frozen import Kept
from longshore._host import Place
from longshore._job import JobParam
from longshore._params import Param
from longshore._partition import Box, Piece
from longshore.errors import invalid


def local(tensor: Any) -> Tensor:
    """What this rank holds of a parameter, as memory: what is written there is in the parameter."""
    with torch.no_grad():
        held = tensor.detach()
        shard: Tensor = held.to_local() if isinstance(held, DTensor) else held
    return shard


def fill(param: Param, whole: Tensor) -> None:
    """Writes this rank's part of a whole tensor into the parameter."""
    box = box_of(param)
    if _elements(box):
        local(param.tensor).copy_(whole[tuple(slice(first, end) for first, end in box)])


def box_of(param: Param) -> Box:
    """Where the part lies in a parameter that this rank holds. It may be empty.

    Raises:
        InvalidError: naming the parameter and the remedy, for a placement that servers cannot be given.
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
        # A strided one cuts each of the parts that a later dimension of the mesh has made.
        parts = int(getattr(placement, "split_factor", 1))
        of_each = [_cut(_cut(runs[placement.dim], parts, part), mesh.size(place), coordinate[place]) for part in range(parts)]
        runs[placement.dim] = [run for of_part in of_each for run in of_part]
    box = tuple((of_dim[0].start, of_dim[-1].stop) if of_dim else (0, 0) for of_dim in runs)
    held = local(tensor)
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
    """What ``torch.chunk`` gives of these indices, one run after the other, as one of so many parts."""
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
    """By parameter its pieces: the distinct parts that ranks hold of it. Of the ranks that hold the same, one sends it: the one that has
    the least to send so far, so that each rank of a replicated model has some.

    Raises:
        InvalidError: naming the parameter and the remedy, on all ranks, for what cannot be trained so.
    """
    if not params:
        return {}
    everyones: list[dict[str, Box]] = _agree.together(lambda: {param.name: box_of(param) for param in params})
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
    """The parameter's, and behind it for each dimension up to the last one that is cut which part this is of how many."""
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
    """The first rank that holds a piece sends it to rank 0, one after the other. There all of them are returned, with what holds their
    memory."""
    places: list[Place] = []
    held: list[Tensor] = []
    for piece in pieces:
        shard, source = local(piece.param.tensor), piece.holders[0]
        if rank == 0:
            memory = shard
            if source != 0:
                memory = torch.empty(piece.shape, dtype=piece.param.dtype, device=shard.device)
                _wait_for(functools.partial(distributed.recv, memory, source), piece, memory.device)
            memory = memory.to("cpu").contiguous()
            held.append(memory)
            places.append((piece.index, memory.data_ptr(), piece.elements, piece.wire))
        elif source == rank:
            _wait_for(functools.partial(distributed.send, shard.contiguous(), 0), piece, shard.device)
    return places, held


def _wait_for(act: Callable[[], object], piece: Piece, device: torch.device) -> None:
    """Has a piece move from its rank to rank 0. A device's stream waits for it; where hosts do, Ctrl-C and other ranks' failures end that."""
    if device.type == "cpu":
        _waits.wait(_waits.Apart(act), f"the first weights of {piece.param.name}, which rank {piece.holders[0]} sends to rank 0")
    else:
        act()


class KeptShards(Kept):
    """Frozen parameters of which each rank has its part, and perhaps some that it has whole."""

    def __init__(self, params: list[Param], first: int, rank: int, world_size: int) -> None:
        sharded: list[Param] = []
        whole: list[Param] = []
        for param in params:
            (sharded if isinstance(param.tensor, DTensor) else whole).append(param)
        self._rank = rank
        pieces = [piece for of_param in cuts(sharded, world_size).values() for piece in of_param]
        self._pieces = [dataclasses.replace(piece, index=first + place) for place, piece in enumerate(pieces)]
        super().__init__(whole, first + len(self._pieces), rank == 0)

    def described(self) -> Sequence[JobParam]:
        return [*self._pieces, *super().described()]

    def values(self) -> tuple[list[Place], list[Tensor]]:
        places, held = to_first_rank(self._pieces, self._rank)
        whole, held_whole = super().values()
        return [*places, *whole], [*held, *held_whole]

    def own(self) -> list[Param]:
        mine = (piece for piece in self._pieces if self._rank in piece.holders)
        shards = [(piece, local(piece.param.tensor)) for piece in mine]
        return [
            dataclasses.replace(piece.param, index=piece.index, tensor=shard, shape=shard.shape, elements=piece.elements)
            for piece, shard in shards
        ]
