"""The part of DeepSpeed's configuration that an engine uses. What is not used is refused with its path."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longshore import optim
from longshore._options import Options
from longshore.errors import invalid

_RULES: dict[str, type[optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adam": optim.AdamW,
    "sgd": optim.SGD,
    "lion": optim.Lion,
    "adagrad": optim.Adagrad,
}

#: Keys that say how DeepSpeed itself works and change no number, with what holds here.
_MEANINGLESS = {
    "zero_optimization.overlap_comm": "gradients always leave while backward runs",
    "zero_optimization.contiguous_gradients": "gradients are put together in host memory",
    "zero_optimization.reduce_scatter": "servers add gradients up",
    "zero_optimization.reduce_bucket_size": "each gradient leaves when it is made",
    "zero_optimization.allgather_partitions": "weights come from servers",
    "zero_optimization.allgather_bucket_size": "weights come from servers",
    "zero_optimization.offload_optimizer.pin_memory": "memory is page-locked where that helps",
    "steps_per_print": "read engine.optimizer.last_report",
    "wall_clock_breakdown": "read engine.optimizer.last_report",
    "zero_allow_untested_optimizer": "all optimizers of this package are tested",
}


@dataclass(frozen=True)
class Config:
    """What an engine is built with."""

    micro_batch: int
    micro_steps: int
    clip: float | None
    is_bf16: bool
    optimizer_type: str | None
    optimizer_params: dict[str, Any]
    job: dict[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Config":
        """Reads a configuration.

        Raises:
            InvalidError: for a key that is unknown or misplaced, a value that cannot be used, or a contradiction.
        """
        keys = _Keys(given)
        micro_steps = keys.take("gradient_accumulation_steps", int)
        micro_batch = keys.take("train_micro_batch_size_per_gpu", int)
        batch = keys.take("train_batch_size", int)
        job = keys.take("longshore", dict) or {}
        world_size = Options.of({key: job[key] for key in ("rank", "world_size", "servers", "job") if key in job}).place()[1]
        micro_batch, micro_steps = _batch(batch, micro_batch, micro_steps, world_size)
        clip = keys.take("gradient_clipping", float) or None
        is_bf16 = bool(keys.take("bf16.enabled", bool))
        if keys.take("fp16.enabled", bool):
            raise invalid("fp16.enabled", True, "false", "train in bf16, or use longshore.AdamW with torch's GradScaler")
        keys.drop("fp16")
        optimizer_type = keys.take("optimizer.type", str)
        optimizer_params = dict(keys.take("optimizer.params", dict) or {})
        if optimizer_type is not None and optimizer_type.lower() not in _RULES:
            raise invalid("optimizer.type", optimizer_type, "one of " + ", ".join(_RULES), "choose one of them")
        stage = keys.take("zero_optimization.stage", int) or 0
        if stage not in (0, 1, 2):
            raise invalid("zero_optimization.stage", stage, "0, 1 or 2", "use stage 2: weights stay on the device")
        device = keys.take("zero_optimization.offload_optimizer.device", str)
        if device not in (None, "none", "cpu", "nvme"):
            limit = "none, cpu or nvme"
            raise invalid("zero_optimization.offload_optimizer.device", device, limit, "choose one of them")
        if device == "nvme":
            # The folders are the servers' own: longshored --state-dir.
            if keys.take("zero_optimization.offload_optimizer.nvme_path", str):
                raise invalid(
                    "zero_optimization.offload_optimizer.nvme_path",
                    "given",
                    "left out",
                    "folders are the servers' own: longshored --state-dir, or longshore.Server(state_dirs=...)",
                )
            job.setdefault("tier", "nvme")
        keys.check_rest()
        return cls(micro_batch, micro_steps, clip, is_bf16, optimizer_type, optimizer_params, job)

    def optimizer(self, params: Any) -> optim.Optimizer:
        """The optimizer that the configuration names."""
        if self.optimizer_type is None:
            raise invalid("optimizer", None, "in the config or passed", "name optimizer.type, or pass optimizer=")
        kind = _RULES[self.optimizer_type.lower()]
        arguments = dict(self.optimizer_params)
        if self.optimizer_type.lower() == "adam" and not arguments.pop("adam_w_mode", True):
            kind = optim.Adam
        arguments.pop("torch_adam", None)
        if "betas" in arguments:
            arguments["betas"] = tuple(arguments["betas"])
        job = {
            "streaming": True,
            "accumulate": self.micro_steps,
            "max_grad_norm": self.clip,
            "missing_gradients": "zeros",
            **self.job,
        }
        return kind(params, **arguments, **job)


def _batch(batch: int | None, micro_batch: int | None, micro_steps: int | None, world_size: int) -> tuple[int, int]:
    """Micro-batch and micro-steps, of which one may follow from the others."""
    if batch is not None and micro_batch is not None and micro_steps is None:
        micro_steps = batch // (micro_batch * world_size)
    micro_steps = 1 if micro_steps is None else micro_steps
    if micro_batch is None:
        micro_batch = 1 if batch is None else batch // (micro_steps * world_size)
    for path, value in (("train_micro_batch_size_per_gpu", micro_batch), ("gradient_accumulation_steps", micro_steps)):
        if value < 1:
            raise invalid(path, value, "at least 1", "make the batch sizes divide each other")
    product = micro_batch * micro_steps * world_size
    if batch is not None and batch != product:
        limit = f"{product}: micro-batch {micro_batch} x {micro_steps} micro-steps x {world_size} ranks"
        raise invalid("train_batch_size", batch, limit, "leave one of the three out")
    return micro_batch, micro_steps


class _Keys:
    """The keys of a configuration, as they are used up."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._left = _flat(given)

    def take(self, path: str, kind: type) -> Any:
        """The value at a path, which is used now; None where it is not given."""
        nested = {key[len(path) + 1 :]: self._left.pop(key) for key in [*self._left] if key.startswith(path + ".")}
        if nested and kind is dict:
            return nested
        value = self._left.pop(path, None)
        if value is None:
            return None
        numbers = (int, float) if kind is float else (kind,)
        if value == "auto":
            raise invalid(path, "'auto'", f"a value ({kind.__name__})", "nothing fills it here: write the number")
        if not isinstance(value, numbers) or isinstance(value, bool) is not (kind is bool):
            raise invalid(path, repr(value), f"of type {kind.__name__}", "correct it")
        return value

    def drop(self, path: str) -> None:
        """Gives up a section that is switched off."""
        for key in [*self._left]:
            if key.startswith(path + "."):
                del self._left[key]

    def check_rest(self) -> None:
        for path, value in self._left.items():
            if path in _MEANINGLESS:
                warnings.warn(f"{path} changes nothing here: {_MEANINGLESS[path]}", UserWarning, stacklevel=5)
                continue
            remedy = "take it out: docs/pytorch.md lists what is used"
            raise invalid(f"config key {path}", repr(value), "one that is used here", remedy)


def _flat(given: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping) and lead + key != "optimizer.params":
            flat |= _flat(value, f"{lead}{key}.")
        else:
            flat[lead + key] = value
    return flat
