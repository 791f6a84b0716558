"""A job's settings for the Rust half, a step's hyperparameters and its report. No framework is named here.

Connections and clients build :class:`Settings` once, :class:`Hyper` for each step and group, and :class:`StepReport` from each outcome.
"""

import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from longshore.transfer import server
from longshore.transfer.options import Options

# Number of shards of a small model, as in the command line's trainer.
_SMALL_MODEL_SHARDS = 16
_BLOCK_ELEMENTS = 64 * 1024
_DEFAULT_SHARD_ELEMENTS = 4 * 1024 * 1024


class JobParam(Protocol):
    """A parameter as a job's layout sees it."""

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


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """A job's options with every default resolved, and its layout. ``Settings`` in settings.rs reads these fields.

    Attributes:
        params: name, shape and group of each parameter, frozen ones last.
        groups: the names of the param groups.
        rule: the update rule's name.
        partitions: the first parameter of each partition, and the rank that sends it. Empty if all ranks send everything.
        frozen_from: index of the first frozen parameter; None without any.
    """

    servers: list[str]
    job: str
    rank: int
    world_size: int
    shard_elements: int
    params: list[tuple[str, list[int], int]]
    groups: list[str]
    rule: str
    partitions: list[tuple[int, int]]
    frozen_from: int | None

    @property
    def sums_on_worker(self) -> bool:
        """True if this process adds up the gradients of a step's backward passes."""
        return self.accumulate_on == "worker" and self.accumulate > 1


def new_job_name(framework: str) -> str:
    """Returns a unique job name."""
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
    """Returns a job's settings.

    ``partitions`` has the first parameter and the rank of each partition, for ranks that send a part of the gradient. ``frozen`` parameters
    are changed by no step; servers keep their weights alone."""
    addresses, transport = options.addresses(), options.transport
    if options.is_embedded() and transport == "tcp":
        transport = "unix"  # the only socket of a server inside this process
    if addresses is None:
        addresses = [server.default().address]
    rank, world_size = options.place()
    everything = [*params, *frozen]
    resolved = {
        "servers": addresses,
        "tls_dir": options.tls_folder(),
        "transport": transport,
        "job": job,
        "rank": rank,
        "world_size": world_size,
        "missing_gradients": options.on_missing(),
        "gradient_dtype": common_dtype(params) if options.gradient_dtype == "auto" else options.gradient_dtype,
        "image_dtype": common_dtype(everything) if options.image_dtype == "auto" else options.image_dtype,
        "shard_elements": options.shard_elements or shard_elements(everything),
    }
    return Settings(
        **{**vars(options), **resolved},
        params=[(param.name, list(param.shape), param.group) for param in everything],
        groups=[f"group{index}" for index in range(groups)],
        rule=rule,
        partitions=list(partitions),
        frozen_from=len(params) if frozen else None,
    )


def common_dtype(params: Sequence[JobParam]) -> str:
    """Returns the parameters' common type, or ``"fp32"``."""
    dtypes = {param.wire for param in params}
    return dtypes.pop() if len(dtypes) == 1 else "fp32"


def shard_elements(params: Sequence[JobParam]) -> int:
    """Returns a shard's size: a small model gets enough shards to stream, a large one shards of the usual size."""
    elements = sum(param.elements for param in params)
    shard = math.ceil(elements / _SMALL_MODEL_SHARDS / _BLOCK_ELEMENTS) * _BLOCK_ELEMENTS
    return min(max(shard, _BLOCK_ELEMENTS), _DEFAULT_SHARD_ELEMENTS)


@dataclass(frozen=True)
class StepReport:
    """Outcome of a step.

    Attributes:
        step: its number, counted from 1.
        read: the version of the weights that its gradient was computed with.
        skipped: whether the update was skipped, since the gradient was not finite.
        grad_norm: the global gradient norm before clipping; 0 if the job takes none, nan if the step was skipped.
        clip_coefficient: the gradients' factor; 1 without clipping.
        loss_scale: the loss's factor; 1 without the option ``loss_scale``.
        overflow: the parameter and element that was not finite first. Only rank 0 knows it.
        wall_s: seconds from its first push to the return of its commit.
        exposed_s: part of ``wall_s`` in which this process waited.
        pushed_bytes, pulled_bytes: payload on the wire.
    """

    step: int
    read: int
    skipped: bool
    grad_norm: float
    clip_coefficient: float
    loss_scale: float
    overflow: str | None
    wall_s: float
    exposed_s: float
    pushed_bytes: int
    pulled_bytes: int

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "StepReport":
        """Returns the report of the job's fields. All ranks have the same norm: a commit carries no non-finite one."""
        return cls(**{**fields, "grad_norm": math.nan} if fields["skipped"] else fields)

    def why_skipped(self) -> str:
        """Returns the message for a skipped step."""
        where = f"first in {self.overflow}" if self.overflow is not None else "and rank 0 says where"
        return (
            f"step {self.step} was skipped, and nothing is lost: the gradient is not finite, {where}. "
            "Look at the data of this step, or lower the learning rate"
        )


@dataclass(slots=True)
class Hyper:
    """Hyperparameters of a param group in one step. A rule ignores the ones that it does not use.

    Attributes:
        lr: the learning rate.
        beta1, beta2, eps: of AdamW, Adam, NAdam and Lion; Adagrad has ``eps`` too.
        weight_decay: decoupled with AdamW and Lion, otherwise added to the gradient.
        momentum, dampening, nesterov: of SGD.
        lr_decay: of Adagrad.
        momentum_decay: of NAdam.
    """

    # The fields are those of `GivenHyper` in settings.rs.

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    momentum_decay: float = 4e-3
