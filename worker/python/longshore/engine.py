"""DeepSpeed's shape: ``longshore.initialize`` and an engine with ``forward``, ``backward`` and ``step``.

Gradients leave as backward makes them, servers add up the micro-steps and clip, as ZeRO-2 with offloading does.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longshore import optim
from longshore._config import Config
from longshore.errors import StateError, UsageError, invalid


class Engine(nn.Module):
    """A model that trains against optimizer servers.

    Attributes:
        module: the model.
        optimizer: its :class:`longshore.optim.Optimizer`.
        lr_scheduler: stepped with every optimizer step, if there is one.
        global_steps: optimizer steps so far; micro_steps: backward passes so far.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, lr_scheduler: Any, micro_steps: int) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.global_steps = optimizer.version
        self.micro_steps = 0
        self._accumulate = micro_steps
        self._before_boundary = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self.module(*args, **kwargs)

    def gradient_accumulation_steps(self) -> int:
        """How many backward passes a step has."""
        return self._accumulate

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the backward pass in hand, or the one just done, is a step's last one."""
        return self._before_boundary >= self._accumulate - 1

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Computes gradients, which leave as they are made.

        Args:
            loss: a scalar; its gradients are divided by the accumulation steps, unless ``scale_wrt_gas`` is False.

        Returns:
            The loss.
        """
        if self._before_boundary == self._accumulate:
            raise UsageError("the step's backward passes are done: call step() after each backward()")
        (loss / self._accumulate if scale_wrt_gas else loss).backward(retain_graph=retain_graph)
        self.micro_steps += 1
        self._before_boundary += 1
        return loss

    def step(self) -> None:
        """Makes the optimizer's step after the last backward pass of a step, and nothing after the others."""
        if self._before_boundary < self._accumulate:
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._before_boundary = 0
        self.global_steps += 1
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def get_global_grad_norm(self) -> float | None:
        """The global gradient norm of the last step, before clipping; None before the first."""
        return self.optimizer.grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Has the servers write a checkpoint of their state, and writes what is this side's: buffers, scheduler, counters and
        ``client_state`` (tensors and plain containers).

        Raises:
            RefusedError: if a server has no folder for checkpoints (``checkpoint_dir``), or no room.
        """
        name = tag or f"global_step{self.global_steps}"
        version = self.optimizer.flush()
        kept = self.optimizer.checkpoint(name)
        parameters = {name for name, _ in self.module.named_parameters()}
        state = {
            "optimizer": self.optimizer.state_dict(),
            "checkpoint": kept,
            "version": version,
            "buffers": {key: value for key, value in self.module.state_dict().items() if key not in parameters},
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            "global_steps": self.global_steps,
            "micro_steps": self.micro_steps,
            "client_state": dict(client_state or {}),
        }
        folder = Path(save_dir) / name
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "engine.pt")
        if save_latest:
            (Path(save_dir) / "latest").write_text(name)
        return True

    def load_checkpoint(self, load_dir: str | os.PathLike[str], tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
        """Goes on from what :meth:`save_checkpoint` wrote. The weights and the optimizer's state are on the servers.

        Returns:
            The path, and the ``client_state``; None and an empty one if there is no checkpoint.

        Raises:
            StateError: if the servers are at another version than the checkpoint, naming both and what to do.
        """
        latest = Path(load_dir) / "latest"
        if tag is None and not latest.exists():
            return None, {}
        name = tag or latest.read_text().strip()
        path = Path(load_dir) / name / "engine.pt"
        state = torch.load(path, weights_only=True, map_location="cpu")
        self.optimizer.open()
        if state["version"] != self.optimizer.version:
            raise invalid(
                "checkpoint.version",
                state["version"],
                f"{self.optimizer.version}, which the servers have",
                f"`longshore restore --job {self.optimizer.job} --name {state['checkpoint']}` brings them back to it; without it, "
                "do not load and go on from the servers' version",
                StateError,
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.module.load_state_dict(state["buffers"], strict=False)
        if self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.global_steps, self.micro_steps = state["global_steps"], state["micro_steps"]
        return str(path), state["client_state"]

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Writes the model's ``state_dict`` with its newest weights, those in fp32 as bf16."""
        self.optimizer.flush()
        folder = Path(save_dir)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            key: value.to(torch.bfloat16) if value.dtype is torch.float32 else value
            for key, value in self.module.state_dict().items()
        }
        torch.save(weights, folder / save_filename)
        return True

    def destroy(self) -> None:
        """Ends the optimizer's job here, as :meth:`longshore.optim.Optimizer.close` says."""
        self.optimizer.close()


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: optim.Optimizer | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Any = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Engine, optim.Optimizer, Any, Any]:
    """Builds an engine as ``deepspeed.initialize`` does.

    Args:
        args: its ``deepspeed_config`` is the config, if there is no ``config``.
        model: the model, on its device.
        optimizer: an optimizer of this package, where the config names none.
        model_parameters: what to train; by default ``model.named_parameters()``.
        training_data: a dataset; the loader that is returned makes micro-batches of it.
        lr_scheduler: a scheduler of torch, or a function that makes one from the optimizer.
        config: a dict or a JSON file in DeepSpeed's format. Every key is used, or refused with its path.
            ``"longshore": {"servers": ..., "job": ...}`` has the options of :class:`longshore._options.Options`.

    Returns:
        Engine, optimizer, data loader (or None), scheduler (or None).

    Raises:
        InvalidError: naming a config path, its value, the limit and the remedy.
    """
    if model is None:
        raise invalid("model", None, "given", "pass model=")
    config = getattr(args, "deepspeed_config", None) if config is None else config
    if config is None:
        raise invalid("config", None, "given", "pass config=, a dict or the path of a JSON file")
    settings = Config.of(config if isinstance(config, Mapping) else json.loads(Path(config).read_text()))
    if settings.is_bf16:
        model.to(torch.bfloat16)
    if optimizer is None:
        params = model_parameters if model_parameters is not None else model.named_parameters()
        optimizer = settings.optimizer(params)
    elif settings.optimizer_type is not None:
        raise invalid("optimizer", type(optimizer).__name__, "given once", "pass optimizer= or name one in the config")
    if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(optimizer)
    loader = None
    if training_data is not None:
        loader = torch.utils.data.DataLoader(training_data, settings.micro_batch, shuffle=True, collate_fn=collate_fn)
    return Engine(model, optimizer, lr_scheduler, settings.micro_steps), optimizer, loader, lr_scheduler
