"""An optimizer's job on its servers: opened when it is first needed, and closed with the optimizer."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from longshore import _full, _longshore
from longshore._host import Weights
from longshore._job import settings
from longshore._options import Options
from longshore._params import Param, fingerprint


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
