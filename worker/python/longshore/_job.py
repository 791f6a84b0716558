"""What the Rust half needs to know of a job. Nothing here names a framework."""

import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from longshore import _server
from longshore._options import LossScale, Options

# How many shards a small model has, as in the trainer of the command line.
_SMALL_MODEL_SHARDS = 16
_BLOCK_ELEMENTS = 64 * 1024
_DEFAULT_SHARD_ELEMENTS = 4 * 1024 * 1024


class JobParam(Protocol):
    """What a job's layout has of a parameter."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def wire(self) -> str:
        """The type's name for the Rust half."""
        ...

    @property
    def elements(self) -> int: ...


@dataclass
class Settings:
    """What a job is, and the way to it. The fields are those of ``Settings`` in settings.rs."""

    servers: list[str]
    tls_dir: str | None
    job: str
    params: list[tuple[str, list[int], int]]
    groups: list[str]
    rule: str
    gradient_dtype: str
    image_dtype: str
    rank: int
    world_size: int
    partitions: Sequence[tuple[int, int]]
    frozen_from: int | None
    micro_steps: int
    accumulate_on_worker: bool
    delay: int
    warmup_steps: int
    correction: str
    clip: float | None
    unchecked: bool
    loss_scale: LossScale | None
    leave_out: bool
    shard_elements: int
    tier: str
    state: str
    master: str
    seed: int
    transport: str
    deadline_s: float


#: What users name without knowing the next learning rate: schedulers step after the optimizer.
_CORRECTIONS = {"look-ahead": "look-ahead-by-this-rate"}


def new_job_name(framework: str) -> str:
    """A name that no other job has."""
    return f"{framework}-{os.getpid()}-{secrets.token_hex(4)}"


def settings(
    options: Options,
    job: str,
    rule: str,
    params: Sequence[JobParam],
    groups: int,
    partitions: Sequence[tuple[int, int]] = (),
    frozen: Sequence[JobParam] = (),
) -> Settings:
    """``partitions`` are the first parameter and the rank of each, where ranks do not send all of the gradient. ``frozen`` are
    parameters that no step changes; servers keep their weights alone."""
    addresses = options.addresses()
    if addresses is None:
        addresses = [_server.default().address]
    rank, world_size = options.place()
    dtype, image_dtype = common_dtype(params), common_dtype([*params, *frozen])
    return Settings(
        servers=addresses,
        tls_dir=options.tls_folder(),
        job=job,
        params=[(param.name, list(param.shape), param.group) for param in [*params, *frozen]],
        groups=[f"group{index}" for index in range(groups)],
        rule=rule,
        gradient_dtype=dtype if options.gradient_dtype == "auto" else options.gradient_dtype,
        image_dtype=image_dtype if options.image_dtype == "auto" else options.image_dtype,
        rank=rank,
        world_size=world_size,
        partitions=list(partitions),
        frozen_from=len(params) if frozen else None,
        micro_steps=options.accumulate,
        accumulate_on_worker=options.accumulate_on == "worker" and options.accumulate > 1,
        delay=options.delay,
        warmup_steps=options.warmup_steps,
        correction=_CORRECTIONS.get(options.correction, options.correction),
        clip=options.max_grad_norm,
        unchecked=options.nonfinite == "apply",
        loss_scale=options.loss_scale,
        leave_out=options.on_missing() == "skip",
        shard_elements=options.shard_elements or shard_elements([*params, *frozen]),
        tier=options.tier,
        state=options.state,
        master=options.master,
        seed=options.seed,
        transport=options.transport,
        deadline_s=options.deadline,
    )


def common_dtype(params: Sequence[JobParam]) -> str:
    """The type that all parameters have, or fp32."""
    dtypes = {param.wire for param in params}
    return dtypes.pop() if len(dtypes) == 1 else "fp32"


def shard_elements(params: Sequence[JobParam]) -> int:
    """Enough shards for a small model to stream, and shards of the usual size for a large one."""
    elements = sum(param.elements for param in params)
    shard = math.ceil(elements / _SMALL_MODEL_SHARDS / _BLOCK_ELEMENTS) * _BLOCK_ELEMENTS
    return min(max(shard, _BLOCK_ELEMENTS), _DEFAULT_SHARD_ELEMENTS)
