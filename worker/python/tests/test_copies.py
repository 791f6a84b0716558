"""Copies of gradients and weights give the same bits on any number of threads, for all lengths and types of tensors."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import longshore

#: The first two are cut into parts, one of which ends inside a line. Between parameters there is padding.
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


#: 16-bit gradients and weights of fp32 tensors are converted in parts.
CONVERTED = {"gradient_dtype": "bf16", "image_dtype": "bf16"}
TCP = {"transport": "tcp"}


@pytest.mark.parametrize(("dtype", "options"), [(torch.bfloat16, {}), (torch.float32, {}), (torch.bfloat16, TCP), (torch.float32, CONVERTED)])
def test_threads_change_no_bit(dtype: torch.dtype, options: dict[str, str]) -> None:
    alone = trained(1, dtype, **options)
    assert not any(torch.equal(before, after) for before, after in zip(values(0, dtype), alone, strict=True))
    for threads in (2, 5):
        assert all(map(torch.equal, alone, trained(threads, dtype, **options)))
