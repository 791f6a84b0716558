"""Frozen parameters on servers: a run of low-rank adapters over an untrained base."""

import pathlib

import pytest
import torch
from conftest import job_on, running
from torch import Tensor, nn

import longshore
from longshore import errors

WIDTH, LAYERS, BATCH = 96, 3, 8


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 4 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        return self.base(given) + self.up(self.down(given))


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[Adapted() for _ in range(LAYERS)]).to(dtype)


def loss(of: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    dtype = next(of.parameters()).dtype
    given = torch.randn(BATCH, WIDTH, generator=generator).to(dtype)
    return (of(given) - given.roll(1, dims=1)).float().square().mean()


def steps(of: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        loss(of, step).backward()
        optimizer.step()


def weights(of: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in of.named_parameters()}


def is_base(name: str) -> bool:
    return ".base." in name


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"tier": "memory", "shard_elements": 65536}])
def test_adapters_train_as_torchs_and_the_base_stays(options: dict[str, object]) -> None:
    ours, theirs = model(), model()
    start = weights(ours)
    mine = longshore.AdamW(ours.named_parameters(), lr=1e-2, frozen="keep", **options)
    torchs = torch.optim.AdamW(theirs.named_parameters(), lr=1e-2)
    steps(ours, mine, range(10))
    steps(theirs, torchs, range(10))
    mine.flush()
    expected = weights(theirs)
    for name, found in weights(ours).items():
        if is_base(name):
            assert torch.equal(found, start[name]), name
        else:
            torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-7)
            assert not torch.equal(found, start[name]), name


def test_a_new_process_gets_the_base_too(servers: str) -> None:
    first, other = model(), model(seed=1)
    options = {"servers": servers, "job": "lora", "lr": 1e-2, "frozen": "keep"}
    optimizer = longshore.AdamW(first.named_parameters(), **options)
    steps(first, optimizer, range(4))
    optimizer.close()
    longshore.AdamW(other.named_parameters(), **options)
    expected = weights(first)
    for name, found in weights(other).items():
        assert torch.equal(found, expected[name]), name


def test_a_checkpoint_brings_the_base_back(tmp_path: pathlib.Path) -> None:
    with running("--checkpoint-dir", str(tmp_path / "kept")) as address:
        of, other = model(), model(seed=1)
        options = {"servers": address, "job": "lora", "lr": 1e-2, "frozen": "keep"}
        optimizer = longshore.AdamW(of.named_parameters(), **options)
        steps(of, optimizer, range(3))
        optimizer.checkpoint("three")
        saved, expected = optimizer.state_dict(), weights(of)
        steps(of, optimizer, range(3, 5))
        optimizer.close()
        back = longshore.AdamW(other.named_parameters(), **options)
        back.load_state_dict(saved)
        assert back.version == 3
        for name, found in weights(other).items():
            assert torch.equal(found, expected[name]), name


def reserved(rows: int) -> int:
    """Returns the bytes that a server reserves for a bf16 base of this many rows of 256, with an adapter."""
    with running(memory="512MiB") as address:
        base, adapter = nn.Linear(256, rows, bias=False).bfloat16(), nn.Linear(256, 4).bfloat16()
        base.requires_grad_(False)
        named = [*base.named_parameters("base"), *adapter.named_parameters("adapter")]
        options = {"servers": address, "job": "lora", "frozen": "keep", "shard_elements": 4 * 65536}
        longshore.AdamW(named, lr=1e-2, **options).open()
        return job_on(address)["memory_bytes"]


def test_the_base_takes_two_bytes_an_element() -> None:
    small, large = 1024, 16 * 1024
    assert reserved(large) - reserved(small) == 2 * 256 * (large - small)


def test_what_is_thawed_later_is_named() -> None:
    of = model()
    optimizer = longshore.AdamW(of.named_parameters(), lr=1e-2, frozen="keep")
    steps(of, optimizer, range(2))
    of[1].base.weight.requires_grad_(True)
    with pytest.raises(errors.UsageError, match=r"1\.base\.weight.*frozen, as when the job was opened.*new optimizer"):
        steps(of, optimizer, range(2, 3))


def test_other_words_are_refused() -> None:
    with pytest.raises(errors.InvalidError, match="frozen"):
        longshore.AdamW(model().named_parameters(), frozen="drop")


def test_a_base_that_the_job_rounds_is_read_before_the_first_forward() -> None:
    options = {"lr": 1e-2, "frozen": "keep", "streaming": True, "image_dtype": "bf16"}
    late = model()
    with pytest.raises(longshore.errors.UsageError, match=r"0\.base\.weight.*optimizer\.open\(\)"):
        steps(late, longshore.AdamW(late.named_parameters(), **options), range(1))
    early = model()
    start = weights(early)
    optimizer = longshore.AdamW(early.named_parameters(), **options)
    optimizer.open()
    steps(early, optimizer, range(3))
    optimizer.flush()
    for name, found in weights(early).items():
        assert torch.equal(found, start[name].bfloat16().float()) is is_base(name), name
