"""A rank of test_shard_frozen.py with a base in units, beside unit_rank.py: loads another base, generates, ends."""

import contextlib
import gc
import os
from typing import Any

import torch
from torch import distributed
from unit_rank import OTHERS, model_of, run

import longshore


def loaded(options: dict[str, Any]) -> dict[str, Any]:
    """Loads another base, or the one that ``what`` names, between the job's opening and ``shard``. Returns the losses of a model in one
    piece with these weights, of training and of evaluation. Also returns the names of weights that differ from the loaded ones."""
    rank, what, budget = distributed.get_rank(), options.pop("what"), options.pop("budget")
    model = model_of("adapters")
    optimizer = longshore.AdamW(model.named_parameters(), streaming=True, **options)
    optimizer.open()
    with torch.no_grad():
        if what == "element":
            # The element lies in the part of rank 0, and no version counter changes.
            model.layers[1].base.weight.data[0, 0] += 1.0
        elif what != "same" and (what == "all" or rank == 1):
            model.load_state_dict({name: value * 2.0 if ".base." in name else value for name, value in model.state_dict().items()})
        else:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    expected, base = model.loss(0).item(), {name: value.clone() for name, value in model.state_dict().items() if ".base." in name}
    assert optimizer._connection is not None
    job = optimizer._connection.job
    job.frozen_bytes = 0
    longshore.shard(model, optimizer, budget, weights="gathered")
    compared = job.frozen_bytes
    trained = model.loss(0).item()
    model.eval()
    with torch.no_grad():
        evaluated = model.loss(0).item()
    model.train()
    state = model.state_dict()
    differ = [name for name, value in base.items() if not torch.equal(state[name], value)]
    model.loss(1).backward()
    optimizer.step()
    distributed.barrier()
    optimizer.close()
    asked = job.frozen_bytes - compared
    return {"losses": [expected, trained, evaluated], "differ": differ, "compared": compared, "asked": asked}


def refused(options: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 loads other weights of trained layers once the job is open. Returns the answer of ``shard``."""
    budget = options.pop("budget")
    model = model_of("adapters")
    optimizer = longshore.AdamW(model.named_parameters(), streaming=True, **options)
    optimizer.open()
    if distributed.get_rank() == 1:
        model.load_state_dict({name: value if ".base." in name else value + 1.0 for name, value in model.state_dict().items()})
    try:
        longshore.shard(model, optimizer, budget, weights="gathered")
    except longshore.errors.UsageError as error:
        return {"said": str(error)}
    return {"said": "nothing"}


def llama() -> Any:
    """Returns a small Llama of which the first layer's norms train."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name and "norm" in name)
    return model


def generates(options: dict[str, Any]) -> dict[str, Any]:
    """Trains, and generates a number of tokens unlike other ranks', in evaluation and in training mode. Returns the bytes asked of servers.
    """
    rank, budget = distributed.get_rank(), options.pop("budget")
    model = llama()
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, **options)
    sharded = longshore.shard(model, optimizer, budget, weights="gathered")
    prompt = torch.tensor([[1, 17 + rank, 35]])

    def step() -> None:
        model(input_ids=prompt, labels=prompt).loss.backward()
        optimizer.step()

    step()
    plain = llama().eval()
    plain.load_state_dict(model.state_dict())
    made, asked = [], []
    for is_training in (False, True):
        model.train(is_training)
        before = sharded.pulled_bytes
        made.append(model.generate(prompt, max_new_tokens=2 + 5 * rank, do_sample=False))
        distributed.barrier()  # as when a rank collects all ranks' results
        asked.append(sharded.pulled_bytes - before)
    expected = plain.generate(prompt, max_new_tokens=2 + 5 * rank, do_sample=False)
    model.train()
    before = sharded.pulled_bytes
    step()
    trained = sharded.pulled_bytes - before
    optimizer.close()
    return {"made": made, "expected": expected, "asked": asked, "trained": trained}


def ended(options: dict[str, Any]) -> dict[str, Any]:
    """Ends in a way that not all ranks can learn of. Returns the bytes of frozen weights that a rank asked for during the end and in a
    later evaluation, and the differences in its model."""
    rank, how = distributed.get_rank(), options.pop("how")
    model = model_of("adapters")
    optimizer = longshore.AdamW(model.named_parameters(), streaming=True, **options)
    sharded = longshore.shard(model, optimizer, 3_000_000, weights="gathered")
    model.loss(rank).backward()
    optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert optimizer._connection is not None
    job = optimizer._connection.job
    distributed.barrier()
    asked = job.frozen_bytes
    if how == "gone":
        del optimizer
        gc.collect()
    elif how == "one fails" and rank == 2:
        try:
            raise ValueError("a batch is broken")
        except ValueError:
            optimizer.close()
    elif how == "one steps on" and rank == 2:
        model.loss(rank)
        with contextlib.suppress(longshore.errors.UsageError):
            optimizer._units.meet()  # as step() does
        optimizer.close()
    else:
        optimizer.close()
    ended = job.frozen_bytes - asked
    sharded.release()
    differ = [name for name, value in model.state_dict().items() if not torch.equal(value, state[name])]
    return {"differ": differ, "asked": ended, "later": job.frozen_bytes - asked - ended}


if __name__ == "__main__":
    OTHERS.update({"loaded": loaded, "refused": refused, "ended": ended, "generates": generates})
    run()
