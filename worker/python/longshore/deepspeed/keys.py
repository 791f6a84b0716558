"""DeepSpeed's configuration keys: used, without effect, or refused. docs/migrate.md shows the keys that are not refused."""

import difflib
from typing import Any

#: Values that switch a key off.
_OFF: tuple[Any, ...] = (None, False, 0, "none", {}, [])

#: Keys that have an effect, with their meaning here.
USED = {
    "train_batch_size": "micro-batch x accumulation steps x ranks; two of the three are enough",
    "train_micro_batch_size_per_gpu": "the batch of the loader that `initialize` makes",
    "gradient_accumulation_steps": "`accumulate`: servers add the micro-steps up in fp32",
    "managed_gradient_accumulation": "false: every `engine.step()` ends a step",
    "gradient_clipping": "`max_grad_norm`; left out it is 1.0, as in DeepSpeed since 0.19; 0 does not clip",
    "communication_data_type": "`gradient_dtype`: gradients on the wire",
    "dataloader_drop_last": "whether the loader leaves a last, smaller batch out",
    "longshore": "options of the job: servers, job, tier, delay, ...",
    "optimizer.type": "AdamW, Adam, SGD, Lion or Adagrad; others are refused",
    "optimizer.params": "with DeepSpeed's defaults: lr 1e-3, weight_decay 0",
    "scheduler.type": "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, with DeepSpeed's rates",
    "scheduler.params": "as in DeepSpeed",
    "bf16.enabled": "the model is cast to bf16; the fp32 master weights are the servers'",
    "bf16.bf16_master_weights_and_grads": '`master="bf16"`, rounded stochastically',
    "bf16.bf16_optimizer_states": '`state="bf16"`',
    "fp16.enabled": "the model is cast to fp16, and losses are scaled",
    "fp16.loss_scale": "a fixed scale; 0 is dynamic",
    "fp16.initial_scale_power": "the first scale is 2 to this power",
    "fp16.loss_scale_window": "clean steps before the scale doubles",
    "fp16.hysteresis": "overflows before it halves",
    "fp16.consecutive_hysteresis": "whether a clean step refills these",
    "fp16.min_loss_scale": "the floor; an overflow there pauses the job",
    "fp16.auto_cast": "floating-point inputs of the model are cast to fp16",
    "torch_autocast.enabled": "forward runs under torch.autocast",
    "torch_autocast.dtype": "its type, bfloat16 by default",
    "zero_optimization.stage": "0, 1 and 2 are one here: servers hold the state, and the device the weights. 3: `longshore.shard`",
    "zero_optimization.offload_optimizer.device": "cpu: tier `memory`. nvme: tier `nvme`. none: as cpu, with a warning",
    "zero_optimization.offload_optimizer.nvme_path": "the drive of the server inside the process; servers elsewhere have `--state-dir`",
    "zero_optimization.offload_param.device": (
        "cpu and none are one in stage 3: weights come from the servers. nvme: tier `nvme`, and the server inside the process keeps 16-bit "
        "weights and gradients on the drive as well (`spill`); servers elsewhere have `--spill all`. Refused in other stages"
    ),
    "zero_optimization.offload_param.nvme_path": "as offload_optimizer.nvme_path, and the same folder; one of the two is enough",
    "zero_optimization.stage3_max_live_parameters": (
        "in stage 3 the budget, times a weight's bytes, unless `longshore.budget` says it; with neither half of the device's free memory, on a "
        "CPU 1e9 weights"
    ),
    "checkpoint.load_universal": "`load_checkpoint` fills the new job from a universal checkpoint",
}

#: Keys that steer DeepSpeed's own implementation, and have no effect here. A single warning names all of them that a
#: configuration has. ``.*`` stands for any key of a section.
NO_EFFECT = (
    "bf16.check_grad_overflow",
    "bf16.immediate_grad_update",
    "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_optimizer.buffer_count",
    "zero_optimization.offload_optimizer.pipeline_read",
    "zero_optimization.offload_optimizer.pipeline_write",
    "zero_optimization.offload_optimizer.fast_init",
    "zero_optimization.offload_param.max_in_cpu",
    "zero_optimization.offload_param.buffer_count",
    "zero_optimization.offload_param.buffer_size",
    "zero_optimization.offload_param.pin_memory",
    "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.reduce_scatter",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_partitions",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.sub_group_size",
    "zero_optimization.load_from_fp32_weights",
    "zero_optimization.elastic_checkpoint",
    "zero_optimization.ignore_unused_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_model_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_module_granularity_threshold",
    "zero_optimization.leaf_module.*",
    "zero_optimization.memory_efficient_linear",
    "aio.*",
    "prescale_gradients",
    "gradient_predivide_factor",
    "fp32_allreduce",
    "data_types.grad_accum_dtype",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
    "activation_checkpointing.*",
    "checkpoint.*",
    "csv_monitor.*",
    "flops_profiler.*",
    "tensorboard.*",
    "wandb.*",
)

#: Refused keys for which the error names a replacement.
_INSTEAD = {
    "zero_optimization.cpu_offload": "write offload_optimizer: {device: cpu}",
    "zero_optimization.cpu_offload_param": "write stage: 3 and offload_param: {device: cpu}",
    "zero_optimization.offload_optimizer.super_offload": '"longshore": {"delay": 1} hides the update',
    "zero_optimization.zenflow.*": '"longshore": {"delay": 1} hides the update, with a correction',
    "fp16.fp16_master_weights_and_grads": 'servers keep fp32: "longshore": {"master": "bf16"} halves them',
    "torch_autocast.lower_precision_safe_modules": "use torch.autocast in the modules themselves",
    "sparse_gradients": "gradients are dense: use sparse=False in the embedding",
    "amp.*": "use bf16, fp16 or torch_autocast",
    "compile.*": "compile blocks with torch.compile, and leave the section out",
}

#: DeepSpeed's documented defaults of refused keys. A key with its default asks for nothing, so it is not refused.
_DEFAULTS = {
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.mics_shard_size": -1,
    "gradient_allreduce_op": "mean",
    "sequence_parallel_size": 1,
}

#: Arguments of AdamW, which DeepSpeed reads below ``optimizer.params``.
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")

KEYS = (*USED, *NO_EFFECT, *_INSTEAD)


def asks_for_nothing(path: str, value: Any) -> bool:
    return any(value == off and type(value) is type(off) for off in (*_OFF, _DEFAULTS.get(path)))


def own_name(path: str) -> str:
    """Returns a key's name in the tables, for a key with a second name in DeepSpeed."""
    if path.split(".")[0] == "bfloat16":
        return path.replace("bfloat16", "bf16", 1)
    prefixed = path.replace("zero_optimization.", "zero_optimization.stage3_", 1)
    return prefixed if path not in KEYS and prefixed in KEYS else path


def line_of(path: str) -> str | None:
    """Returns a key's entry in the tables: its own, or its section's."""
    if path in KEYS:
        return path
    parts = path.split(".")
    sections = (".".join(parts[:length]) + ".*" for length in range(len(parts), 0, -1))
    return next((section for section in sections if section in KEYS), None)


def instead(path: str) -> str | None:
    """Returns the replacement of a refused key."""
    return _INSTEAD.get(line_of(path) or "")


def is_section(path: str) -> bool:
    """Returns whether keys lie below this path."""
    return any(key.startswith(path + ".") for key in KEYS)


def place_of(path: str) -> str | None:
    """Returns the right path of a misplaced key: the known path with the same end."""
    parts = path.split(".")
    for start in range(len(parts)):
        tail = ".".join(parts[start:])
        found = [known for known in KEYS if known == tail or known.endswith("." + tail)]
        if len(found) == 1 and found[0] != path:
            return found[0]
        sections = [known[:-2] for known in KEYS if known.endswith(f".{parts[start]}.*")]
        if len(sections) == 1 and start + 1 < len(parts):
            return ".".join([sections[0], *parts[start + 1 :]])
    return None


def nearest(path: str) -> str | None:
    """Returns the key of the same section with the nearest spelling."""
    section, _, name = path.rpartition(".")
    lead = section + "." if section else ""
    names = [key.removeprefix(lead) for key in KEYS if key.startswith(lead)]
    close = difflib.get_close_matches(name, names, 1, 0.8)
    return lead + close[0] if close else None
