"""An optimizer's job on its servers: opened when it is first needed, and closed with the optimizer."""

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from longshore import _full, _longshore, _server
from longshore._host import Weights
from longshore._options import Options
from longshore._params import Param, common_dtype, fingerprint, shard_elements


@dataclass
class Settings:
    """What the Rust half needs to know of a job. The fields are those of ``Settings`` in settings.rs."""

    servers: list[str]
    job: str
    params: list[tuple[str, list[int], int]]
    groups: list[str]
    rule: str
    gradient_dtype: str
    image_dtype: str
    rank: int
    world_size: int
    micro_steps: int
    accumulate_on_worker: bool
    delay: int
    warmup_steps: int
    correction: str
    clip: float | None
    unchecked: bool
    shard_elements: int
    tier: str
    state: str
    master: str
    seed: int
    transport: str
    deadline_s: float


#: What users name without knowing the next learning rate: schedulers step after the optimizer.
_CORRECTIONS = {"look-ahead": "look-ahead-by-this-rate"}


def new_job_name() -> str:
    """A name that no other optimizer has."""
    return f"torch-{os.getpid()}-{secrets.token_hex(4)}"


def settings(options: Options, job: str, rule: str, params: list[Param], groups: int) -> Settings:
    addresses = options.addresses()
    if addresses is None:
        addresses = [_server.default().address]
    rank, world_size = options.place()
    dtype = common_dtype(params)
    return Settings(
        servers=addresses,
        job=job,
        params=[(param.name, list(param.shape), param.group) for param in params],
        groups=[f"group{index}" for index in range(groups)],
        rule=rule,
        gradient_dtype=dtype if options.gradient_dtype == "auto" else options.gradient_dtype,
        image_dtype=dtype if options.image_dtype == "auto" else options.image_dtype,
        rank=rank,
        world_size=world_size,
        micro_steps=options.accumulate,
        accumulate_on_worker=options.accumulate_on == "worker" and options.accumulate > 1,
        delay=options.delay,
        warmup_steps=options.warmup_steps,
        correction=_CORRECTIONS.get(options.correction, options.correction),
        clip=options.max_grad_norm,
        unchecked=options.nonfinite == "apply",
        shard_elements=options.shard_elements or shard_elements(params),
        tier=options.tier,
        state=options.state,
        master=options.master,
        seed=options.seed,
        transport=options.transport,
        deadline_s=options.deadline,
    )


class Connection:
    """A job that was opened: its parameters, their memory, and the Rust half's job."""

    def __init__(self, options: Options, job: str, rule: str, params: list[Param], groups: int) -> None:
        settings_ = settings(options, job, rule, params, groups)
        self.params = params
        self.name = job
        self.gradient_dtype = settings_.gradient_dtype
        self.world_size = settings_.world_size
        self.fingerprint = fingerprint(rule, params)
        self.job = _longshore.Job(settings_)
        self.weights = Weights(params)
        #: The version that the parameters hold, and whether a step that was begun has not brought them all.
        self.version = 0
        self.is_torn = False

    def find(self) -> int | None:
        """The job's version on its servers, if they have it."""
        return self.job.find()

    def start(self) -> int:
        """Opens and joins the job. A new job gets these parameters' weights; else they get the job's.

        Returns:
            How many steps of the job have updated.
        """
        places, held = self.weights.values()
        _, applied = self.job.start(places)
        del held
        self.read()
        return applied

    def full_state(self, rule: str, folder: Path) -> Iterator[tuple[Param, dict[str, Tensor]]]:
        """The state of each parameter, from a checkpoint that is written for this under ``folder``."""
        version = self.job.drain()
        name, _ = self.job.checkpoint(f"state-dict-{version:08}")
        starts, shard_elements = self.job.places()
        yield from _full.of_params(folder / self.name / name, rule, self.params, starts, shard_elements)

    def read(self) -> None:
        """Waits for weights that were asked for, and writes them into the parameters."""
        self.is_torn = True
        if self.job.has_unread_weights():
            version = self.job.read_weights(self.weights.targets())
            self.weights.written()
            self.version = self.version if version is None else version
        self.is_torn = False
