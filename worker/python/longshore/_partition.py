"""Which rank has which part of each parameter: the layout of a job whose gradients come in partitions.

Each parameter is cut into one piece a rank, along its first dimension, as ``torch.chunk`` cuts. A piece is a parameter of the
job. Pieces lie bucket by bucket, in forward order, and within a bucket rank by rank: so servers update the first layers
first, and each rank's pieces of a bucket are a partition.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore._host import Place
from longshore._params import DTYPES, Param
from longshore.errors import invalid

#: A partition is padded to whole blocks of 64 Ki elements. With as many blocks as this in each, padding takes 3 % of the space.
_BLOCKS = 16
_BLOCK_ELEMENTS = 64 * 1024
#: What servers take, in limits.rs: partitions, and parameters that steps may leave out.
_MOST_PARTITIONS = 4096
_MOST_PIECES = 65_536


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of a parameter: a parameter of the job, at its place in the job's order."""

    index: int
    name: str
    param: Param
    rank: int
    shape: tuple[int, ...]
    #: Its first element in the parameter, and how many it has.
    start: int
    elements: int
    #: Where it lies in its rank's part of the bucket.
    offset: int

    @property
    def group(self) -> int:
        return self.param.group

    @property
    def wire(self) -> str:
        return self.param.wire

    def place(self, whole: Tensor) -> Place:
        """Its memory in a contiguous CPU tensor of the parameter's shape."""
        return self.place_in((self.param.index, whole.data_ptr(), whole.numel(), DTYPES[whole.dtype]))

    def place_in(self, whole: Place) -> Place:
        """Its memory in that of its parameter."""
        _, address, _, wire = whole
        return (self.index, address + self.start * (4 if wire == "fp32" else 2), self.elements, wire)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients the ranks reduce together. Each rank's part of it has the same size, ``slot`` elements."""

    index: int
    params: list[Param]
    pieces: list[list[Piece]]
    slot: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Layout:
    buckets: list[Bucket]
    #: First piece and rank of each.
    partitions: list[tuple[int, int]]

    def pieces(self) -> Iterator[Piece]:
        """All pieces, in the job's order."""
        for bucket in self.buckets:
            for pieces in bucket.pieces:
                yield from pieces

    def count(self) -> int:
        """How many pieces there are."""
        return sum(len(pieces) for bucket in self.buckets for pieces in bucket.pieces)

    def of_rank(self, rank: int) -> list[Piece]:
        return [piece for bucket in self.buckets for piece in bucket.pieces[rank]]

    def of_params(self) -> dict[int, list[Piece]]:
        """By parameter: its pieces, which end to end are its elements."""
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces():
            found.setdefault(piece.param.index, []).append(piece)
        return found


def layout(params: list[Param], world_size: int, by_rows: bool) -> Layout:
    """Cuts the parameters for so many ranks.

    Args:
        by_rows: cut between rows alone, as FSDP2 does. Else a parameter whose rows cannot be dealt evenly is cut between any
            elements.

    Raises:
        InvalidError: where a rank would have nothing, or where there are more pieces than servers take.
    """
    if len(params) * world_size > _MOST_PIECES:
        raise invalid(
            "partition",
            f"{len(params)} parameters in {world_size} pieces each",
            f"at most {_MOST_PIECES} pieces",
            "let the servers sum (partition=None, or fewer ranks that push)",
        )
    buckets: list[Bucket] = []
    partitions: list[tuple[int, int]] = []
    index = 0
    for group in _grouped(params, world_size):
        cuts = [(param, _cut(param, world_size, by_rows)) for param in group]
        offsets, slot = [], 0
        for _, cut in cuts:
            offsets.append(slot)
            slot += max(elements for _, elements in cut)
        dealt: list[list[Piece]] = []
        for rank in range(world_size):
            mine = []
            for (param, cut), offset in zip(cuts, offsets, strict=True):
                start, elements = cut[rank]
                if elements:
                    name = _name(param, rank, world_size)
                    shape = _shape(param, start, elements)
                    mine.append(Piece(index + len(mine), name, param, rank, shape, start, elements, offset))
            if mine:
                partitions.append((index, rank))
            index += len(mine)
            dealt.append(mine)
        dtype = group[0].dtype
        for param in group:
            dtype = torch.promote_types(dtype, param.dtype)
        buckets.append(Bucket(len(buckets), group, dealt, slot, dtype))
    _check_ranks(params, partitions, world_size)
    return Layout(buckets, partitions)


def piece_param(piece: Piece, tensor: Tensor, dtype: torch.dtype) -> Param:
    """A piece as what gradients and weights are taken for."""
    return Param(
        piece.index, piece.name, piece.param.group, tensor, torch.Size([piece.elements]), dtype, DTYPES[dtype], piece.elements
    )


def spans(pieces: list[Piece], start: int, elements: int) -> Iterator[tuple[int, int, int]]:
    """Where elements of a parameter lie in its pieces: which piece, the first element in it, and how many."""
    for piece in pieces:
        first, end = max(start, piece.start), min(start + elements, piece.start + piece.elements)
        if first < end:
            yield piece.index, first - piece.start, end - first


def by_rows(params: list[Param], world_size: int, first: int) -> list[Piece]:
    """Cuts parameters that no rank contributes to, between rows. Their pieces lie one after the other in the job, from ``first`` on."""
    pieces: list[Piece] = []
    for param in params:
        for rank, (start, elements) in enumerate(_cut(param, world_size, by_rows=True)):
            if elements:
                shape, name = _shape(param, start, elements), _name(param, rank, world_size)
                pieces.append(Piece(first + len(pieces), name, param, rank, shape, start, elements, 0))
    return pieces


def _name(param: Param, rank: int, world_size: int) -> str:
    return f"{param.name}#{rank}/{world_size}"


def _check_ranks(params: list[Param], partitions: list[tuple[int, int]], world_size: int) -> None:
    idle = set(range(world_size)) - {rank for _, rank in partitions}
    if idle:
        raise invalid(
            "partition",
            f"nothing for rank {min(idle)}",
            "a part of some parameter for each rank",
            f"no parameter is as long as the world size, {world_size}: train with fewer ranks, or let the servers sum "
            "(partition=None, without fully_shard)",
        )


def _cut(param: Param, world_size: int, by_rows: bool) -> list[tuple[int, int]]:
    """Start and elements of each rank's part."""
    rows = param.shape[0] if param.shape else 1
    unit = param.elements // rows if by_rows or rows % world_size == 0 else 1
    step = math.ceil(param.elements // unit / world_size) * unit
    starts = [min(rank * step, param.elements) for rank in range(world_size + 1)]
    return [(start, end - start) for start, end in zip(starts, starts[1:], strict=False)]


def _shape(param: Param, start: int, elements: int) -> tuple[int, ...]:
    """That of rows of the parameter, where they are whole."""
    row = param.elements // param.shape[0] if param.shape else 1
    is_rows = param.shape and start % row == 0 and elements % row == 0
    return (elements // row, *param.shape[1:]) if is_rows else (elements,)


def _grouped(params: list[Param], world_size: int) -> list[list[Param]]:
    """The parameters of each bucket. They are of one device."""
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
    """Copies a parameter or its gradient into its bucket, which has a row a rank."""
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
    """A parameter's place in its bucket, where all ranks have as much of it."""
    first = pieces[0]
    if len(pieces) != len(slots) or any(piece.elements != first.elements for piece in pieces):
        return None
    return slots[:, first.offset : first.offset + first.elements]
