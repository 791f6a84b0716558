"""On a GPU, a model larger than its budget has the bits of the model in one piece, and stays within the budget."""

import copy
import functools
import pathlib
from typing import Any

import pytest
import torch
from gpu import DEVICE, LATE, Gpu, OnGpu, needs_a_gpu, on
from models import pair
from test_stage_3 import config, counting, llama, stage_2
from torch.utils.checkpoint import checkpoint
from units import Accountant, optimizer_of, same, train, weight_bytes

import longshore

pytestmark = needs_a_gpu
#: Most bytes of activations.
ACTIVATIONS = 8 << 20


WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, from shared memory": {"transport": "memfd"},
    "delayed": {"delay": 1, "warmup_steps": 1},
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("way", WAYS)
def test_units_have_the_bits_of_the_whole(way: str, late: str) -> None:
    whole, cut = pair(OnGpu, depth=24)
    gpu = Gpu(late)
    with on(gpu):
        plain = optimizer_of(whole.to(DEVICE), **WAYS[way])
        train(whole, plain)
        plain.flush()
        cut.gpu = gpu
        budget = weight_bytes(cut) // 3
        accountant = Accountant(cut)
        optimizer = optimizer_of(cut, **WAYS[way])
        sharded = longshore.shard(cut, optimizer, budget, device=DEVICE)
        with accountant:
            train(cut, optimizer)
        accountant.check(budget)
        optimizer.flush()
        same(whole, cut)
        assert sharded.fetched_bytes > 2 * weight_bytes(cut), "units have come and gone"
        optimizer.close()
        plain.close()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_allocator_gives_no_more_than_the_budget(reentrant: bool | None) -> None:
    """Measured by the device's allocator, with and without activation checkpointing, for a model of eight times the budget."""
    whole, cut = pair(OnGpu, depth=64, width=2048)
    if reentrant is not None:
        cut.call = functools.partial(checkpoint, use_reentrant=reentrant)
    with on(Gpu()):
        plain = optimizer_of(whole.to(DEVICE))
        train(whole, plain, steps=3)
        same_as = copy.deepcopy(whole).cpu()
        plain.close()
        del plain, whole
        torch.cuda.empty_cache()
        budget = weight_bytes(cut) // 8
        optimizer = optimizer_of(cut)
        sharded = longshore.shard(cut, optimizer, budget, device=DEVICE)
        train(cut, optimizer, steps=1)
        sharded.release()
        torch.cuda.synchronize()
        # The workspace of CUDA's matrix products is allocated by now, and does not count.
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(cut, optimizer, steps=2, first=1)
        most = torch.cuda.max_memory_allocated() - before
        assert budget // 2 < most <= budget + ACTIVATIONS, f"{most / 1e6:.1f} MB, budget {budget / 1e6:.1f} MB"
        optimizer.flush()
        same(same_as, cut)
        optimizer.close()


@pytest.mark.filterwarnings("ignore:without effect here")
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_llama_by_the_configuration_of_deepspeed(device: str, tmp_path: pathlib.Path) -> None:
    """An engine of stage 3 with both offloads moves the model to the GPU, with the losses and weights of stage 2 there."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    offloaded = {"device": "nvme", "nvme_path": str(tmp_path)} if device == "nvme" else {"device": "cpu"}
    zero = {"offload_optimizer": offloaded, "offload_param": offloaded}
    whole, cut = llama(), llama()
    budget = {"longshore": {"budget": weight_bytes(cut) * 2 // 3}}
    data = counting()
    losses = []
    with on(Gpu()):
        for model, given in ((whole.to(DEVICE), stage_2()), (cut, config(zero=zero, **budget))):
            engine = longshore.initialize(model=model, config=given)[0]
            of_engine = []
            for step in range(8):
                rows = [data[4 * step + row] for row in range(4)]
                loss = engine(**{key: torch.stack([row[key] for row in rows]).to(DEVICE) for key in rows[0]}).loss
                engine.backward(loss)
                engine.step()
                of_engine.append(loss.item())
            losses.append(of_engine)
            found = {name: value.cpu().clone() for name, value in engine.module.state_dict().items()}
            engine.destroy()
            if model is whole:
                expected = found
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert all(torch.equal(found[name], value) for name, value in expected.items())
