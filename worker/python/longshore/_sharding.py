"""Parameters that are DTensors: what can be trained of them, and their local shards."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

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
