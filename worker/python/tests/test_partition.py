"""The cut of parameters for ranks that hold them whole: every element has one place."""

import math
import random

import pytest
import torch

from longshore.transfer.params import DTYPES, Param
from longshore.transfer.partitions import copy, copy_back, layout


def param(index: int, tensor: torch.Tensor) -> Param:
    return Param(index, f"p{index}", 0, tensor, tensor.shape, tensor.dtype, DTYPES[tensor.dtype], tensor.numel())


def drawn(chance: random.Random) -> list[Param]:
    shapes = [[64, 3]] + [[chance.choice([1, 3, 8, 16, 64]) for _ in range(chance.randint(0, 3))] for _ in range(40)]
    dtypes = [chance.choice([torch.float32, torch.bfloat16]) for _ in shapes]
    return [param(index, torch.randn(shape, dtype=dtype)) for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_element_has_one_place(world_size: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    params = drawn(random.Random(seed))
    cut = layout(params, world_size)
    pieces = list(cut.pieces())
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert all(math.prod(piece.shape) == piece.elements for piece in pieces)
    by_param = cut.of_params()
    for each in params:
        ends = [piece.start + piece.elements for piece in by_param[each.index]]
        assert [piece.start for piece in by_param[each.index]] == [0, *ends[:-1]]
        assert ends[-1] == each.elements
    for bucket in cut.buckets:
        slots = torch.zeros(world_size, bucket.slot, dtype=bucket.dtype)
        for each in bucket.params:
            copy(by_param[each.index], each.tensor, slots)
        for each in bucket.params:
            copied = torch.empty_like(each.tensor)
            copy_back(by_param[each.index], slots, copied)
            assert torch.equal(copied, each.tensor)


def test_buckets_are_large_enough_and_partitions_in_forward_order() -> None:
    params = [param(index, torch.empty(1024, 1024)) for index in range(40)]
    cut = layout(params, 4)
    assert len(cut.buckets) == 10
    assert [rank for _, rank in cut.partitions] == 10 * [0, 1, 2, 3]
    assert [each.index for bucket in cut.buckets for each in bucket.params] == list(range(40))
