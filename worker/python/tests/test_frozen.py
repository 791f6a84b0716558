"""Frozen parameters on servers: a run of low-rank adapters over an untrained base."""

import pathlib

import pytest
import torch
from conftest import running
from models import same_bits, train
from torch import Tensor, nn
from units import Lora

import longshore
from longshore import errors

WIDTH = 96


class Adapted(nn.Sequential):
    """Frozen linear layers with adapters of rank 4 beside them."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(*[Lora(nn.Linear(WIDTH, WIDTH), 4) for _ in range(3)])

    def loss(self, step: int) -> Tensor:
        given = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        return (self(given) - given.roll(1, dims=1)).square().mean()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"tier": "memory", "shard_elements": 65536}])
def test_adapters_train_as_torchs_and_the_base_stays(options: dict[str, object]) -> None:
    ours, theirs = Adapted(), Adapted()
    start = ours.weights()
    mine = longshore.AdamW(ours.named_parameters(), lr=1e-2, frozen="keep", **options)
    train(ours, mine, range(10))
    train(theirs, torch.optim.AdamW(theirs.named_parameters(), lr=1e-2), range(10))
    mine.flush()
    expected = theirs.weights()
    for name, found in ours.weights().items():
        assert torch.equal(found, start[name]) is (".base." in name), name
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-7)
    trained = [number for number, (_, parameter) in enumerate(ours.named_parameters()) if parameter.requires_grad]
    assert [*mine.state_dict(full=True)["state"]] == trained, "frozen weights have no moments"


def test_a_new_process_gets_the_base_too_also_from_a_checkpoint(tmp_path: pathlib.Path) -> None:
    with running("--checkpoint-dir", str(tmp_path / "kept")) as address:
        first, other, back = Adapted(), Adapted(seed=1), Adapted(seed=2)
        options = {"servers": address, "job": "lora", "lr": 1e-2, "frozen": "keep"}
        optimizer = longshore.AdamW(first.named_parameters(), **options)
        train(first, optimizer, range(3))
        optimizer.checkpoint("three")
        saved, kept = optimizer.state_dict(), first.weights()
        train(first, optimizer, range(3, 5))
        optimizer.close()
        longshore.AdamW(other.named_parameters(), **options).close()
        assert same_bits(other, first)
        again = longshore.AdamW(back.named_parameters(), **options)
        again.load_state_dict(saved)
        assert again.version == 3
        assert all(torch.equal(found, kept[name]) for name, found in back.weights().items())


def test_a_base_that_the_job_rounds_is_read_before_the_first_forward() -> None:
    options = {"lr": 1e-2, "frozen": "keep", "streaming": True, "image_dtype": "bf16"}
    late, early = Adapted(), Adapted()
    with pytest.raises(errors.UsageError, match=r"0\.base\.weight.*optimizer\.open\(\)"):
        train(late, longshore.AdamW(late.named_parameters(), **options), range(1))
    start = early.weights()
    optimizer = longshore.AdamW(early.named_parameters(), **options)
    optimizer.open()
    train(early, optimizer, range(3))
    optimizer.flush()
    for name, found in early.weights().items():
        assert torch.equal(found, start[name].bfloat16().float()) is (".base." in name), name
