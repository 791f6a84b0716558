"""An optimizer's job on its servers: opened when it is first needed, and closed with the optimizer."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longshore import _full, _longshore
from longshore._filling import Filling
from longshore._frozen import Kept
from longshore._job import settings
from longshore._options import Options
from longshore._params import Param, fingerprint, is_sharded
from longshore._weights import Weights, is_compiling
from longshore.errors import StateError, invalid

if TYPE_CHECKING:
    from longshore._init import Unplaced
    from longshore._ranks import Ranks
    from longshore._unit_weights import UnitWeights


def _ranks(options: Options, params: list[Param]) -> "Ranks | None":
    """What this rank and others do together, if they do more than to send what the servers sum."""
    sharded = any(is_sharded(param.tensor) for param in params)
    if not sharded and (options.place()[1] == 1 or options.partition is None):
        return None
    from longshore import _ways  # which needs torch.distributed

    return _ways.ranks(options, params, sharded)


class Connection:
    """A job that was opened: its parameters, their memory, and the Rust half's job."""

    def __init__(
        self, options: Options, job: str, rule: str, params: list[Param], groups: int, frozen: list[Param] | None = None
    ) -> None:
        #: What ranks do together; None where each sends all of its gradients.
        self.ranks = _ranks(options, params)
        of_job: list[Any] = params if self.ranks is None else list(self.ranks.layout.pieces())
        partitions = self.ranks.layout.partitions if self.ranks else ()
        #: Those that no step changes and servers keep.
        self._kept = self.ranks.keep(frozen or []) if self.ranks else Kept(frozen or [], len(params), options.place()[0] == 0)
        settings_ = settings(options, job, rule, of_job, groups, partitions, self._kept.described())
        self.params = params
        self.name = job
        self.gradient_dtype = settings_.gradient_dtype
        self.world_size = settings_.world_size
        self.fingerprint = fingerprint(rule, params)
        self.job: Any = self.ranks.connect(settings_) if self.ranks else _longshore.Job(settings_)
        self.weights: Weights | UnitWeights | Unplaced = Weights(params, self.job)
        self._is_layerwise = options.streaming and options.layerwise
        #: The version that the parameters hold when they are used, and whether a step that was begun has not come so far.
        self.version = 0
        self.is_torn = False
        #: The servers' newest version when the job was opened here, until a step is made.
        self.joined: int | None = None

    def find(self) -> int | None:
        """The job's version on its servers, if they have it."""
        found: int | None = self.ranks.find(self.job) if self.ranks else self.job.find()
        return found

    def start(self, filling: Filling | None = None, *, found: bool = False) -> int:
        """Opens and joins the job. A new job gets what fills it, or else these parameters' weights; if it is not new they
        get the job's.

        Args:
            filling: what rank 0 fills a new job with.
            found: the job was there before.

        Returns:
            How many updates the job's weights have behind them.
        """
        in_units = not isinstance(self.weights, Weights)
        _longshore.set_copy_threads(torch.get_num_threads())
        if self.ranks is not None:
            version, applied = self.ranks.start(self.job, filling, found, self._kept, in_units=in_units)
        else:
            places, held = self.weights.values()
            # Frozen weights may be large, and only a new job is filled with them.
            frozen, frozen_held = ([], []) if found else self._kept.values()
            source, initial = None, None
            if filling is not None and filling.made is not None:
                places, held, (seed, made) = filling.made(self.params)
                initial = seed, [*made, *[("uploaded", ())] * len(frozen)]
            elif filling is not None:
                source = filling.source(self.params, frozen)
            version, applied = self.job.start([*places, *frozen], source, found, initial, in_units=in_units)
            del held, frozen_held
        wanted = filling.applied if filling else None
        if wanted is not None and (version, applied) != (0, wanted):
            raise invalid(
                "job",
                f"{self.name}, at version {version} after {applied} updates",
                f"new, to be filled with a state after {wanted}",
                "name another job=, or go on from this one without loading a state",
                StateError,
            )
        self.joined = version
        self.read()
        if self.ranks is not None:
            self.ranks.read_kept(self.job, version, self._kept)
        else:
            self._kept.read(self.job, version)
        return applied

    def full_state(self, rule: str) -> tuple[list[int], list[dict[str, Tensor]]]:
        """How many updates made each parameter of the newest version, and all state of each."""
        states = _full.allocate(rule, self.params)
        return self.export_state(rule, states), states

    def export_state(self, rule: str, states: list[dict[str, Tensor]]) -> list[int]:
        """Writes the newest version into contiguous tensors, by parameter and torch's names. What they do not name is left out.

        Returns:
            How many updates made each parameter.
        """
        self.job.drain()
        self.read()
        arrays = list(_full.arrays(rule, self.params, states))
        left_out = dict(self.job.left_out())
        if self.ranks is not None:
            applied, left_out = self.ranks.export_state(self.job, arrays), self.ranks.of_params(left_out)
        else:
            _, applied = self.job.export_state(arrays)
        return [applied - left_out.get(param.index, 0) for param in self.params]

    def read(self) -> None:
        """Waits for weights that were asked for, and writes them into the parameters."""
        self.is_torn = True
        version = self.job.unread_weights()
        if self.ranks is None or not isinstance(self.weights, Weights):
            self.weights.read()
        elif version is not None:
            self.ranks.read(self.job)
        self.version = self.version if version is None else version
        self.is_torn = False

    def expect(self) -> None:
        """Lets each parameter get the weights that were asked for: before its first use, or now."""
        version = self.job.unread_weights()
        if version is None or not self._is_layerwise or self.ranks is not None or is_compiling():
            self.read()  # which in units waits for nothing
            return
        self.weights.expect()
        self.version = version
        self.is_torn = False
