"""Every element of a parameter has one place in the cut for ranks, and copies have the same bits on any number of threads."""

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import longshore
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


#: Elements of the parameters. The first two are cut into parts, one of which ends inside a cache line. Padding lies
#: between parameters.
LENGTHS = [1_500_001, 2_097_152, 70, 300_007]
#: Elements of a shard. Each of the long parameters lies in several shards.
SHARD = 1024 * 1024


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def values(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(length, generator=generator) * 0.02).to(dtype) for length in LENGTHS]


def trained(threads: int, dtype: torch.dtype, **options: object) -> list[Tensor]:
    """Returns the parameters after some steps."""
    torch.set_num_threads(threads)
    params = [nn.Parameter(value) for value in values(0, dtype)]
    optimizer = longshore.AdamW(params, lr=1e-2, shard_elements=SHARD, max_grad_norm=1.0, **options)
    for step in range(3):
        for param, gradient in zip(params, values(step + 1, dtype), strict=True):
            param.grad = gradient
        optimizer.step()
    optimizer.close()
    return [param.detach() for param in params]


#: fp32 tensors with 16-bit gradients and weights on the wire: parts of them are converted.
CONVERTED = {"gradient_dtype": "bf16", "image_dtype": "bf16"}
TCP = {"transport": "tcp"}


@pytest.mark.parametrize(("dtype", "options"), [(torch.bfloat16, {}), (torch.float32, {}), (torch.bfloat16, TCP), (torch.float32, CONVERTED)])
def test_threads_change_no_bit(dtype: torch.dtype, options: dict[str, str]) -> None:
    alone = trained(1, dtype, **options)
    assert not any(torch.equal(before, after) for before, after in zip(values(0, dtype), alone, strict=True))
    for threads in (2, 5):
        assert all(map(torch.equal, alone, trained(threads, dtype, **options)))
