"""Adapter for the Hugging Face Trainer: a callback, a resume from the servers' last step, and DeepSpeed's configuration."""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from longshore.checkpoint.trainer import Callback, TrainerData, last_whole
from longshore.deepspeed import config as _config
from longshore.deepspeed.config import Config
from longshore.optim import RULES, Optimizer
from longshore.optimizer.parts import unwrapped
from longshore.units.shard import shard

__all__ = ["Callback", "deepspeed", "newest"]


def newest(trainer: Trainer) -> str | None:
    """Returns the folder to resume from, at the last step that the servers decided:
    ``trainer.train(resume_from_checkpoint=newest(trainer))``.

    Servers may be ahead of the Trainer's last save, for example after a crash between two saves or within one. Then a folder in the
    Trainer's format is written under ``output_dir``, from the state that :class:`Callback` kept. An incomplete folder of the Trainer is
    ignored, and replaced by a complete one of the same step. All ranks call it.

    Returns:
        The folder, which may be the Trainer's last one; None without a save or a commit.
    """
    output = Path(str(trainer.args.output_dir))
    last = last_whole(output)
    # Rank 0 writes to this place next, so all ranks must have looked there before.
    trainer.accelerator.wait_for_everyone()
    optimizer = unwrapped(trainer.optimizer if trainer.optimizer is not None else trainer.create_optimizer())
    kept = optimizer.resumed if optimizer is not None else None
    if optimizer is None or not kept:
        return str(last) if last is not None else None
    data = TrainerData.decode(kept)
    if last is not None and int(last.name.rsplit("-", 1)[1]) >= data.global_step:
        return str(last)
    folder = output / f"checkpoint-{data.global_step}"
    partial = output / f"partial-{data.global_step}"
    if trainer.args.should_save:
        shutil.rmtree(partial, ignore_errors=True)
        trainer.save_model(str(partial), _internal_call=True)
        torch.save(optimizer.state_dict(), partial / "optimizer.pt")
        data.write(partial, last, trainer.args.world_size)
        # The Trainer's folder exists if a process was killed while it saved, and is incomplete then.
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    trainer.accelerator.wait_for_everyone()
    return str(folder)


def deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str], args: TrainingArguments, model: nn.Module, dataset: Any = None
) -> tuple[Optimizer, Any]:
    """Returns optimizer and scheduler of a DeepSpeed configuration, for ``Trainer(..., optimizers=deepspeed(config, args, model))``.

    The arguments fill ``"auto"``, as the Trainer does for DeepSpeed, and any other value must agree with them. The Trainer casts,
    accumulates and clips by its arguments, and takes the scheduler if the configuration names one. In stage 3 the model is cut into units
    and the servers clip: ``args.max_grad_norm`` becomes 0.

    Args:
        dataset: the Trainer's ``train_dataset``. Without ``args.max_steps`` its length and ``num_train_epochs`` determine the scheduler's
            ``total_num_steps`` and ``warmup_num_steps``.

    Returns:
        The optimizer, and the scheduler or None.

    Raises:
        InvalidError: naming the config path, its value, the arguments' value and the remedy.
    """
    given = config if isinstance(config, Mapping) else json.loads(Path(config).read_text())
    settings = Config.of(_config.filled(given, args, dataset))
    if settings.optimizer_type is None:
        given = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
        settings = dataclasses.replace(
            settings, optimizer_type="AdamW", optimizer_params=_config.filled({"optimizer": given}, args)["optimizer"]["params"]
        )
    kind, arguments = settings.rule(RULES)
    # The loss scale is left out, since the Trainer has a scaler of its own.
    job = {**settings.defaults(), **{name: value for name, value in settings.job.items() if name != "loss_scale"}}
    if settings.shard is not None:
        # Gradients leave while backward runs, so servers clip, and the Trainer finds none to clip.
        job |= {"streaming": True, "accumulate": args.gradient_accumulation_steps, "max_grad_norm": args.max_grad_norm or None}
        args.max_grad_norm = 0.0
    optimizer = kind(model.named_parameters(), **arguments, **job)
    settings.put_in_units(shard, model, optimizer)
    return optimizer, settings.scheduler(optimizer)
