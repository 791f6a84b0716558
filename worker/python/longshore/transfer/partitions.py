"""Layout of a job whose gradients come in partitions: the part of each parameter that each rank has.

Each parameter is cut into pieces. A whole parameter has one piece for each rank, cut along its first dimension as ``torch.chunk`` cuts. A
DTensor's pieces are its local shards (:mod:`longshore.distributed.dtensor`). A piece is a parameter of the job. Pieces lie bucket by bucket
in forward order, and within a bucket rank by rank. So servers update the first layers first, and each rank's pieces of a bucket are a
partition.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.errors import invalid
from longshore.transfer import device
from longshore.transfer.params import DTYPES, Param, Piece, Place

#: Smallest number of blocks in a partition. A partition is padded to whole blocks of 64 Ki elements, by half a block on
#: average: 3 % of 16 blocks.
_BLOCKS = 16
_BLOCK_ELEMENTS = 64 * 1024
#: The servers' limits, as in limits.rs: number of partitions, and number of parameters in a job whose steps may leave
#: parameters out.
_MOST_PARTITIONS = 4096
_MOST_PIECES = 65_536


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients the ranks reduce together. Each rank's part has ``slot`` elements."""

    index: int
    params: list[Param]
    pieces: list[list[Piece]]
    slot: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Layout:
    buckets: list[Bucket]
    #: The index of the first piece of each partition, and the rank that sends the partition.
    partitions: list[tuple[int, int]]

    def pieces(self) -> Iterator[Piece]:
        """Yields all pieces in the job's order."""
        for bucket in self.buckets:
            for pieces in bucket.pieces:
                yield from pieces

    def count(self) -> int:
        """Returns the number of pieces."""
        return sum(len(pieces) for bucket in self.buckets for pieces in bucket.pieces)

    def of_rank(self, rank: int) -> list[Piece]:
        return [piece for bucket in self.buckets for piece in bucket.pieces[rank]]

    def of_params(self) -> dict[int, list[Piece]]:
        """Returns each parameter's pieces, which end to end are its elements."""
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces():
            found.setdefault(piece.param.index, []).append(piece)
        return found


#: A function that cuts a parameter into pieces in the order of its elements. The pieces have no place in the job yet.
Cut = Callable[[Param], list[Piece]]


def layout(params: list[Param], world_size: int, cut: Cut | None = None) -> Layout:
    """Cuts the parameters for ``world_size`` ranks.

    Args:
        cut: cuts a parameter into at most one piece for each rank. By default all ranks have about equal parts, of whole rows if the rows
            divide evenly.

    Raises:
        InvalidError: if a rank has nothing, or if there are more pieces than servers take.
    """
    cuts = {param.index: cut(param) if cut is not None else _evenly(param, world_size) for param in params}
    pieces = sum(map(len, cuts.values()))
    if pieces > _MOST_PIECES:
        raise invalid(
            "partition",
            f"{len(params)} parameters in {pieces} pieces",
            f"at most {_MOST_PIECES} pieces",
            "shard over fewer ranks, or let the servers sum (partition=None, with plain parameters)",
        )
    buckets: list[Bucket] = []
    partitions: list[tuple[int, int]] = []
    index = 0
    for group in _grouped(params, world_size):
        dealt: list[list[Piece]] = [[] for _ in range(world_size)]
        slot = 0
        for param in group:
            for piece in cuts[param.index]:
                dealt[piece.rank].append(dataclasses.replace(piece, offset=slot))
            slot += max(piece.elements for piece in cuts[param.index])
        for rank, mine in enumerate(dealt):
            if mine:
                partitions.append((index, rank))
            mine[:] = [dataclasses.replace(piece, index=index + place) for place, piece in enumerate(mine)]
            index += len(mine)
        dtype = group[0].dtype
        for param in group:
            dtype = torch.promote_types(dtype, param.dtype)
        buckets.append(Bucket(len(buckets), group, dealt, slot, dtype))
    idle = set(range(world_size)) - {rank for _, rank in partitions}
    if idle:
        raise invalid(
            "partition",
            f"nothing for rank {min(idle)}",
            "a part of some parameter for each rank",
            f"the model has too few parts for {world_size} ranks, each of which sends some: train with fewer ranks, or let the servers sum "
            "(partition=None, with plain parameters)",
        )
    return Layout(buckets, partitions)


def in_one_piece(param: Param) -> Piece:
    """Returns a whole parameter as a piece."""
    return Piece(param.index, param.name, param, 0, tuple(param.shape), 0, param.elements, 0)


def piece_param(piece: Piece, tensor: Tensor, dtype: torch.dtype) -> Param:
    """Returns a piece as the :class:`Param` that gradients and weights need."""
    return Param(
        piece.index, piece.name, piece.param.group, tensor, torch.Size([piece.elements]), dtype, DTYPES[dtype], piece.elements
    )


def spans(pieces: list[Piece], start: int, elements: int) -> Iterator[tuple[int, int, int]]:
    """Yields the places of a parameter's elements in its pieces: the piece, the first element in it, and their number."""
    for piece in pieces:
        first, end = max(start, piece.start), min(start + elements, piece.start + piece.elements)
        if first < end:
            yield piece.index, first - piece.start, end - first


#: Weights of fewer bytes are pulled whole by each rank, since that takes no longer than a collective.
LEAST_SHARED = 64 * 1024


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's pull of a tensor that ranks gather."""

    #: Number of elements in each rank's part, and in the parts of all ranks together.
    part: int
    gathered: int
    #: First element and number of elements of each pull of this rank. A rank pulls its part, and like all others the
    #: remainder that is smaller than the number of ranks.
    own: list[tuple[int, int]]


def share(elements: int, width: int, rank: int, world_size: int) -> Share | None:
    """Returns a rank's share of a tensor of ``elements`` elements of ``width`` bytes; None if it pulls the whole tensor."""
    if elements * width < LEAST_SHARED:
        return None
    part = elements // world_size
    own = [(rank * part, part), (world_size * part, elements - world_size * part)]
    return Share(part, world_size * part, [(start, length) for start, length in own if length])


@contextlib.contextmanager
def exported(pieces: list[Piece], arrays: list[list[Tensor]]) -> Iterator[list[list[Place]]]:
    """Yields the places to which values are exported: a list for each array, with a place for each piece. The list of
    an array without tensors is empty.

    When the context ends, the values are in the arrays' tensors: contiguous CPU tensors, one for each parameter. Until
    then a piece whose elements are not consecutive in its parameter has memory of its own."""
    apart: list[tuple[Tensor, Tensor]] = []

    def place(piece: Piece, whole: Tensor) -> Place:
        part = piece.part_of(whole)
        if piece.box is not None:
            own = device.host_empty(piece.shape, whole.dtype)
            apart.append((part, own))
            part = own
        return piece.place(part)

    yield [[place(piece, tensors[piece.param.index]) for piece in pieces] if tensors else [] for tensors in arrays]
    while apart:
        part, own = apart.pop()
        part.copy_(own)


def _evenly(param: Param, world_size: int) -> list[Piece]:
    """Returns a piece for each rank, as long as there are elements."""
    rows = param.shape[0] if param.shape else 1
    unit = param.elements // rows if rows % world_size == 0 else 1
    step = math.ceil(param.elements // unit / world_size) * unit
    row = param.elements // rows
    pieces = []
    for rank in range(world_size):
        start, elements = rank * step, min(step, param.elements - rank * step)
        if elements > 0:
            # Whole rows have the parameter's shape, and other pieces a flat one.
            is_rows = param.shape and start % row == 0 and elements % row == 0
            shape = (elements // row, *param.shape[1:]) if is_rows else (elements,)
            pieces.append(Piece(0, f"{param.name}#{rank}/{world_size}", param, rank, shape, start, elements, 0))
    return pieces


def _grouped(params: list[Param], world_size: int) -> list[list[Param]]:
    """Returns the parameters of each bucket, which are on one device."""
    total = sum(param.elements for param in params)
    least = max(_BLOCKS * _BLOCK_ELEMENTS * world_size, total * 2 * world_size // _MOST_PARTITIONS)
    groups: list[list[Param]] = []
    size = 0
    for param in params:
        if not groups or size >= least or groups[-1][0].tensor.device != param.tensor.device:
            groups.append([])
            size = 0
        groups[-1].append(param)
        size += param.elements
    is_small = len(groups) > 1 and 2 * size < least
    if is_small and groups[-2][0].tensor.device == groups[-1][0].tensor.device:
        last = groups.pop()
        groups[-1].extend(last)
    return groups


def copy(pieces: list[Piece], tensor: Tensor, slots: Tensor) -> None:
    """Copies a parameter or its gradient into its bucket, which has one row for each rank."""
    flat = tensor.reshape(-1)
    columns = _columns(pieces, slots)
    if columns is not None:
        columns.copy_(flat.view(columns.shape))
        return
    for piece in pieces:
        part = flat[piece.start : piece.start + piece.elements]
        slots[piece.rank, piece.offset : piece.offset + piece.elements].copy_(part)


def copy_back(pieces: list[Piece], slots: Tensor, tensor: Tensor) -> None:
    """Copies a parameter from its bucket."""
    columns = _columns(pieces, slots)
    if columns is not None and tensor.is_contiguous():
        tensor.view(columns.shape).copy_(columns)
        return
    parts = [slots[piece.rank, piece.offset : piece.offset + piece.elements] for piece in pieces]
    tensor.copy_(torch.cat(parts).view(tensor.shape))


def _columns(pieces: list[Piece], slots: Tensor) -> Tensor | None:
    """Returns the parameter's columns in its bucket; None unless all ranks have equal parts."""
    first = pieces[0]
    if len(pieces) != len(slots) or any(piece.elements != first.elements for piece in pieces):
        return None
    return slots[:, first.offset : first.offset + first.elements]
