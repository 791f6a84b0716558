"""Which way ranks take to reduce their gradients."""

import torch

from longshore import _agree, _ddp, _waits
from longshore._options import Options
from longshore._params import Param
from longshore._ranks import Ranks, Reduced
from longshore._scattered import Scattered
from longshore._sharded import Sharded
from longshore.errors import invalid


def ranks(options: Options, params: list[Param], is_sharded: bool) -> Ranks:
    """What this rank and others do together.

    Raises:
        UsageError: without a process group.
        InvalidError: where it is not the options' world, or for parameters that cannot be trained so.
    """
    place = _agree.place()
    _waits.begin()
    with _waits.telling():
        return _ranks(options, params, is_sharded, place)


def _ranks(options: Options, params: list[Param], is_sharded: bool, place: tuple[int, int]) -> Ranks:
    rank, world_size = place
    if options.place() != (rank, world_size):
        given = "rank {} of {}".format(*options.place())
        limit = f"rank {rank} of {world_size}, as torch.distributed has it"
        raise invalid("rank and world_size", given, limit, "leave both out, and RANK and WORLD_SIZE to torchrun")
    if is_sharded:
        if options.partition is not None:
            limit = "None with parameters that are DTensors"
            raise invalid("partition", repr(options.partition), limit, "leave it out: they are partitions already")
        return Sharded(params)
    if options.partition == "all-reduced":
        return Reduced(params)
    if _ddp.has_any(param.tensor for param in params):
        raise invalid(
            "partition",
            "'reduce-scatter' with DistributedDataParallel",
            "'all-reduced' with it",
            "it has reduced the gradients already: pass partition='all-reduced', or leave the model unwrapped",
        )
    return Scattered(params, torch.float32 if options.reduce_dtype == "fp32" else None)
