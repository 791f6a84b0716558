"""DeepSpeed's configuration keys, and what becomes of each. docs/migrate.md shows this table."""

from dataclasses import dataclass
from typing import Any, Literal

Act = Literal["used", "no effect", "refused"]

#: A key that asks for nothing has one of these values.
_OFF: tuple[Any, ...] = (None, False, 0, "none", {}, [])


@dataclass(frozen=True)
class Key:
    """What becomes of a key.

    Attributes:
        path: with dots. One that ends with ``.*`` stands for all keys of a section that have no line of their own.
        act: ``used``; ``no effect``, with a warning that names the key; or ``refused``, unless its value asks for nothing.
        what: what it means here, or what to do instead.
        nothing: a value beside None, False, 0 and an empty section that asks for nothing.
    """

    path: str
    act: Act
    what: str
    nothing: Any = None

    def asks_for_nothing(self, value: Any) -> bool:
        return any(value == off and type(value) is type(off) for off in (*_OFF, self.nothing))


def _of(lead: str, act: Act, what: str, *names: str) -> list[Key]:
    return [Key(lead + name, act, what) for name in names]


_ZERO, _OFFLOAD, _PARAM = "zero_optimization.", "zero_optimization.offload_optimizer.", "zero_optimization.offload_param."
_SUMS = "servers add gradients up in fp32; ranks with longshore.partition do it themselves, in the gradients' own type unless longshore.reduce_dtype is fp32"
_PARALLEL = "sequence and expert parallelism are the framework's: leave it out"
_COMPILE = "compile blocks with torch.compile, and leave the section out"
#: What is true there by default, and means nothing while the section is not switched on.
_COMPILE_DEFAULTS = ("offload_activation_pin_memory", "double_buffer", "keep_int_input_tensors")
_DRIVES = "servers drive their own drives: `longshore bench storage` measures them"

KEYS: dict[str, Key] = {
    key.path: key
    for key in [
        Key("train_batch_size", "used", "micro-batch x accumulation steps x ranks; two of the three are enough"),
        Key("train_micro_batch_size_per_gpu", "used", "the batch of the loader that `initialize` makes"),
        Key("gradient_accumulation_steps", "used", "`accumulate`: servers add the micro-steps up in fp32"),
        Key("managed_gradient_accumulation", "used", "false: every `engine.step()` ends a step"),
        Key("gradient_clipping", "used", "`max_grad_norm`; left out it is 1.0, as in DeepSpeed since 0.19; 0 does not clip"),
        Key("communication_data_type", "used", "`gradient_dtype`: gradients on the wire"),
        Key("dataloader_drop_last", "used", "whether the loader leaves a last, smaller batch out"),
        Key("longshore", "used", "options of the job: servers, job, tier, delay, ..."),
        Key("optimizer.type", "used", "AdamW, Adam, SGD, Lion or Adagrad; others are refused"),
        Key("optimizer.params", "used", "with DeepSpeed's defaults: lr 1e-3, weight_decay 0"),
        Key(
            "scheduler.type",
            "used",
            "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, with DeepSpeed's rates",
        ),
        Key("scheduler.params", "used", "as in DeepSpeed"),
        Key("bf16.enabled", "used", "the model is cast to bf16; the fp32 master weights are the servers'"),
        Key("bf16.bf16_master_weights_and_grads", "used", '`master="bf16"`, rounded stochastically'),
        Key("bf16.bf16_optimizer_states", "used", '`state="bf16"`'),
        Key("bf16.check_grad_overflow", "no effect", "a step with inf or NaN is always skipped"),
        Key("bf16.immediate_grad_update", "no effect", "gradients always leave as backward makes them"),
        Key("fp16.enabled", "used", "the model is cast to fp16, and losses are scaled"),
        Key("fp16.loss_scale", "used", "a fixed scale; 0 is dynamic"),
        Key("fp16.initial_scale_power", "used", "the first scale is 2 to this power"),
        Key("fp16.loss_scale_window", "used", "clean steps before the scale doubles"),
        Key("fp16.hysteresis", "used", "overflows before it halves"),
        Key("fp16.consecutive_hysteresis", "used", "whether a clean step refills these"),
        Key("fp16.min_loss_scale", "used", "the floor; an overflow there pauses the job"),
        Key("fp16.auto_cast", "used", "floating-point inputs of the model are cast to fp16"),
        Key("fp16.fp16_master_weights_and_grads", "refused", 'servers keep fp32: "longshore": {"master": "bf16"} halves them'),
        Key("torch_autocast.enabled", "used", "forward runs under torch.autocast"),
        Key("torch_autocast.dtype", "used", "its type, bfloat16 by default"),
        Key("torch_autocast.lower_precision_safe_modules", "refused", "use torch.autocast in the modules themselves"),
        Key(_ZERO + "stage", "used", "0, 1 and 2 are one here: servers hold the state, and the device the weights. 3: `longshore.shard`"),
        Key(_OFFLOAD + "device", "used", "cpu: tier `memory`. nvme: tier `nvme`. none: as cpu, with a warning"),
        Key(
            _OFFLOAD + "nvme_path", "used", "the drive of the server inside the process; servers elsewhere have `--state-dir`"
        ),
        Key(_OFFLOAD + "ratio", "refused", "all state is on servers: leave it at 1.0", nothing=1.0),
        Key(_OFFLOAD + "super_offload", "refused", '"longshore": {"delay": 1} hides the update'),
        *_of(_OFFLOAD, "no effect", "memory is page-locked where that helps", "pin_memory"),
        *_of(_OFFLOAD, "no effect", _DRIVES, "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
        *_of(_OFFLOAD, "no effect", "servers have `--threads`", "cpuadam_cores_perc"),
        Key(
            _PARAM + "device",
            "used",
            "cpu and none are one in stage 3: weights come from the servers. nvme: tier `nvme`, and the server inside the process keeps 16-bit weights and "
            "gradients on the drive as well (`spill`); servers elsewhere have `--spill all`. Refused in other stages",
        ),
        Key(_PARAM + "nvme_path", "used", "as offload_optimizer.nvme_path, and the same folder; one of the two is enough"),
        *_of(_PARAM, "no effect", "weights come from the servers, whose tier says where they are", "max_in_cpu"),
        *_of(_PARAM, "no effect", "units are fetched four uses ahead, and further up to 64 MiB of weights, within the budget", "buffer_count", "buffer_size"),
        *_of(_PARAM, "no effect", "memory is page-locked where that helps", "pin_memory"),
        *_of(_ZERO, "no effect", "gradients always leave while backward runs", "overlap_comm"),
        *_of(_ZERO, "no effect", "gradients are put together in host memory", "contiguous_gradients", "round_robin_gradients"),
        *_of(_ZERO, "no effect", "servers add gradients up, or ranks with longshore.partition", "reduce_scatter", "use_multi_rank_bucket_allreduce"),
        *_of(_ZERO, "no effect", "each gradient leaves when it is made", "reduce_bucket_size"),
        *_of(_ZERO, "no effect", "weights come from servers", "allgather_partitions", "allgather_bucket_size"),
        *_of(_ZERO, "no effect", "shards have `shard_elements`", "sub_group_size"),
        *_of(
            _ZERO,
            "no effect",
            "a model that is loaded gives the job its weights when the job is new",
            "load_from_fp32_weights",
        ),
        *_of(_ZERO, "no effect", "every checkpoint fits every number of servers and ranks", "elastic_checkpoint"),
        *_of(_ZERO, "no effect", "a parameter without a gradient counts as zeros", "ignore_unused_parameters"),
        *_of(_ZERO, "no effect", "there is one implementation", "legacy_stage1"),
        *_of(_ZERO, "no effect", "checkpoints are read as a stream", "pipeline_loading_checkpoint"),
        *_of(_ZERO, "no effect", "every message is checked", "enable_sanity_checks"),
        *_of(_ZERO, "no effect", "servers take the norm where they look for overflows, and that is always unless longshore.nonfinite is apply", "compute_grad_norm"),
        *_of(_ZERO, "no effect", "each parameter begins at a multiple of 64 elements", "parameter_alignment"),
        *_of(_ZERO, "no effect", "Muon is not here", "save_muon_momentum_buffer_in_memory"),
        Key(
            _ZERO + "stage3_max_live_parameters",
            "used",
            "in stage 3 the budget, times a weight's bytes, unless `longshore.budget` says it; with neither half of the device's free memory, on a CPU 1e9 weights",
        ),
        *_of(_ZERO, "no effect", "the order of use says which weights stay", "stage3_max_reuse_distance"),
        *_of(_ZERO, "no effect", "units are fetched four uses ahead, and further up to 64 MiB of weights, within the budget", "stage3_prefetch_bucket_size"),
        *_of(
            _ZERO,
            "no effect",
            "as many weights stay as the budget holds",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
        ),
        *_of(
            _ZERO,
            "no effect",
            "`state_dict` always has whole weights",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ),
        *_of(
            _ZERO,
            "no effect",
            "units are found, or `longshore.units` names them",
            "stage3_module_granularity_threshold",
            "leaf_module.*",
        ),
        *_of(_ZERO, "no effect", "weights come from the servers", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
        *_of(_ZERO, "no effect", "no layer keeps a weight for backward", "memory_efficient_linear"),
        *_of(_ZERO, "no effect", "modules stay as they are", "override_module_apply"),
        *_of(_ZERO, "no effect", "an order that changes is learned again", "log_trace_cache_warnings"),
        *_of(_ZERO, "refused", "write offload_optimizer: {device: cpu}", "cpu_offload", "cpu_offload_use_pin_memory"),
        *_of(_ZERO, "refused", "write stage: 3 and offload_param: {device: cpu}", "cpu_offload_param"),
        *_of(
            _ZERO,
            "refused",
            "weights and gradients travel in 16 bits, unquantized: leave it out",
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
            "zeropp_loco_param.*",
        ),
        Key(_ZERO + "zero_hpz_partition_size", "refused", "servers hold the partitions: leave it out", nothing=1),
        Key(_ZERO + "mics_shard_size", "refused", "servers hold the partitions: leave it out", nothing=-1),
        Key(_ZERO + "mics_hierarchical_params_gather", "refused", "servers hold the partitions: leave it out"),
        Key(_ZERO + "zenflow.*", "refused", '"longshore": {"delay": 1} hides the update, with a correction'),
        Key("aio.*", "no effect", _DRIVES),
        Key("prescale_gradients", "no effect", _SUMS),
        Key("gradient_predivide_factor", "no effect", _SUMS),
        Key("gradient_allreduce_op", "refused", "gradients are averaged over ranks", nothing="mean"),
        Key("fp32_allreduce", "no effect", _SUMS),
        Key("data_types.grad_accum_dtype", "no effect", "backward passes of a step are added up in fp32. Of ranks: " + _SUMS),
        *_of("data_types.", "refused", "cast the model before it is given to initialize, and leave it out", "param_dtype", "buffer_dtype"),
        Key("data_types.keep_in_fp32_modules", "refused", "bf16 and fp16 cast the whole model: leave it out", nothing="auto"),
        Key("disable_allgather", "no effect", "weights come from servers"),
        Key("sparse_gradients", "refused", "gradients are dense: use sparse=False in the embedding"),
        Key("zero_allow_untested_optimizer", "no effect", "all optimizers of this package are tested"),
        Key("zero_force_ds_cpu_optimizer", "no effect", "the servers' optimizer is always the one that runs"),
        *_of(
            "", "no effect", "read engine.optimizer.last_report", "steps_per_print", "wall_clock_breakdown", "memory_breakdown"
        ),
        Key("seq_parallel_communication_data_type", "no effect", "sequence parallelism is the framework's, which chooses the type"),
        Key("sequence_parallel_size", "refused", _PARALLEL, nothing=1),
        Key("use_data_before_expert_parallelism", "refused", _PARALLEL),
        Key("disable_python_gc", "no effect", "Python's collector stays as it is: the program may call gc.disable()"),
        Key("vocabulary_size", "no effect", "DeepSpeed only warns of sizes with it"),
        Key("graph_harvesting", "refused", "DeepSpeed has taken it out as well: leave it out"),
        Key("log_level", "no effect", "it is that of DeepSpeed's own logger"),
        Key("dump_state", "no effect", "`longshore status` shows the job"),
        Key("optimizer.legacy_fusion", "no effect", "there is one implementation"),
        Key("activation_checkpointing.*", "no effect", "it configures DeepSpeed's own function: use torch.utils.checkpoint"),
        Key("checkpoint.load_universal", "used", "`load_checkpoint` fills the new job from a universal checkpoint"),
        Key("checkpoint.*", "no effect", "servers write and check their checkpoints themselves"),
        Key("compile.free_activation_threshold", "refused", _COMPILE, nothing=10 * 1024 * 1024),
        *[Key("compile." + name, "refused", _COMPILE, nothing=True) for name in _COMPILE_DEFAULTS],
        Key("compile.*", "refused", _COMPILE),
        Key("datastates_ckpt.*", "no effect", "servers write and check their checkpoints themselves"),
        Key("amp.*", "refused", "use bf16, fp16 or torch_autocast"),
        *_of(
            "",
            "refused",
            "it is not here: leave the section out, or do it in the training loop",
            "autotuning.*",
            "compression_training.*",
            "curriculum_learning.*",
            "data_efficiency.*",
            "eigenvalue.*",
            "elasticity.*",
            "expert_parallel.*",
            "hybrid_engine.*",
            "pipeline.*",
            "progressive_layer_drop.*",
            "quantize_training.*",
            "sparse_attention.*",
            "tensor_parallel.*",
            "weight_quantization.*",
        ),
        *_of(
            "",
            "no effect",
            "log engine.optimizer.last_report with the tool you use",
            "comet.*",
            "comms_logger.*",
            "csv_monitor.*",
            "flops_profiler.*",
            "nebula.*",
            "tensorboard.*",
            "timers.*",
            "wandb.*",
        ),
    ]
}


def own_name(path: str) -> str:
    """A key as the table has it, of one that DeepSpeed knows by another name as well."""
    if path.split(".")[0] == "bfloat16":
        return path.replace("bfloat16", "bf16", 1)
    prefixed = path.replace(_ZERO, _ZERO + "stage3_", 1)
    return prefixed if path not in KEYS and prefixed in KEYS else path


def find(path: str) -> Key | None:
    """The line of a key: its own, or its section's."""
    if path in KEYS:
        return KEYS[path]
    parts = path.split(".")
    sections = (".".join(parts[:length]) + ".*" for length in range(len(parts), 0, -1))
    return next((KEYS[section] for section in sections if section in KEYS), None)


def is_section(path: str) -> bool:
    """Whether keys lie below this path."""
    return any(key.startswith(path + ".") for key in KEYS)


def place_of(path: str) -> str | None:
    """Where a misplaced key belongs: the path that ends as it does."""
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


def rows() -> list[tuple[str, str, str]]:
    """The table as documents show it: path, what becomes of it, what it means here."""
    return [(key.path, key.act, key.what) for key in KEYS.values()]
