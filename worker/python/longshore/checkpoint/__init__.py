"""Other libraries' checkpoints: fills new jobs from them, and saves jobs in their formats, without holding a whole model.

>>> checkpoint.load_deepspeed(optimizer, "out/universal")  # doctest: +SKIP
>>> checkpoint.save_safetensors(optimizer, "out/model")  # doctest: +SKIP

Call a load function right after the optimizer is built, before its first step. The parameters get the weights at once. The servers get the
state when the job is opened, tensor by tensor from the files. Save functions may be called at any time between steps. With several ranks
rank 0 writes. The other ranks may call too: their calls write nothing and do not wait. With ``delay=1`` all ranks call ``flush()`` first.
:class:`Saving` has the servers write their own checkpoints.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longshore.checkpoint import files as _files
from longshore.errors import RefusedError, StateError, invalid, warn
from longshore.transfer import device, filling
from longshore.transfer import params as _params
from longshore.transfer.filling import Filling
from longshore.transfer.params import Param

if TYPE_CHECKING:
    from longshore.optim import Optimizer

__all__ = ["load_deepspeed", "load_safetensors", "save_deepspeed", "save_safetensors", "save_torch"]

_FP32 = "fp32"
_STEP = "step"
_OPTIMIZER = "optimizer_state.pt"
#: Names of the file with DeepSpeed's counters, scheduler and buffers: in ZeRO's stages 1 and 2, and in stage 3.
_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
#: Keys that DeepSpeed's engine writes into the file of model states. All other keys are the caller's.
DEEPSPEED_KEYS = frozenset(
    "module buffer_names optimizer lr_scheduler sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size "
    "mp_world_size ds_config ds_version data_sampler random_ltd param_shapes frozen_param_shapes frozen_param_fragments "
    "shared_params zero_optimizer_state universal_checkpoint_info checkpoint_parallel_dimensions".split()
)
#: DeepSpeed release that introduced the layout of universal checkpoints. Our files name it, since DeepSpeed's loaders
#: look for a release.
_DEEPSPEED = "0.14.0"


def load_safetensors(optimizer: Optimizer, path: str | os.PathLike[str], *, strict: bool = False) -> None:
    """Fills a new job with weights from Hugging Face's safetensors: a file, or a folder with a file or an index.

    The fp32 master weights get the files' values, so that fp32 files lose nothing where the model is in bf16. The parameters get them too.
    Other tensors of the files are ignored: load these into the model.

    Args:
        optimizer: the optimizer whose parameters are searched by name.
        path: the file or folder.
        strict: refuse files with a tensor that is no parameter of the optimizer, trained or frozen, for example of another model.

    Raises:
        StateError: naming the tensor that is missing, unknown, or of another shape or type; or if the job has begun.
    """
    files = _files.Files(Path(path))
    known = {name for name, _ in _params.named(optimizer.param_groups)}
    others = [name for name in files.names() if name not in known]
    if strict and others:
        remedy = "take the files of this model, or pass strict=False and load what is left, as buffers, into the model"
        raise invalid(others[0], f"in {path}, with {len(others) - 1} more like it", "a parameter of this optimizer", remedy, StateError)

    def read(array: int, param: Param) -> Tensor:
        return files.tensor(param.name)

    def check(params: list[Param]) -> None:
        for param in params:
            files.check(param.name, param.shape)

    optimizer._fill_with(Filling(None, read, check))


def load_deepspeed(
    optimizer: Optimizer, folder: str | os.PathLike[str], *, tag: str | None = None, step: int | None = None
) -> None:
    """Fills a new job from a DeepSpeed universal checkpoint: fp32 weights, both moments and the step count.

    ``ds_to_universal.py`` of DeepSpeed makes one of a ZeRO checkpoint of any stage. Hyperparameters stay this optimizer's.

    Args:
        optimizer: an AdamW or Adam whose parameters have the names of the model that DeepSpeed trained.
        folder: the checkpoint, which has a folder ``zero``; or the folder above it.
        tag: name of a checkpoint in the folder above; by default from ``latest_universal``.
        step: the step count, if no file has it in plain form.

    Raises:
        StateError: naming the tensor or file that is missing, unknown or of another shape; or if the job has begun.
    """
    if optimizer.rule not in ("adamw", "adam"):
        raise invalid("optimizer", optimizer.rule, "adamw or adam", "DeepSpeed's universal checkpoints have Adam's moments", StateError)
    zero = _zero_folder(Path(folder), tag)
    keys = (_FP32, *optimizer._moments)

    def read(array: int, param: Param) -> Any:
        content = torch.load(zero / param.name / f"{keys[array]}.pt", mmap=True, weights_only=True, map_location="cpu")
        found: Any = content.get("param") if isinstance(content, Mapping) else content
        # A checkpoint made from ZeRO-3 has flat tensors.
        flat = isinstance(found, Tensor) and found.ndim == 1 and found.numel() == param.elements
        return found.view(param.shape) if flat else found

    def check(params: list[Param]) -> None:
        known = {param.name for param in params}
        for name in sorted(entry.name for entry in zero.iterdir() if entry.is_dir()):
            # Since DeepSpeed 0.19 the folder also has frozen parameters and buffers, which have no moments. The caller
            # loads these into the model.
            is_trained = any((zero / name / f"{key}.pt").exists() for key in keys[1:])
            if name not in known and is_trained:
                remedy = "give the optimizer this parameter too, or take its folder out"
                raise invalid(name, f"in {zero}", "a parameter of this optimizer", remedy, StateError)
        for param in params:
            for array, key in enumerate(keys):
                path = zero / param.name / f"{key}.pt"
                if not path.is_file():
                    raise invalid(f"{param.name}.{key}", "absent", f"in {path}", "take a whole universal checkpoint of this model", StateError)
                _params.check_tensor(f"{param.name}.{key}", read(array, param), param.shape, str(zero))

    files = {entry.name: entry / f"{_STEP}.pt" for entry in sorted(zero.iterdir())}
    steps = {name: float(torch.load(file, weights_only=True, map_location="cpu")) for name, file in files.items() if file.exists()}
    fewer: dict[str, int] = {}
    applied: int | None
    if steps:
        applied, fewer = filling.steps_of(steps, str(zero))
    else:
        applied = step or _step_of_all(zero)
    if applied is None:
        raise invalid("step", "in no file", "known", "pass step=, the optimizer's step count", StateError)
    if applied < 1:
        raise invalid("step", applied, "at least 1", "load the weights alone: nothing was trained", StateError)
    optimizer._fill_with(Filling(applied, read, check, fewer=fewer))


def deepspeed_rest(folder: str | os.PathLike[str], tag: str | None = None) -> tuple[Path, dict[str, Any] | None]:
    """Returns the path and the content of a universal checkpoint's file of model states: counters, scheduler, buffers
    and frozen weights. The content is None if the file is missing, or could run code when read.
    """
    return _states(_zero_folder(Path(folder), tag))


def save_torch(optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
    """Writes the ``state_dict`` of torch's optimizer of the same name, as ``torch.save`` does. ``torch.load(path, mmap=True)`` loads it
    without a copy. The weights are not in it: :func:`save_safetensors` writes them.

    Raises:
        InvalidError: if the file exists, or the drive is full.
    """
    connection, names, path = optimizer._settle(), optimizer._moments, Path(path)
    if not optimizer.is_first_rank:
        return
    if path.exists():
        raise invalid(str(path), "there", "a new file", "name another one, or remove it")
    places = {id(tensor): place for place, tensor in enumerate(optimizer._tensors())}
    numbers = [places[id(param.tensor)] for param in connection.params]
    with_step = optimizer.rule != "sgd"
    groups = _groups(optimizer)
    of_param = [optimizer.param_groups[index] for index, group in enumerate(optimizer.param_groups) for _ in group["params"]]

    def content() -> dict[str, Any]:
        state = {
            number: {
                **({_STEP: _files.blank()} if with_step else {}),
                **{name: _files.blank() for name in optimizer._derived(of_param[number], 0)},
                **{name: _files.blank(param.shape) for name in names},
            }
            for number, param in zip(numbers, connection.params, strict=True)
        }
        return {"state": state, "param_groups": groups}

    with _files.draft(path.with_name(f".{path.name}.draft")) as folder:
        written = _files.mapped(folder / path.name, content)
        states = [written["state"][number] for number in numbers]
        steps = connection.export_state(names, states, alone=True)
        for number, state, applied in zip(numbers, states, steps, strict=True):
            if with_step:
                state[_STEP].fill_(applied)
            for name, value in optimizer._derived(of_param[number], applied).items():
                state[name].copy_(value)
        del written, states, state
    drafted = path.with_name(f".{path.name}.draft")
    os.replace(drafted / path.name, path)
    drafted.rmdir()


def save_deepspeed(
    optimizer: Optimizer, folder: str | os.PathLike[str], *, tag: str | None = None, lr_scheduler: Any = None
) -> str:
    """Writes a DeepSpeed universal checkpoint. DeepSpeed loads it with ``"checkpoint": {"load_universal": true}``, on any number of ranks
    and in ZeRO's stages 1 to 3. The checkpoint has no buffers.

    Args:
        optimizer: an AdamW or Adam.
        folder: the folder above. Its ``latest_universal`` is set to this checkpoint.
        tag: the checkpoint's name; by default ``global_step`` with the number of updates.
        lr_scheduler: the scheduler whose state is saved too.

    Returns:
        The tag.

    Raises:
        InvalidError: if the checkpoint exists, or the drive is full.
        StateError: if steps left parameters out, so that their step counts differ.
    """
    if optimizer.rule not in ("adamw", "adam"):
        raise invalid("optimizer", optimizer.rule, "adamw or adam", "DeepSpeed's universal checkpoints have Adam's moments")
    connection, moments = optimizer._settle(), optimizer._moments
    names = {"master": _FP32, **{name: name for name in moments}}
    tag = tag or f"global_step{int(optimizer._applied)}_universal"
    if not optimizer.is_first_rank:
        return tag
    with _files.draft(Path(folder) / tag) as made:
        states = []
        for param in connection.params:
            of_param = made / "zero" / param.name
            of_param.mkdir(parents=True)
            files = {array: _files.mapped(of_param / f"{name}.pt", partial(_universal, param)) for array, name in names.items()}
            states.append({array: file["param"] for array, file in files.items()})
        steps = connection.export_state(moments, states, alone=True)
        del states, files
        applied = steps[0]
        for param, count in zip(connection.params, steps, strict=True):
            if count != applied:
                limit = f"{applied}, as that of {connection.params[0].name}"
                remedy = "DeepSpeed has one step count for all: train with missing_gradients='zeros', or write save_torch"
                raise invalid(f"{param.name}.step", count, limit, remedy, StateError)
        for param in connection.params:
            torch.save(device.host_number(applied), made / "zero" / param.name / f"{_STEP}.pt")
        groups = [
            {key: value for key, value in group.items() if key in ("lr", "betas", "eps", "weight_decay")}
            for group in _groups(optimizer)
        ]
        # Loaders of ZeRO's stages 1 and 2 take hyperparameters and step count from other keys than stage 3's loader.
        # The file therefore has both twice.
        whole = {"state": {0: {_STEP: device.host_number(applied)}}, "param_groups": groups}
        state = {"param_groups": groups, "optimizer_state_dict": whole, "ds_version": _DEEPSPEED}
        torch.save(state, made / "zero" / _OPTIMIZER)
        # Values that DeepSpeed's engine needs beside parameters.
        rest: dict[str, Any] = {
            "module": {},
            "buffer_names": [],
            "optimizer": None,
            "lr_scheduler": lr_scheduler.state_dict() if lr_scheduler is not None else None,
            "sparse_tensor_module_names": [],
            "skipped_steps": 0,
            "global_steps": applied,
            "global_samples": 0,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": _DEEPSPEED,
        }
        for name in _MODEL_STATES:
            torch.save(rest, made / name)
    _files.replace(Path(folder) / "latest_universal", lambda draft: draft.write_text(tag))
    return tag


def save_safetensors(
    optimizer: Optimizer,
    folder: str | os.PathLike[str],
    *,
    dtype: str = "bf16",
    max_file_bytes: int = 5 << 30,
    model: nn.Module | None = None,
) -> None:
    """Writes the newest master weights as Hugging Face's safetensors: one file, or several with an index.

    Args:
        optimizer: the optimizer whose parameters are written, by name.
        folder: a new or empty folder.
        dtype: type to which servers round the weights: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        max_file_bytes: the largest file; a larger tensor has a file of its own.
        model: a model whose frozen parameters and buffers are written too, in their own types.

    Raises:
        InvalidError: if the folder is not empty, or the drive is full.
    """
    connection = optimizer._settle()
    if not optimizer.is_first_rank:
        return
    named: dict[str, Tensor | Param] = {param.name: param for param in connection.params}
    trained = {id(param.tensor) for param in connection.params}
    for name, tensor in (model.state_dict(keep_vars=True) if model is not None else {}).items():
        if name not in named and id(tensor) not in trained and isinstance(tensor, Tensor):
            if _params.is_sharded(tensor):
                remedy = "leave model= out, and take what is frozen from where it was loaded from"
                raise invalid(name, "sharded among ranks", "whole, since one rank writes", remedy)
            named[name] = tensor.detach()
    with _files.draft(Path(folder)) as made:
        written = _files.create(made, named, dtype, max_file_bytes)
        tensors = [written[param.name] for param in connection.params]
        connection.export_weights(dtype, tensors)
        del written, tensors


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the param groups of the optimizer's state, with plain numbers alone."""
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    plain = lambda value: value.item() if isinstance(value, Tensor) else value
    return [
        {key: tuple(map(plain, value)) if isinstance(value, tuple) else plain(value) for key, value in group.items()}
        for group in groups
    ]


def _zero_folder(folder: Path, tag: str | None) -> Path:
    if tag is None and (folder / "zero").is_dir():
        return folder / "zero"
    latest = folder / "latest_universal"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    zero = folder / (tag or "") / "zero"
    if not zero.is_dir():
        remedy = "name a universal checkpoint: DeepSpeed's ds_to_universal.py makes one of a ZeRO checkpoint"
        raise invalid("folder", str(zero), "there", remedy, StateError)
    return zero


def _universal(param: Param) -> dict[str, Any]:
    """Returns the content that DeepSpeed's loaders expect in the file of one array of a parameter."""
    return {"cat_dim": 0, "param": _files.blank(param.shape)}


def _step_of_all(zero: Path) -> int | None:
    """Returns the step count of all parameters in a ZeRO-3 checkpoint; None without one. The optimizer's file has the
    count. DeepSpeed's own file of it also has objects that could run code, so the engine's counters are used then."""
    try:
        state = torch.load(zero / _OPTIMIZER, weights_only=True, map_location="cpu")["optimizer_state_dict"]["state"]
        return int(state[0][_STEP])
    except (OSError, KeyError, TypeError, ValueError, pickle.UnpicklingError):
        counted = _states(zero)[1] or {}
    try:
        return int(counted["global_steps"]) - int(counted["skipped_steps"])
    except (KeyError, TypeError, ValueError):
        return None


def _states(zero: Path) -> tuple[Path, dict[str, Any] | None]:
    """Returns the result of :func:`deepspeed_rest`, given the checkpoint's folder ``zero``."""
    paths = [zero.parent / name for name in _MODEL_STATES]
    path = next((path for path in paths if path.is_file()), paths[0])
    try:
        return path, torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, pickle.UnpicklingError):
        return path, None


class Saving:
    """Makes the servers write a checkpoint for each save of a framework, whose adapter calls this class.

    Args:
        checkpoint: without a checkpoint folder on the servers, None warns once and True raises. False never writes checkpoints.
    """

    def __init__(self, checkpoint: bool | None) -> None:
        self._checkpoint = checkpoint
        self._has_warned = False

    def begin(self, optimizer: Optimizer) -> None:
        """Prepares an optimizer when training begins: a framework may take its state before it announces a save."""
        if self._is_lost(optimizer):
            optimizer.saves_all = optimizer.is_in_memory

    def writes(self, optimizer: Optimizer) -> bool:
        """Returns whether the servers write a checkpoint for each save, as far as known before the first one."""
        return self._is_wanted(optimizer) and optimizer.has_checkpoint_folder()

    def _is_lost(self, optimizer: Optimizer) -> bool:
        """Returns whether a checkpoint would end with this process and none was requested."""
        return optimizer.passing_checkpoints is not None and self._checkpoint is None

    def _is_wanted(self, optimizer: Optimizer) -> bool:
        return self._checkpoint is not False and not self._is_lost(optimizer)

    def save(self, optimizer: Optimizer, step: int) -> None:
        """Brings the newest weights into the parameters, and on rank 0 has a checkpoint written, which ``state_dict`` then names.

        A server that ends with this process writes none unless asked, since nobody can return to it. ``state_dict`` then has the full
        state, if the server has it in memory.

        Raises:
            RefusedError: if checkpoints were requested and a server cannot write one.
        """
        optimizer.check_model()
        optimizer.flush()
        if self._is_lost(optimizer):
            self.begin(optimizer)
            if not optimizer.saves_all and not self._has_warned:
                self._has_warned = True
                warn(f"job {optimizer.job} ends with this process, so nothing can go back to this save: name servers= and job=")
        if not self._is_wanted(optimizer) or not optimizer.is_first_rank:
            return
        try:
            optimizer.checkpoint(f"step-{step:08}")
        except RefusedError as error:
            if self._checkpoint:
                raise
            self._checkpoint = False
            warn(f"the servers write no checkpoints, so nothing can go back to this save: {error}")
