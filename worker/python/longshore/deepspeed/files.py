"""An engine's files beside the servers' checkpoint, and the return to both."""

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from longshore import checkpoint
from longshore.checkpoint import files
from longshore.distributed import collectives
from longshore.errors import StateError, invalid, warn

_STATE = "engine.pt"
#: Name in a tag's folder of the checkpoint copied from a server that ends with its process. A later save of the tag
#: appends a number to it, and engine.pt has the exact name.
_SERVERS = "servers"
#: File whose content identifies a checkpoint: the content differs between any two checkpoints.
_MANIFEST = "manifest.json"


#: A :class:`longshore.engine.Engine`, whose module imports this one.
Engine = Any


def save(
    engine: Engine, folder: Path, tag: str, client_state: Mapping[str, Any] | None, is_latest: bool, leaves_frozen: bool
) -> None:
    """Makes the servers write a checkpoint, and writes a tag's folder beside it. An earlier save of the tag stays complete until this one is.
    Rank 0 writes; the others wait for it if they can, and raise its error."""
    optimizer = engine.optimizer
    version = optimizer.flush()

    def write() -> None:
        if not optimizer.is_first_rank:
            return
        kept = optimizer._write_checkpoint(tag)
        parameters = {name for name, _ in engine.module.named_parameters()}
        left_out = parameters if leaves_frozen else _trained(engine)
        state = {
            "optimizer": optimizer.state_dict(),
            "checkpoint": kept,
            "version": version,
            "module": {key: value for key, value in engine.module.state_dict().items() if key not in left_out},
            "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "client_state": dict(client_state or {}),
            "servers": None,
        }
        (folder / tag).mkdir(parents=True, exist_ok=True)
        place = optimizer.passing_checkpoints
        if place is not None:
            state["servers"] = _copy(place / optimizer.job / kept, folder / tag, _SERVERS)
        files.replace(folder / tag / _STATE, lambda path: torch.save(state, path))
        # The new engine.pt makes two kinds of folders useless: checkpoints of the tag's earlier saves, and leftovers of
        # interrupted saves.
        for pattern in (_SERVERS, f"{_SERVERS}.[0-9]*", files.DRAFTS):
            for found in (folder / tag).glob(pattern):
                if found.name != state["servers"]:
                    shutil.rmtree(found, ignore_errors=True)
        if is_latest:
            files.replace(folder / "latest", lambda path: path.write_text(tag))

    if collectives.can_meet(optimizer.rank[1]):
        collectives.together(write)
    else:
        write()


_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


def load(
    engine: Engine, folder: Path, tag: str | None, is_strict: bool, loads_scheduler: bool
) -> tuple[str | None, dict[str, Any]]:
    """Returns to a tag, or to the latest one.

    Raises:
        StateError: for an unknown tag, or one of which the servers have no checkpoint.
    """
    if tag is None:
        if not (folder / "latest").exists():
            return _nothing_in(folder)
        tag = (folder / "latest").read_text().strip()
    path = folder / tag / _STATE
    if not path.exists():
        there = ", ".join(sorted(found.parent.name for found in folder.glob(f"*/{_STATE}"))) or "none"
        raise invalid(
            "tag", tag, f"one of those in {folder}: {there}", "name one of these, or leave tag out for the latest", StateError
        )
    state = torch.load(path, weights_only=True, map_location="cpu")
    optimizer = engine.optimizer
    place, kept = optimizer.passing_checkpoints, state.get("servers", _SERVERS)
    if place is not None and kept is not None and (folder / tag / kept).exists():
        handle = state["optimizer"]["longshore"]
        optimizer.adopt(handle["job"])
        handle["checkpoint"] = _bring(folder / tag / kept, place / handle["job"], state["checkpoint"])
    optimizer.load_state_dict(state["optimizer"])
    _load_rest(engine.module, state["module"], is_strict)
    if loads_scheduler and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    for name in _COUNTERS:
        setattr(engine, name, state["counters"][name])
    return str(path), state["client_state"]


def _nothing_in(folder: Path) -> tuple[None, dict[str, Any]]:
    """Returns None: a first run has nothing to load. The warning reveals a mistyped folder."""
    warn(f"there is no checkpoint in {folder}, so nothing was loaded: training starts from the model as it is")
    return None, {}


def load_universal(engine: Engine, folder: Path, tag: str | None, loads_scheduler: bool) -> tuple[str | None, dict[str, Any]]:
    """Fills the engine's new job from a universal checkpoint of DeepSpeed, and the rest from the file beside its tensors.

    Raises:
        StateError: naming the tensor or file that is missing, unknown or of another shape; or if the job has begun.
    """
    if tag is None and not (folder / "latest_universal").is_file() and not (folder / "zero").is_dir():
        return _nothing_in(folder)
    optimizer = engine.optimizer
    checkpoint.load_deepspeed(optimizer, folder, tag=tag)
    # Opening the job gives the model the job's weights before the next forward.
    optimizer.open()
    path, states = checkpoint.deepspeed_rest(folder, tag)
    if states is None:
        warn(f"{path} has more than tensors and plain containers, or is not there: buffers, scheduler and counters stay as they are")
        return str(path), {}
    trained = _trained(engine)
    kept = {name: value for name, value in (states.get("module") or {}).items() if name not in trained}
    # ZeRO-3 saves frozen parameters in pieces elsewhere, and an empty tensor in place of each parameter here.
    empty = sorted(name for name in kept.keys() & frozen(engine.module) if kept[name].numel() == 0)
    if empty:
        warn(f"{path} has no weights of {empty[0]} and what else is frozen: they stay as they are in the model")
    kept = {name: value for name, value in kept.items() if name not in empty}
    _load_rest(engine.module, kept, is_strict=False)
    if loads_scheduler and engine.lr_scheduler is not None and states.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(states["lr_scheduler"])
        # A scheduler's load sets no rates in the param groups. DeepSpeed's file has the rates only in the scheduler's
        # state.
        for group, lr in zip(optimizer.param_groups, engine.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
    for name in ("global_steps", "skipped_steps", "global_samples"):
        setattr(engine, name, states.get(name, 0))
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    return str(path), {key: value for key, value in states.items() if key not in checkpoint.DEEPSPEED_KEYS}


def _load_rest(module: nn.Module, kept: dict[str, Any], is_strict: bool) -> None:
    """Loads the weights and buffers that servers do not have."""
    unexpected = module.load_state_dict(kept, strict=False).unexpected_keys
    if unexpected and is_strict:
        remedy = "load it into the model that it was saved from, or pass load_module_strict=False"
        raise invalid("checkpoint.module", unexpected[0], "a name of the model", remedy, StateError)


def _trained(engine: Engine) -> set[str]:
    """Returns the names of parameters that train now or later: servers have the weights of both."""
    ours = {id(param.tensor) for param in engine.optimizer._opened().params}
    return {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad or id(parameter) in ours}


def frozen(module: nn.Module) -> set[str]:
    """Returns the names of parameters that do not train."""
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def _bring(source: Path, folder: Path, name: str) -> str:
    """Copies a checkpoint into its job's folder, unless it is there. Returns its name there, which differs from
    ``name`` if another run from the same checkpoint has taken ``name``."""
    manifest = (source / _MANIFEST).read_bytes()
    for found in sorted(folder.glob(f"[!.]*/{_MANIFEST}")):
        if found.read_bytes() == manifest:
            return found.parent.name
    return _copy(source, folder, name)


def _copy(source: Path, folder: Path, name: str) -> str:
    """Copies a folder into another one. On one drive files are linked, since nobody writes to a checkpoint again.

    Returns:
        The copy's name: ``name``, or ``name.2`` and so on if taken. The name appears once the copy is complete.
    """

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copyfile(one, other)

    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    free = next(name for name in names if not (folder / name).exists())
    with files.draft(folder / free) as made:
        shutil.copytree(source, made, copy_function=link, dirs_exist_ok=True)
    return free
