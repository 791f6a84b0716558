"""What callers ask of an engine, under DeepSpeed's names."""

import os
from typing import Any

import torch
from torch import nn

from longshore import optim
from longshore._config import Config


class Asked(nn.Module):
    """The part of an engine that says how it trains."""

    module: nn.Module
    optimizer: optim.Optimizer
    _config: Config

    def train_batch_size(self) -> int:
        """Examples a step, of all ranks."""
        return self._config.batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Examples of one backward pass of one rank."""
        return self._config.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """How many backward passes a step has."""
        return self._config.micro_steps

    def gradient_clipping(self) -> float:
        """The largest global gradient norm; 0 for no clipping."""
        return self.optimizer.max_grad_norm or 0.0

    def get_global_grad_norm(self) -> float | None:
        """The global gradient norm of the last step, before clipping; None before the first."""
        return self.optimizer.grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each param group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_type(self) -> str | None:
        """The optimizer's type in the config."""
        return self._config.optimizer_type

    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return self.optimizer.loss_scale

    cur_scale = property(loss_scale)

    def dynamic_loss_scale(self) -> bool:
        """Whether that changes with overflows."""
        return self.fp16_enabled() and self._config.job["loss_scale"].dynamic

    def fp16_enabled(self) -> bool:
        """Whether the model was cast to fp16."""
        return self._config.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the model was cast to bf16."""
        return self._config.dtype is torch.bfloat16

    def zero_optimization_stage(self) -> int:
        """The stage of the config."""
        return self._config.stage

    def zero_optimization(self) -> bool:
        """Whether that is above 0."""
        return self._config.stage > 0

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.module.parameters()).device

    @property
    def global_rank(self) -> int:
        return self.optimizer.rank[0]

    @property
    def world_size(self) -> int:
        return self.optimizer.rank[1]

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))
