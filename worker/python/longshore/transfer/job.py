"""A job's settings for the Rust half, a step's hyperparameters and its report. No framework is named here.

Connections and clients build :class:`Settings` once, :class:`Hyper` for each step and group, and :class:`StepReport` from each outcome.
"""

import json
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from longshore.errors import invalid, warn
from longshore.transfer.options import Options

# Number of shards into which a small model is cut, so that its transfers overlap too. ``longshore train`` has the same.
_SMALL_MODEL_SHARDS = 16
_BLOCK_ELEMENTS = 64 * 1024
_DEFAULT_SHARD_ELEMENTS = 4 * 1024 * 1024


class JobParam(Protocol):
    """A parameter as a job's layout sees it. ``wire`` is its type's name for the Rust half."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def wire(self) -> str: ...
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
        hyper: the first hyperparameters by name: a value, or the groups' values where these differ.
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
    hyper: dict[str, Any]


def new_job_name(framework: str) -> str:
    """Returns a unique job name."""
    return f"{framework}-{os.getpid()}-{secrets.token_hex(4)}"


def settings(
    options: Options,
    job: str,
    rule: str,
    params: Sequence[JobParam],
    hypers: Sequence["Hyper"],
    partitions: Sequence[tuple[int, int]] = (),
    frozen: Sequence[JobParam] = (),
) -> Settings:
    """Returns a job's settings.

    ``hypers`` has the first hyperparameters of each group. ``partitions`` is for ranks that send a part of the gradient, and has the first
    parameter and the rank of each partition. No step changes ``frozen`` parameters; servers keep their weights alone."""
    transport = options.transport
    if options.is_embedded() and transport == "tcp":
        transport = "unix"  # the only socket of a server inside this process
    rank, world_size = options.place()
    everything = [*params, *frozen]
    resolved = {
        "servers": options.addresses(),
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
        groups=[f"group{index}" for index in range(len(hypers))],
        rule=rule,
        partitions=list(partitions),
        frozen_from=len(params) if frozen else None,
        hyper=_by_name(hypers),
    )


def _by_name(hypers: Sequence["Hyper"]) -> dict[str, Any]:
    columns = {name: [getattr(hyper, name) for hyper in hypers] for name in Hyper.__slots__}
    return {name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()}


#: Options that decide a run's bits and that servers do not compare.
_DECISIVE = ("partition", "reduce_dtype", "accumulate", "accumulate_on", "max_grad_norm", "loss_scale", "warmup_steps", "correction")
#: First bytes of a commit's data if the data has these settings. The settings' length follows in 4 bytes.
_MARK = b"LSPY"


class Record:
    """Settings that decide a run's bits and that servers do not compare. Each commit carries rank 0's, before the trainer's own data.

    Attributes:
        data: the settings as bytes of a commit.
    """

    def __init__(self, settings: Settings) -> None:
        unused = set() if settings.delay else {"warmup_steps", "correction"}
        unused |= set() if settings.accumulate > 1 else {"accumulate_on"}
        unused |= set() if settings.partition == "reduce-scatter" else {"reduce_dtype"}
        options = asdict(settings)
        self._rank, self._job = settings.rank, settings.job
        self._give({**{name: options[name] for name in _DECISIVE if name not in unused}, **settings.hyper})

    def _give(self, given: dict[str, Any]) -> None:
        text = json.dumps(given).encode()
        self.data = _MARK + len(text).to_bytes(4, "little") + text
        self._given, _ = self.split(self.data)

    def begin(self, job: Any, hypers: Sequence["Hyper"]) -> None:
        """Replaces hyperparameters of the constructor that differ from the job's by those of the first step, as a
        loaded state brings them. Others are kept, so that a schedule that goes on causes no warning. Warns of
        differences that remain."""
        theirs, _ = self.split(job.resumed() or b"")
        now = {name: value for name, value in _by_name(hypers).items() if name in theirs and self._given[name] != theirs[name]}
        self._give({**self._given, **now})
        self.warn_of_others(job)

    @staticmethod
    def split(data: bytes) -> tuple[dict[str, Any], bytes]:
        """Returns the settings in a commit's data, and the trainer's own data. Another program's data has no
        settings."""
        if not data.startswith(_MARK):
            return {}, data
        end = 8 + int.from_bytes(data[4:8], "little")
        return json.loads(data[8:end]), data[end:]

    def check_rank(self, job: Any) -> None:
        """Raises on ranks other than 0 if a setting differs from rank 0's, which the newest commit has."""
        of_rank_0 = job.of_rank_0() if self._rank else None
        if of_rank_0 is None or of_rank_0.startswith(self.data):
            return
        for name, theirs, mine in self._differences(of_rank_0):
            raise invalid(name, f"{mine} on rank {self._rank}", f"{theirs}, as on rank 0", "give all ranks the same settings")

    def warn_of_others(self, job: Any) -> None:
        """Warns on rank 0 of settings that differ from those that the job was trained with so far."""
        differing = [] if self._rank else self._differences(job.resumed() or b"")
        if differing:
            changes = ", ".join(f"{name}={theirs}, and now {name}={mine}" for name, theirs, mine in differing)
            warn(f"job {self._job} was trained so far with {changes}: its bits are those of neither")

    def _differences(self, data: bytes) -> list[tuple[str, Any, Any]]:
        theirs, _ = self.split(data)
        return [(name, theirs[name], mine) for name, mine in self._given.items() if name in theirs and theirs[name] != mine]


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
        beta1, beta2, eps: of rules with betas; Adagrad has ``eps`` too.
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
