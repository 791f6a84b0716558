"""DeepSpeed's configuration as an engine uses it. Every key is used, named in the one warning of keys without effect, or refused by its path.

:func:`filled` fills ``"auto"`` from the Trainer's arguments, as the Trainer does for DeepSpeed.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from longshore import schedules
from longshore.deepspeed import keys as _keys
from longshore.errors import invalid, warn
from longshore.transfer.options import LossScale, Options, passing_server

if TYPE_CHECKING:
    from longshore.optim import Optimizer

#: The servers' rule for each supported type of DeepSpeed, and DeepSpeed's defaults where they differ from torch's.
_RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {"lr": 1e-3, "weight_decay": 0.0}),
    "adam": ("adamw", {"lr": 1e-3, "weight_decay": 0.0}),
    "sgd": ("sgd", {}),
    "lion": ("lion", {"lr": 1e-3}),
    "adagrad": ("adagrad", {}),
}
_OTHER_RULES = ("lamb", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd", "muon")
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
#: DeepSpeed's default of stage3_max_live_parameters.
_LIVE = 10**9
_OPAQUE = ("optimizer.params", "scheduler.params", "longshore")
#: Keys of sizes that have no effect here, so that an "auto" for one of them is dropped instead of filled.
_SIZES = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_AUTOCAST = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16}


@dataclass(frozen=True)
class Config:
    """An engine's settings, read from a DeepSpeed configuration.

    Attributes:
        batch: examples a step; micro_batch: examples of one backward pass on one rank; micro_steps: backward passes a step.
        is_managed: whether the engine counts the micro-steps; otherwise every call of ``step`` ends a step.
        clip: the largest global gradient norm. is_clip_given: whether the configuration has it.
        dtype: type that the model is cast to. casts_inputs: whether inputs are cast, too. autocast: forward's autocast type.
        optimizer_type, optimizer_params, scheduler_type, scheduler_params: as in the configuration.
        job: options of the job. shard: stage 3's arguments of :func:`longshore.shard`; None in other stages. Its ``live`` is the number of
            parameters that the budget holds.
        loads_universal: whether the engine's ``load_checkpoint`` takes DeepSpeed's universal checkpoints.
    """

    batch: int
    micro_batch: int
    micro_steps: int
    is_managed: bool
    clip: float | None
    is_clip_given: bool
    drops_last: bool
    stage: int
    dtype: torch.dtype | None
    casts_inputs: bool
    autocast: torch.dtype | None
    optimizer_type: str | None
    optimizer_params: dict[str, Any]
    scheduler_type: str | None
    scheduler_params: dict[str, Any]
    job: dict[str, Any]
    loads_universal: bool
    shard: dict[str, Any] | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Config:
        """Returns the settings of a configuration.

        Raises:
            InvalidError: for a key that is unknown or misplaced, a value that cannot be used, or a contradiction.
        """
        keys = _Keys(given)
        # The stage is checked first, since it decides what other keys mean.
        stage = keys.take("zero_optimization.stage", int) or 0
        if stage not in (0, 1, 2, 3):
            raise invalid("zero_optimization.stage", stage, "0, 1, 2 or 3", "use stage 2, or 3 for a model larger than the device")
        keys.check()
        job = dict(keys.take("longshore", dict) or {})
        _, world_size = Options.of({key: job[key] for key in ("rank", "world_size", "servers", "job") if key in job}).place()
        batch, micro_batch, micro_steps = _batch(keys, world_size)
        clip = keys.take("gradient_clipping", float)
        dtype = _precision(keys, job)
        shard = _sharding(keys, job, stage)
        _offload(keys, job, stage)
        wire = keys.take("communication_data_type", str, _DTYPES)
        if wire is not None:
            job.setdefault("gradient_dtype", _DTYPES[wire])
        autocast = keys.take("torch_autocast.dtype", str, _AUTOCAST) or "bfloat16"
        optimizer_type = keys.take("optimizer.type", str)
        optimizer_params = dict(keys.take("optimizer.params", dict) or {})
        scheduler_type = keys.take("scheduler.type", str, schedules.__all__)
        return cls(
            batch=batch,
            micro_batch=micro_batch,
            micro_steps=micro_steps,
            is_managed=keys.take("managed_gradient_accumulation", bool) is not False,
            clip=(1.0 if clip is None else clip) or None,
            is_clip_given=clip is not None,
            drops_last=bool(keys.take("dataloader_drop_last", bool)),
            stage=stage,
            dtype=dtype,
            casts_inputs=dtype is torch.float16 and bool(keys.take("fp16.auto_cast", bool)),
            autocast=_AUTOCAST[autocast] if keys.take("torch_autocast.enabled", bool) else None,
            optimizer_type=optimizer_type,
            optimizer_params=optimizer_params,
            scheduler_type=scheduler_type,
            scheduler_params=dict(keys.take("scheduler.params", dict) or {}),
            job=job,
            loads_universal=bool(keys.take("checkpoint.load_universal", bool)),
            shard=shard,
        )

    def rule(self, rules: Mapping[str, type[Optimizer]]) -> tuple[type[Optimizer], dict[str, Any]]:
        """Returns the optimizer's class, one of ``rules``, and its arguments.

        Raises:
            InvalidError: naming the key under ``optimizer``.
        """
        if self.optimizer_type is None:
            raise invalid("optimizer", None, "in the config or passed", "name optimizer.type, or pass optimizer=")
        named = self.optimizer_type.lower()
        if named not in _RULES:
            why = "the servers do not have that rule" if named in _OTHER_RULES else "correct the name"
            raise invalid("optimizer.type", self.optimizer_type, "one of " + ", ".join(_RULES), f"{why}: choose one of these")
        rule, defaults = _RULES[named]
        arguments = {**defaults, **self.optimizer_params}
        if named == "adam" and not arguments.pop("adam_w_mode", True):
            rule = "adam"
        kind = rules[rule]
        for name in ("adam_w_mode", "torch_adam"):
            arguments.pop(name, None)
        if arguments.pop("bias_correction", True) is False:
            raise invalid("optimizer.params.bias_correction", False, "True", "leave it out: servers always correct the bias")
        if "max_grad_norm" in arguments:
            remedy = "write gradient_clipping at the top of the config"
            raise invalid("optimizer.params.max_grad_norm", arguments["max_grad_norm"], "left out", remedy)
        known = [name for name in inspect.signature(kind).parameters if name not in ("params", "options")]
        _check_arguments("optimizer.params", arguments, known)
        if "betas" in arguments:
            arguments["betas"] = tuple(arguments["betas"])
        return kind, arguments

    def optimizer(self, params: Any, rules: Mapping[str, type[Optimizer]]) -> Optimizer:
        """Returns the configuration's optimizer, in streaming mode. ``rules`` has the class of each rule."""
        kind, arguments = self.rule(rules)
        if not self.is_clip_given:
            warn("gradient_clipping is left out: 1.0 is used, DeepSpeed's default since 0.19, before which it was 0. Write it to be sure")
        job = {
            "streaming": True,
            "accumulate": self.micro_steps,
            "max_grad_norm": self.clip,
            **self.defaults(),
            **self.job,
        }
        return kind(params, **arguments, **job)

    def defaults(self) -> dict[str, Any]:
        """Returns the job options whose default in DeepSpeed differs from ours: DeepSpeed takes zeros for missing
        gradients. With frozen="train-later" zeros are not set, since they would decay parameters that train later."""
        return {} if self.job.get("frozen") == "train-later" else {"missing_gradients": "zeros"}

    def scheduler(self, optimizer: Optimizer) -> Any:
        """Returns the configuration's scheduler; None without one."""
        if self.scheduler_type is None:
            return None
        kind = getattr(schedules, self.scheduler_type)
        parameters = {name: found for name, found in inspect.signature(kind).parameters.items() if name != "optimizer"}
        known = list(parameters)
        _check_arguments("scheduler.params", self.scheduler_params, known)
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in self.scheduler_params:
                raise invalid(f"scheduler.params.{name}", None, f"given for {self.scheduler_type}", "write the number")
        return kind(optimizer, **self.scheduler_params)

    def put_in_units(self, shard: Callable[..., object], model: nn.Module, optimizer: Optimizer) -> None:
        """Has :func:`longshore.shard` cut the model into units in stage 3. By default the model moves to the accelerator, if there is one."""
        if self.shard is None or optimizer.is_in_units:
            return
        given = dict(self.shard)
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
        shard(model, optimizer, **given)


def _batch(keys: _Keys, world_size: int) -> tuple[int, int, int]:
    """Returns batch, micro-batch and micro-steps. A missing one is computed from the others."""
    batch = keys.take("train_batch_size", int)
    micro_batch = keys.take("train_micro_batch_size_per_gpu", int)
    micro_steps = keys.take("gradient_accumulation_steps", int)
    if batch is not None and micro_batch and micro_steps is None:
        micro_steps = batch // (micro_batch * world_size)
    micro_steps = 1 if micro_steps is None else micro_steps
    if micro_batch is None:
        micro_batch = 1 if batch is None else batch // (micro_steps * world_size or 1)
    for path, value in (("train_micro_batch_size_per_gpu", micro_batch), ("gradient_accumulation_steps", micro_steps)):
        if value < 1:
            raise invalid(path, value, "at least 1", "make the batch sizes divide each other")
    product = micro_batch * micro_steps * world_size
    if batch is not None and batch != product:
        limit = f"{product}: micro-batch {micro_batch} x {micro_steps} micro-steps x {world_size} ranks"
        raise invalid("train_batch_size", batch, limit, "leave one of the three out, or start another number of ranks")
    return product, micro_batch, micro_steps


def _precision(keys: _Keys, job: dict[str, Any]) -> torch.dtype | None:
    """Returns the model's type, and sets loss scale and state formats in the job's options."""
    is_bf16, is_fp16 = keys.take("bf16.enabled", bool), keys.take("fp16.enabled", bool)
    if is_bf16 and is_fp16:
        raise invalid(
            "fp16.enabled", True, "False where bf16.enabled is True", "choose one of the two: bf16 needs no loss scale"
        )
    if is_bf16:
        if keys.take("bf16.bf16_master_weights_and_grads", bool):
            job.setdefault("master", "bf16")
        if keys.take("bf16.bf16_optimizer_states", bool):
            job.setdefault("state", "bf16")
        return torch.bfloat16
    if not is_fp16:
        return None
    fixed = keys.take("fp16.loss_scale", float) or 0.0
    given = {
        "window": keys.take("fp16.loss_scale_window", int),
        "hysteresis": keys.take("fp16.hysteresis", int),
        "consecutive_hysteresis": keys.take("fp16.consecutive_hysteresis", bool),
        "min": keys.take("fp16.min_loss_scale", float),
        "initial": fixed or 2.0 ** (16 if (power := keys.take("fp16.initial_scale_power", int)) is None else power),
    }
    job.setdefault(
        "loss_scale", LossScale(dynamic=not fixed, **{name: value for name, value in given.items() if value is not None})
    )
    return torch.float16


def _offload(keys: _Keys, job: dict[str, Any], stage: int) -> None:
    """Sets where servers keep the state, and in stage 3 the 16-bit weights and gradients."""
    of_state, of_weights = "zero_optimization.offload_optimizer.", "zero_optimization.offload_param."
    device, spills = _offloaded(keys, of_state), _offloaded(keys, of_weights) == "nvme" and stage == 3
    if device == "none":
        _warn(of_state + "device", "servers hold the optimizer's state in any case")
    if device == "cpu" and spills:
        _warn(of_state + "device", "where offload_param.device is nvme the drive has the state too")
    if device != "nvme" and not spills:
        return
    job.setdefault("tier", "nvme")
    paths = (of_state + "nvme_path", of_weights + "nvme_path")
    folders = {path: folder for path in paths if (folder := keys.take(path, str)) is not None}
    if job.get("servers") is not None:
        for path in folders:
            spill = " --spill all" if path.startswith(of_weights) else ""
            _warn(path, f"the servers keep what is theirs in their own folders: longshored --state-dir{spill}")
        return
    if not folders:
        limit, remedy = "given for the server inside the process", "name a folder of a drive, or longshore.servers"
        raise invalid((of_weights if spills else of_state) + "nvme_path", None, limit, remedy)
    folder, *others = folders.values()
    if others and others[0] != folder:
        remedy = "name one folder: a server has all that is a job's in the same place"
        raise invalid(paths[1], repr(others[0]), f"{folder!r}, as offload_optimizer.nvme_path", remedy)
    job["servers"] = passing_server(folder, "all" if spills else "state")


def _offloaded(keys: _Keys, lead: str) -> str | None:
    """Returns the device of an offloading section; None without one. ``lead`` is the section's path with a final
    dot."""
    device: str | None = keys.take(lead + "device", str, ("none", "cpu", "nvme"))
    folder = keys.take(lead + "nvme_path", str)
    if folder is not None and device != "nvme":
        limit = f"left out with device {device or 'none'}"
        raise invalid(lead + "nvme_path", repr(folder), limit, 'write "device": "nvme", or take it out')
    return device


def _sharding(keys: _Keys, job: dict[str, Any], stage: int) -> dict[str, Any] | None:
    """Returns stage 3's settings of weights; None in other stages, which keep weights on the device."""
    lead = "zero_optimization."
    device = keys.take(lead + "offload_param.device", str, ("none", "cpu", "nvme"))
    given: dict[str, Any] = {name: job.pop(name) for name in ("budget", "units", "device", "weights") if name in job}
    live = keys.take(lead + "stage3_max_live_parameters", float)
    if stage != 3:
        if live is not None:
            _warn(lead + "stage3_max_live_parameters", f"in stage {stage} all weights are on the device")
        wrong = {f"longshore.{name}": value for name, value in given.items()}
        if device not in (None, "none"):
            wrong[lead + "offload_param.device"] = device
        for path, value in wrong.items():
            raise invalid(path, repr(value), f"left out in stage {stage}", "write zero_optimization.stage: 3, or take it out")
        return None
    if live is not None and "budget" not in given:
        given["live"] = live
    return given


def _auto(path: str) -> Exception:
    remedy = "write the value, or read the config with longshore.huggingface.deepspeed(config, args), which fills it as the Trainer does"
    return invalid(path, "'auto'", "a value: only the Hugging Face Trainer fills it", remedy)


def _warn(path: str, what: str) -> None:
    warn(f"{path} changes nothing here: {what}")


def _check_arguments(section: str, arguments: dict[str, Any], known: list[str]) -> None:
    for name, value in arguments.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {close[0]}?" if close else "take it out"
            raise invalid(f"{section}.{name}", repr(value), "one of " + ", ".join(known), remedy)
        if value == "auto":
            raise _auto(f"{section}.{name}")


class _Keys:
    """The keys of a configuration, flattened to paths."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        if not isinstance(given, Mapping):
            raise invalid(
                "config", type(given).__name__, "a dict of sections and keys", "pass DeepSpeed's JSON, or a dict like it"
            )
        self._given: dict[str, Any] = {}
        for path, value in _flat(given).items():
            alias = _keys.own_name(path)
            if alias in self._given:
                raise invalid(path, repr(value), "given once", f"take it or {alias} out")
            self._given[alias] = value

    def take(self, path: str, kind: type, choices: Any = None) -> Any:
        """Returns the value at a path; None without one."""
        value = self._given.get(path)
        if value is None:
            return None
        if value == "auto":
            raise _auto(path)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        numbers = (int, float) if kind is float else (kind,)
        if not isinstance(value, numbers) or isinstance(value, bool) is not (kind is bool):
            raise invalid(path, repr(value), f"of type {kind.__name__}", "correct it")
        if choices is not None and value not in choices:
            raise invalid(path, repr(value), "one of " + ", ".join(choices), "choose one of them")
        return value

    def check(self) -> None:
        """Refuses unsupported keys, and warns once of all keys without effect."""
        ignored = []
        for path, value in self._given.items():
            line = _keys.line_of(path)
            if line in _keys.USED:
                continue
            if line in _keys.NO_EFFECT:
                if not (line.endswith(".*") and _keys.asks_for_nothing(path, value)):
                    ignored.append(path)
            elif _keys.is_section(path) and value not in (None, {}):
                raise invalid(f"config key {path}", repr(value), "a section with keys of its own", f'write "{path}": {{...}}')
            else:
                self._check_unknown(path, value, line)
        if ignored:
            warn(f"without effect here: {', '.join(ignored)}. docs/migrate.md says what holds instead")

    def _check_unknown(self, path: str, value: Any, line: str | None) -> None:
        """Refuses an unused key, unless its value or its section is switched off."""
        section, _, name = path.rpartition(".")
        is_off = _keys.asks_for_nothing(path, value) or (name != "enabled" and self._given.get(f"{section}.enabled") is False)
        remedy = _keys.instead(path)
        # A misplaced key is refused even when switched off, since it would have no effect once switched on.
        if line is None and (not is_off or _keys.is_section(section) or not section):
            place = _keys.place_of(path)
            if place is None and name in _keys.HYPERPARAMETERS:
                place = f"optimizer.params.{name}"
            if place is not None:
                remedy = f"move it there: as {path} DeepSpeed would ignore it"
                raise invalid(f"config key {path}", repr(value), f"at {place}", remedy)
            close = _keys.nearest(path)
            if close is not None:
                raise invalid(f"config key {path}", repr(value), "a key that is used here", f"did you mean {close}?")
        if not is_off:
            remedy = remedy or "take it out, or do it in the training loop: docs/migrate.md lists the keys that are used"
            raise invalid(f"config key {path}", repr(value), "left out", remedy)


def _flat(given: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping) and value and lead + str(key) not in _OPAQUE:
            flat |= _flat(value, f"{lead}{key}.")
        else:
            flat[f"{lead}{key}"] = value
    return flat


def filled(config: Mapping[str, Any], args: Any, dataset: Any = None) -> dict[str, Any]:
    """Returns the configuration with every ``"auto"`` filled in.

    Args:
        dataset: the training data, whose length gives the number of steps in the epochs.

    Raises:
        InvalidError: for a value that contradicts the arguments, or an ``"auto"`` that they do not fill.
    """
    found = {
        key: copy.deepcopy(value) if isinstance(value, (dict, list)) and key != "longshore" else value
        for key, value in config.items()
    }
    for path, (value, argument) in _values(args, _steps(args, dataset)).items():
        section, _, key = path.rpartition(".")
        inside: Any = found
        for part in section.split(".") if section else ():
            inside = inside.get(part) if isinstance(inside, dict) else None
        if not isinstance(inside, dict) or inside.get(key) is None:
            continue
        if inside[key] == "auto":
            if value is None:
                limit = f"a value where TrainingArguments.{argument} is not set and nobody says how long the dataset is"
                raise invalid(path, "'auto'", limit, "pass dataset= to longshore.huggingface.deepspeed, set it, or write the number")
            inside[key] = value
        elif argument is not None and value is not None and inside[key] != value:
            source = "the dataset and num_train_epochs say" if path.endswith("num_steps") and args.max_steps <= 0 else None
            limit = f"{value}, as {source or f'TrainingArguments.{argument} says'}"
            raise invalid(path, inside[key], limit, "make them equal, or write 'auto'")
    zero = found.get("zero_optimization")
    if isinstance(zero, dict):
        found["zero_optimization"] = {key: value for key, value in zero.items() if not (key in _SIZES and value == "auto")}
    return found


def _steps(args: Any, dataset: Any) -> int | None:
    """Returns the Trainer's number of steps; None if only the Trainer can know it."""
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        examples = len(dataset)
    except TypeError:
        return None
    # All ranks have the same number of batches. So each division rounds up without drop_last, and some examples are
    # used twice.
    divide = int.__floordiv__ if args.dataloader_drop_last else _ceil
    batches = divide(divide(examples, args.train_batch_size), args.world_size)
    return math.ceil(args.num_train_epochs * max(1, _ceil(batches, args.gradient_accumulation_steps)))


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _values(args: Any, steps: int | None) -> dict[str, tuple[Any, str | None]]:
    """Returns by a key's path the value for ``"auto"``, and the argument that any other value must agree with.

    A value of None cannot be known, and an argument of None allows any value.
    """
    # From 1 on warmup_steps counts steps. Below 1 it is a part of all steps, whose number must be known.
    warmup = None if steps is None and args.warmup_steps < 1 else max(1, args.get_warmup_steps(steps))
    batch = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": (args.per_device_train_batch_size, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (args.gradient_accumulation_steps, "gradient_accumulation_steps"),
        "train_batch_size": (batch, "per_device_train_batch_size"),
        "gradient_clipping": (args.max_grad_norm, "max_grad_norm"),
        "optimizer.params.lr": (args.learning_rate, "learning_rate"),
        "optimizer.params.betas": ([args.adam_beta1, args.adam_beta2], "adam_beta1"),
        "optimizer.params.eps": (args.adam_epsilon, "adam_epsilon"),
        "optimizer.params.weight_decay": (args.weight_decay, "weight_decay"),
        "scheduler.params.warmup_min_lr": (0, None),
        "scheduler.params.warmup_max_lr": (args.learning_rate, "learning_rate"),
        "scheduler.params.total_num_steps": (steps, "max_steps"),
        "scheduler.params.warmup_num_steps": (warmup, "warmup_steps"),
        "fp16.enabled": (bool(args.fp16 or args.fp16_full_eval), "fp16"),
        "bf16.enabled": (bool(args.bf16 or args.bf16_full_eval), "bf16"),
    }
