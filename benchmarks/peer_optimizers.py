"""Optimizers of torch, torchao and DeepSpeed for ``peer_ways.py``."""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LR, CLIP = 1e-4, 1.0
_HOST = torch.device("cpu")


class WithCasts:
    """An optimizer of fp32 masters, with the casts that 16-bit weights and gradients need.

    Args:
        device: device of the masters. Between masters on the host and parameters on an accelerator, 16-bit values pass through page-locked
            memory.
    """

    def __init__(
        self, params: list[tuple[str, nn.Parameter]], make: Callable[[list[Tensor]], Any], device: torch.device = _HOST
    ) -> None:
        self._params = [parameter for _, parameter in params]
        self._masters = [parameter.detach().to(device, torch.float32, copy=True) for parameter in self._params]
        self._gradients = [torch.empty_like(master) for master in self._masters]
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        self._staged = [
            torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
            for parameter in self._params
            if parameter.device.type != device.type
        ]
        self._optimizer = make(self._masters)

    @torch.no_grad()
    def step(self) -> None:
        gradients = [parameter.grad for parameter in self._params if parameter.grad is not None]
        if self._staged:
            torch._foreach_copy_(self._staged, gradients, non_blocking=True)
            torch.accelerator.synchronize()
        torch._foreach_copy_(self._gradients, self._staged or gradients)
        nn.utils.clip_grad_norm_(self._masters, CLIP, foreach=True)
        self._optimizer.step()
        if self._staged:
            torch._foreach_copy_(self._staged, self._masters)
        torch._foreach_copy_(self._params, self._staged or self._masters, non_blocking=True)


def torch_default(masters: list[Tensor]) -> Any:
    """Returns torch's optimizer with its default choice of an implementation."""
    return torch.optim.AdamW(masters, lr=LR)


def torch_fused(masters: list[Tensor]) -> Any:
    return torch.optim.AdamW(masters, lr=LR, fused=True)


def deepspeed_adam(masters: list[Tensor]) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(masters, lr=LR, weight_decay=1e-2, adamw_mode=True)


def torchao_offload(model: nn.Module) -> Any:
    """Returns torchao's optimizer. Its weights and state have the model's type, here 16 bits, and it cannot clip."""
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, lr=LR)


def pinned(device: torch.device) -> dict[str, Any]:
    """Returns DeepSpeed's setting of an offload to the host, page-locked if a device copies from there."""
    return {"device": "cpu", "pin_memory": device.type != "cpu"}


def engine_of(model: nn.Module, batch: int, zero: dict[str, Any]) -> Any:
    """Returns DeepSpeed's own engine on its accelerator, or on the CPU without one."""
    import deepspeed

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 1e-2}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def by_engine(engine: Any) -> Callable[[Tensor], None]:
    def finish(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return finish


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, start: Tensor, gradients: list[Tensor], *params: Tensor) -> Tensor:
        context.gradients = gradients
        return start.clone()

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *context.gradients


class _Given(nn.Module):
    """Parameters with existing gradients: backward computes nothing, and hands them over."""

    def __init__(self, params: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self.params = nn.ParameterList([parameter for _, parameter in params])
        self._gradients = [parameter.grad for parameter in self.params]
        for parameter in self.params:
            parameter.grad = None

    def forward(self, start: Tensor) -> Tensor:
        loss: Tensor = _HandOver.apply(start, self._gradients, *self.params)  # type: ignore[no-untyped-call]
        return loss


class GivenToEngine:
    """DeepSpeed's engine from gradients to weights: its hooks take gradients in backward."""

    def __init__(self, params: list[tuple[str, nn.Parameter]], device: torch.device) -> None:
        zero = {"stage": 2, "offload_optimizer": pinned(device), "overlap_comm": False}
        self._engine = engine_of(_Given(params), 1, zero)
        self._start = torch.zeros((), device=device, requires_grad=True)

    def step(self) -> None:
        self._engine.backward(self._engine(self._start))
        self._engine.step()
