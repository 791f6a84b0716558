"""DeepSpeed's interface: ``longshore.initialize`` and an engine with ``forward``, ``backward`` and ``step``.

Gradients leave as backward makes them; servers add up the micro-steps and clip, as ZeRO-2 with offloading does.
"""

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from longshore import optim
from longshore.deepspeed import files
from longshore.deepspeed.config import Config
from longshore.errors import UsageError, invalid, warn
from longshore.transfer import params as _params
from longshore.units.shard import shard

__all__ = ["Engine", "initialize"]


def optimizer_of(given: Any, params: Any, settings: Config) -> optim.Optimizer:
    """Returns the passed optimizer, or the configuration's."""
    if given is None:
        return settings.optimizer(params, optim.RULES)
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


def scheduler_of(given: Any, optimizer: optim.Optimizer, settings: Config) -> Any:
    """Returns the passed scheduler, or the configuration's; None without either."""
    if given is None:
        return settings.scheduler(optimizer)
    if settings.scheduler_type is not None:
        raise invalid("scheduler", type(given).__name__, "given once", "pass lr_scheduler= or name one in the config")
    return given if hasattr(given, "step") else given(optimizer)


def loader_of(data: Any, optimizer: optim.Optimizer, collate_fn: Any, settings: Config) -> Any:
    """Returns a loader of a dataset's micro-batches, for this rank's part."""
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


def _advance(scheduler: LRScheduler, steps: int) -> None:
    """Makes the steps of a scheduler that an earlier process has made."""
    with warnings.catch_warnings():
        # torch warns of a scheduler's step before the optimizer's first step. Here an earlier process has made that
        # step.
        warnings.filterwarnings("ignore", "Detected call of", UserWarning)
        try:
            for _ in range(steps):
                scheduler.step()
        except ValueError as error:  # OneCycleLR raises after its last step
            remedy = "give it the steps of the whole run, or name another job= for a new run"
            raise invalid("lr_scheduler", f"{type(scheduler).__name__} ({error})", f"one of at least {steps} steps, as the job has", remedy) from error


class Engine(nn.Module):
    """A model that trains against optimizer servers.

    Attributes:
        module: the model. Attributes that the engine lacks are looked up in it.
        optimizer: its :class:`longshore.optim.Optimizer`.
        lr_scheduler: stepped with every optimizer step that was not skipped, if there is one.
        global_steps: optimizer steps so far; micro_steps: backward passes so far; skipped_steps: steps that overflowed.
        global_samples: examples so far, of all ranks.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, lr_scheduler: Any, config: Config) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._config = config
        self._go_on()
        #: Number of backward passes of the current step, and number of calls of step() since the step began.
        self._passes = self._calls = 0
        #: True if a backward pass was interrupted, so that nobody knows which gradients of the step were sent.
        self._is_broken_off = False
        self._forced_boundary: bool | None = None
        self._was_applied = False

    def _go_on(self) -> None:
        """Takes counters and schedule from a job that an earlier process has trained."""
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        is_untold, made, applied = not optimizer._is_version_known, optimizer.global_step, int(optimizer._applied)
        # A job that was filled with state counts the updates that made the state. The count may exceed the job's steps.
        self.global_steps = max(made, applied)
        self.skipped_steps = self.global_steps - applied
        self.micro_steps = self.global_steps * self._config.micro_steps
        self.global_samples = self.global_steps * self.train_batch_size()
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            if scheduler.last_epoch == 0:
                _advance(scheduler, applied)
        elif scheduler is not None and is_untold:
            optimizer._is_version_known = False  # makes the first step warn of earlier steps

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    # Getters under DeepSpeed's names

    def train_batch_size(self) -> int:
        """Returns the examples a step, of all ranks."""
        return self._config.batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the examples of one backward pass on one rank."""
        return self._config.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Returns the backward passes a step."""
        return self._config.micro_steps

    def gradient_clipping(self) -> float:
        """Returns the largest global gradient norm; 0 for no clipping."""
        return self.optimizer.max_grad_norm or 0.0

    def get_global_grad_norm(self) -> float | None:
        """Returns the global gradient norm of the last step, before clipping; None before the first."""
        return self.optimizer.grad_norm

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Returns the momentum, or the betas, of each param group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_type(self) -> str | None:
        """Returns the optimizer's type in the config."""
        return self._config.optimizer_type

    def loss_scale(self) -> float:
        """Returns the factor of the next loss."""
        return self.optimizer.loss_scale

    cur_scale = property(loss_scale)

    def dynamic_loss_scale(self) -> bool:
        """Returns whether the loss scale changes with overflows."""
        return self.fp16_enabled() and self._config.job["loss_scale"].dynamic

    def fp16_enabled(self) -> bool:
        """Returns whether the model was cast to fp16."""
        return self._config.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Returns whether the model was cast to bf16."""
        return self._config.dtype is torch.bfloat16

    def zero_optimization_stage(self) -> int:
        """Returns the config's stage."""
        return self._config.stage

    def zero_optimization(self) -> bool:
        """Returns whether the stage is above 0."""
        return self._config.stage > 0

    @property
    def device(self) -> torch.device:
        """The model's device."""
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

    # A step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output."""
        if self._config.casts_inputs:
            args, kwargs = _cast(args), _cast(kwargs)
        kind = self._config.autocast
        with contextlib.nullcontext() if kind is None else torch.autocast(self.device.type, dtype=kind):
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Computes gradients, which leave during backward.

        Args:
            loss: a scalar; its gradients are divided by the accumulation steps, unless ``scale_wrt_gas`` is False.

        Returns:
            The loss.

        Raises:
            UsageError: if the step's backward passes are done, or one of them was interrupted.
        """
        scaled = self.scale(loss, scale_wrt_gas)
        try:
            scaled.backward(retain_graph=retain_graph)
        except BaseException:
            self.micro_steps -= 1
            self._passes -= 1
            self._is_broken_off = True
            raise
        return loss

    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        """Returns the loss for a separate ``backward()``: multiplied by the loss scale, and divided by the accumulation steps.

        Raises:
            UsageError: if the step's backward passes are done, or one of them was interrupted.
        """
        self._check_whole()
        self._notice_given_up()
        if self._passes == self._config.micro_steps:
            raise UsageError(
                "the step's backward passes are done: call engine.step() after each engine.backward(), or engine.zero_grad() where one was "
                "interrupted"
            )
        self.micro_steps += 1
        self._passes += 1
        scale = self.optimizer.loss_scale
        scaled = loss if scale == 1.0 else loss.float() * scale
        return scaled / self._config.micro_steps if scale_wrt_gas else scaled

    def _check_whole(self) -> None:
        if self._is_broken_off:
            raise UsageError(
                "a backward pass of this step was interrupted, and some of its gradients may be in the step: "
                + (
                    "call engine.zero_grad(), which gives the step up, and compute its passes again"
                    if self.world_size == 1
                    else "other ranks wait for this step, so end all ranks and start them again, and they go on from the last one"
                )
            )

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Makes the optimizer's step after a step's last backward pass. Does nothing after the others.

        Raises:
            UsageError: if no backward pass precedes, or one was interrupted.
        """
        self._check_whole()
        self._notice_given_up()
        if self._passes == self._calls:
            raise UsageError(
                "no backward pass came before step(): call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._was_applied = False
        if not self.is_gradient_accumulation_boundary():
            self._calls += 1
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._passes = self._calls = 0
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        report = self.optimizer.last_report
        self._was_applied = report is None or not report.skipped
        if not self._was_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether the next ``step()`` ends a step."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return not self._config.is_managed or self._calls + 1 >= self._config.micro_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether the next ``step()`` ends a step, in place of the count. A step may have fewer backward passes, not more."""
        self._forced_boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Returns whether the last ``step()`` updated the weights."""
        return self._was_applied

    def no_sync(self) -> Any:
        """Raises as DeepSpeed does with ZeRO-2, since gradients leave in each backward pass."""
        raise UsageError("gradients leave in each backward pass, and servers add them up: leave no_sync() out")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Abandons the current step and the gradients of its backward passes that servers have. After a step nothing is left to clear. With
        several ranks sent gradients stay in the step, since the others wait for it."""
        passes = self._passes
        is_between = self._calls == passes > 0 and not self._is_broken_off
        self.module.zero_grad(set_to_none)
        self.optimizer.zero_grad(set_to_none)
        if not self._begin_anew():
            return
        self.micro_steps -= passes
        if is_between:
            self._warn_of_given_up(passes)

    def _notice_given_up(self) -> None:
        """Begins the step anew if the optimizer's own zero_grad() has abandoned the step's backward passes."""
        passes = self._passes
        # A parameter's first gradient after unfreezing stays in ``.grad`` until the step: no hook sees it earlier.
        left = any(tensor.grad is not None for group in self.optimizer.param_groups for tensor in group["params"])
        if passes and not self.optimizer.has_begun and not left:
            self._begin_anew()
            self.micro_steps -= passes
            self._warn_of_given_up(passes)

    def _warn_of_given_up(self, passes: int) -> None:
        warn(
            f"zero_grad() gives up {passes} of the {self._config.micro_steps} backward passes of a step: call it after the step() that "
            "ends one, or leave it out"
        )

    def _begin_anew(self) -> bool:
        """Makes the next backward pass the first of a step, and returns True. Does nothing and returns False while
        servers keep gradients that were sent for the current step."""
        if self.optimizer.has_begun:
            return False
        self._passes = self._calls = 0
        self._is_broken_off = False
        return True

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raises: the job's accumulation steps are fixed."""
        raise invalid(
            "train_batch_size",
            train_batch_size,
            str(self.train_batch_size()),
            "set it in the config, for a new job",
            UsageError,
        )

    # Files

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Makes the servers write a checkpoint of their state, and writes the engine's part beside it. This part has frozen parameters,
        buffers, scheduler, counters and ``client_state`` (tensors and plain containers). All ranks call it, and rank 0 writes. If
        torch.distributed is initialised, the others wait for rank 0 and raise its error.

        Raises:
            RefusedError: if a server has no folder for checkpoints (``checkpoint_dir``), or too little space.
        """
        self.optimizer.check_model()
        files.save(
            self,
            Path(save_dir),
            tag or f"global_step{self.global_steps}",
            client_state,
            save_latest,
            exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Returns to a save of :meth:`save_checkpoint`. Servers at another version, or without the job, restore their checkpoint of it. All
        ranks call it.

        ``"checkpoint": {"load_universal": true}`` fills the job, which must be new, from a universal checkpoint of DeepSpeed.

        Returns:
            The path, and the ``client_state``; None and an empty dict without a checkpoint.

        Raises:
            StateError: if the servers have no checkpoint of that version, naming both versions and the remedy.
            InvalidError: for weights without the optimizer's state, which servers keep together.
        """
        if load_module_only or not load_optimizer_states or custom_load_fn is not None:
            raise invalid(
                "load_checkpoint",
                "asked for the module alone",
                "asked for module and optimizer: servers keep both together",
                "load what save_16bit_model wrote into the model, and start a new job from it",
            )
        # A loaded state has no half step, so the current step's gradients are dropped.
        self.optimizer.zero_grad()
        if self.load_universal_checkpoint():
            loaded = files.load_universal(self, Path(load_dir), tag, load_lr_scheduler_states)
        else:
            loaded = files.load(self, Path(load_dir), tag, load_module_strict, load_lr_scheduler_states)
        self._begin_anew()
        self._config.put_in_units(shard, self.module, self.optimizer)
        return loaded

    def load_universal_checkpoint(self) -> bool:
        """Returns whether ``load_checkpoint`` takes universal checkpoints, from the config."""
        return self._config.loads_universal

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the model's ``state_dict`` with its newest weights; fp32 weights are written as bf16. Rank 0 writes."""
        self.optimizer.flush()
        if not self.optimizer.is_first_rank:
            return True
        folder = Path(save_dir)
        folder.mkdir(parents=True, exist_ok=True)
        left_out = files.frozen(self.module) if exclude_frozen_parameters else set()
        weights = {
            key: value.to(torch.bfloat16) if value.dtype is torch.float32 else value
            for key, value in self.module.state_dict().items()
            if key not in left_out
        }
        torch.save(weights, folder / save_filename)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self) -> dict[str, Any]:
        """Returns the model's ``state_dict`` with its newest weights."""
        self.optimizer.flush()
        return self.module.state_dict()

    def destroy(self) -> None:
        """Closes the optimizer, as :meth:`longshore.optim.Optimizer.close` does."""
        self.optimizer.close()


def _cast(values: Any) -> Any:
    cast = lambda value: value.half() if isinstance(value, Tensor) and value.is_floating_point() else value  # noqa: E731
    return torch.utils._pytree.tree_map(cast, values)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: optim.Optimizer | Callable[[Any], optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Engine, optim.Optimizer, Any, Any]:
    """Returns an engine, as ``deepspeed.initialize`` does.

    Args:
        args: source of the config in ``args.deepspeed_config``, without ``config``.
        model: the model, on its device. In stage 3 it may be in the host's memory, and units move to the device.
        optimizer: an optimizer of this package, or a function that returns one, if the config names none.
        model_parameters: the parameters to train; by default ``model.named_parameters()``.
        training_data: a dataset; the returned loader yields this rank's micro-batches.
        lr_scheduler: a scheduler of torch, or a function that returns one for the optimizer.
        distributed_port, dist_init_required: ignored: ranks meet on the servers.
        mpu, mesh_param: refused.
        config, config_params: a dict or a JSON file in DeepSpeed's format. Every key is used, named in a warning, or refused with its
            path. ``"longshore": {"servers": ..., "job": ...}`` has the options of :class:`longshore.transfer.options.Options`.

    Returns:
        Engine, optimizer, data loader (or None), scheduler (or None).

    Raises:
        InvalidError: naming a config path, its value, the limit and the remedy.
    """
    if model is None:
        raise invalid("model", None, "given", "pass model=")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise invalid(name, type(value).__name__, "None", "model parallelism is the framework's: use DTensor parameters")
    config = config if config is not None else config_params
    config = getattr(args, "deepspeed_config", None) if config is None else config
    if config is None:
        raise invalid("config", None, "given", "pass config=, a dict or the path of a JSON file")
    settings = Config.of(config if isinstance(config, Mapping) else json.loads(Path(config).read_text()))
    if settings.dtype is not None:
        model.to(settings.dtype)
    # Programs written for DeepSpeed pass model.parameters(), which gives no names.
    _params.learn_names(model.named_parameters())
    params = model_parameters if model_parameters is not None else model.named_parameters()
    optimizer = optimizer_of(optimizer, params, settings)
    optimizer.watch(model)
    if not optimizer.waits_for_state and not settings.loads_universal:
        # Opening the job gives the model the job's weights before its first forward.
        optimizer.open()
        settings.put_in_units(shard, model, optimizer)
    lr_scheduler = scheduler_of(lr_scheduler, optimizer, settings)
    loader = None if training_data is None else loader_of(training_data, optimizer, collate_fn, settings)
    return Engine(model, optimizer, lr_scheduler, settings), optimizer, loader, lr_scheduler
