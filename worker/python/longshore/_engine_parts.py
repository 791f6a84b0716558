"""What ``initialize`` puts an engine together from: optimizer, scheduler and loader."""

from typing import Any

import torch
from torch import nn

from longshore import _shard, optim
from longshore._config import Config
from longshore.errors import invalid


def optimizer(given: Any, params: Any, settings: Config) -> optim.Optimizer:
    """The one that was passed, or that the configuration names."""
    if given is None:
        return settings.optimizer(params)
    if settings.optimizer_type is not None:
        raise invalid("optimizer", type(given).__name__, "given once", "pass optimizer= or name one in the config")
    made = given if isinstance(given, torch.optim.Optimizer) else given(params)
    if not isinstance(made, optim.Optimizer):
        remedy = "pass longshore's of the same name, or name optimizer.type in the config"
        raise invalid("optimizer", type(made).__name__, "an optimizer of longshore", remedy)
    if settings.is_clip_given and settings.clip != made.max_grad_norm:
        limit = f"{made.max_grad_norm}, the max_grad_norm of the optimizer that was passed"
        raise invalid("gradient_clipping", settings.clip, limit, "leave it out of the config, or give the optimizer the same")
    streams, accumulate = made.accumulates
    if streams and accumulate != settings.micro_steps:
        limit = f"{accumulate}, the accumulate= of the optimizer that was passed"
        raise invalid("gradient_accumulation_steps", settings.micro_steps, limit, "give the optimizer the same")
    return made


def scheduler(given: Any, optimizer: optim.Optimizer, settings: Config) -> Any:
    """The one that was passed, or that the configuration names; None without either."""
    if given is None:
        return settings.scheduler(optimizer)
    if settings.scheduler_type is not None:
        raise invalid("scheduler", type(given).__name__, "given once", "pass lr_scheduler= or name one in the config")
    return given if hasattr(given, "step") else given(optimizer)


#: DeepSpeed's default of stage3_max_live_parameters.
_LIVE = 10**9


def shard(model: nn.Module, optimizer: optim.Optimizer, settings: Config) -> None:
    """Cuts the model into units, in stage 3. By default it goes to the accelerator, if there is one."""
    if settings.shard is None or optimizer.is_in_units:
        return
    given = dict(settings.shard)
    if "device" not in given and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        given["device"] = torch.device(accelerator.type, torch.accelerator.current_device_index())
    live = given.pop("live", None)
    if "budget" not in given:
        largest = max((p for p in model.parameters()), key=lambda p: p.element_size())
        is_on_host = torch.device(given.get("device", largest.device)).type == "cpu"
        live = live if live is not None else _LIVE if is_on_host else None
        given["budget"] = int(live * largest.element_size()) if live is not None else None
    _shard.shard(model, optimizer, **given)


def loader(data: Any, optimizer: optim.Optimizer, collate_fn: Any, settings: Config) -> Any:
    """Micro-batches of a dataset, each rank's own."""
    rank, world_size = optimizer.rank
    sampler: Any = torch.utils.data.DistributedSampler(data, world_size, rank) if world_size > 1 else None
    return torch.utils.data.DataLoader(
        data,
        settings.micro_batch,
        shuffle=sampler is None,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=settings.drops_last,
    )
