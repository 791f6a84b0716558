"""``"auto"`` in a DeepSpeed configuration, filled from the Trainer's arguments as the Trainer does for DeepSpeed."""

import copy
import math
from collections.abc import Mapping
from typing import Any

from longshore.errors import invalid

#: Sizes without effect here: an "auto" for one of them is dropped.
_SIZES = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


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
    # All ranks have the same number of batches: without drop_last some examples are used twice.
    divide = int.__floordiv__ if args.dataloader_drop_last else _ceil
    batches = divide(divide(examples, args.train_batch_size), args.world_size)
    return math.ceil(args.num_train_epochs * max(1, _ceil(batches, args.gradient_accumulation_steps)))


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _values(args: Any, steps: int | None) -> dict[str, tuple[Any, str | None]]:
    """Returns by path the value, and the argument that it must agree with."""
    # A number of at least 1 counts steps; one below 1 is a part of all.
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
