"""Parameters that are DTensors: what can be trained of them, and their local shards."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Shard

from longshore import _partition, _waits
from longshore._frozen import Kept
from longshore._host import Place
from longshore._job import JobParam
from longshore._params import Param
from longshore._partition import Piece
from longshore.errors import invalid


def local(tensor: Any) -> Tensor:
    """The shard of this rank, as memory: what is written there is in the parameter."""
    with torch.no_grad():
        shard: Tensor = tensor.detach().to_local()
    return shard


def fill(tensor: Any, whole: Tensor) -> None:
    """Writes this rank's rows of a whole tensor into the parameter."""
    mesh = tensor.device_mesh
    chunks = torch.chunk(whole, mesh.size())
    rank = mesh.get_local_rank()
    if rank < len(chunks):
        local(tensor).copy_(chunks[rank])


def check(name: str, tensor: Tensor, world_size: int) -> None:
    """Refuses what is not sharded along its first dimension over all ranks.

    Raises:
        InvalidError: naming the parameter and the remedy.
    """
    if not isinstance(tensor, DTensor):
        raise invalid(
            name,
            "a plain tensor, whose gradients no rank reduces",
            "a DTensor, as the model's other parameters",
            "call fully_shard on the whole model, too, so that it takes every parameter",
        )
    mesh = tensor.device_mesh
    if mesh.ndim != 1 or mesh.size() != world_size:
        raise invalid(
            name,
            f"on a mesh of {'x'.join(map(str, mesh.shape))}",
            f"on one dimension of all {world_size} ranks",
            "shard over all ranks with fully_shard alone: HSDP and tensor parallelism are not supported",
        )
    if tuple(tensor.placements) != (Shard(0),):
        raise invalid(
            name,
            f"placed as {list(tensor.placements)}",
            "Shard(0)",
            "leave shard_placement_fn out of fully_shard, and shard with it alone",
        )


def to_first_rank(pieces: Iterable[Piece], rank: int) -> tuple[list[Place], list[Tensor]]:
    """Each rank sends its pieces to rank 0, one after the other. There all of them are returned, with what holds their memory."""
    places: list[Place] = []
    held: list[Tensor] = []
    for piece in pieces:
        shard = local(piece.param.tensor)
        if rank == 0:
            memory = shard
            if piece.rank != 0:
                memory = torch.empty(piece.shape, dtype=piece.param.dtype, device=shard.device)
                _wait_for(functools.partial(distributed.recv, memory, piece.rank), piece, memory.device)
            memory = memory.to("cpu").contiguous()
            held.append(memory)
            places.append((piece.index, memory.data_ptr(), piece.elements, piece.wire))
        elif piece.rank == rank:
            _wait_for(functools.partial(distributed.send, shard.contiguous(), 0), piece, shard.device)
    return places, held


def _wait_for(act: Callable[[], object], piece: Piece, device: torch.device) -> None:
    """Has a piece move from its rank to rank 0. A device's stream waits for it; where hosts do, Ctrl-C and other ranks' failures end that."""
    if device.type == "cpu":
        _waits.wait(_waits.Apart(act), device, f"the first weights of {piece.param.name}, which rank {piece.rank} sends to rank 0")
    else:
        act()


class KeptShards(Kept):
    """Frozen parameters of which each rank has its rows, and perhaps some that it has whole."""

    def __init__(self, params: list[Param], first: int, rank: int, world_size: int) -> None:
        sharded: list[Param] = []
        whole: list[Param] = []
        for param in params:
            (sharded if isinstance(param.tensor, DTensor) else whole).append(param)
        for param in sharded:
            check(param.name, param.tensor, world_size)
        self._rank = rank
        self._pieces = _partition.by_rows(sharded, world_size, first)
        super().__init__(whole, first + len(self._pieces), rank == 0)

    def described(self) -> Sequence[JobParam]:
        return [*self._pieces, *super().described()]

    def values(self) -> tuple[list[Place], list[Tensor]]:
        places, held = to_first_rank(self._pieces, self._rank)
        whole, held_whole = super().values()
        return [*places, *whole], [*held, *held_whole]

    def own(self) -> list[Param]:
        mine = (piece for piece in self._pieces if piece.rank == self._rank)
        shards = [(piece, local(piece.param.tensor)) for piece in mine]
        return [
            dataclasses.replace(piece.param, index=piece.index, tensor=shard, shape=shard.shape, elements=piece.elements)
            for piece, shard in shards
        ]
