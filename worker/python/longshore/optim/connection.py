"""An optimizer's job on its servers: opened when it is first needed, and closed with the optimizer.

The connection owns the Rust half's job, the weights, page-locked memory and the ranks that reduce gradients together. Only the optimizer and
``longshore.shard`` reach it, on the training thread.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longshore import _longshore
from longshore.distributed import agree, collectives, ddp
from longshore.distributed.dtensor import Sharded
from longshore.distributed.ranks import Ranks, Reduced
from longshore.distributed.scattered import Scattered
from longshore.errors import StateError, UsageError, invalid
from longshore.optim.guards import Writes, places
from longshore.transfer import device
from longshore.transfer import filling as _filling
from longshore.transfer import weights as _weights
from longshore.transfer.filling import Filling, FrozenParams
from longshore.transfer.job import settings
from longshore.transfer.options import Options
from longshore.transfer.params import Param, dtype_of, fingerprint, is_sharded
from longshore.transfer.partitions import in_one_piece
from longshore.transfer.pinned import Lending, LockedMemory
from longshore.transfer.weights import Weights, is_compiling

if TYPE_CHECKING:
    from longshore.distributed.ranks import Ranks
    from longshore.units.build import Unplaced
    from longshore.units.residency import UnitWeights


def reducing_ranks(options: Options, params: list[Param], is_sharded: bool) -> Ranks:
    """What this rank and others do together.

    Raises:
        UsageError: without a process group.
        InvalidError: where it is not the options' world, or for parameters that cannot be trained so.
    """
    place = agree.place()
    collectives.begin()
    with collectives.telling():
        return _ranks_of_way(options, params, is_sharded, place)


def _ranks_of_way(options: Options, params: list[Param], is_sharded: bool, place: tuple[int, int]) -> Ranks:
    rank, world_size = place
    if options.place() != (rank, world_size):
        given = "rank {} of {}".format(*options.place())
        limit = f"rank {rank} of {world_size}, as torch.distributed has it"
        raise invalid("rank and world_size", given, limit, "leave both out, and RANK and WORLD_SIZE to torchrun")
    if is_sharded:
        if options.partition is not None:
            limit = "None with parameters that are DTensors"
            raise invalid("partition", repr(options.partition), limit, "leave it out: they are partitions already")
        return Sharded(params)
    if options.partition == "all-reduced":
        return Reduced(params)
    if ddp.has_any(param.tensor for param in params):
        raise invalid(
            "partition",
            "'reduce-scatter' with DistributedDataParallel",
            "'all-reduced' with it",
            "it has reduced the gradients already: pass partition='all-reduced', or leave the model unwrapped",
        )
    return Scattered(params, torch.float32 if options.reduce_dtype == "fp32" else None)


def _ranks(options: Options, params: list[Param]) -> "Ranks | None":
    """What this rank and others do together, if they do more than to send what the servers sum."""
    sharded = any(is_sharded(param.tensor) for param in params)
    if not sharded and (options.place()[1] == 1 or options.partition is None):
        return None

    return reducing_ranks(options, params, sharded)


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
        self._kept = self.ranks.keep(frozen or []) if self.ranks else FrozenParams(frozen or [], len(params), options.place()[0] == 0)
        settings_ = settings(options, job, rule, of_job, groups, partitions, self._kept.described())
        self.params = params
        #: These, and the frozen ones that servers keep.
        self.table = params, frozen or []
        self.name = job
        self.gradient_dtype = settings_.gradient_dtype
        #: What servers round weights to before workers read them.
        self.image_dtype = dtype_of(settings_.image_dtype)
        self._rounding = _weights.Rounding(self.image_dtype, options.master != "fp32")
        self.world_size = settings_.world_size
        self._place = options.place()
        self.fingerprint = fingerprint(rule, params)
        self.job: Any = self.ranks.connect(settings_) if self.ranks else _longshore.Job(settings_)
        # Ranks that share weights out lay them down in ways of their own.
        is_lent = self.ranks is None and any(device.accelerator.has(param.tensor) for param in params)
        lending = Lending(self.job, self.image_dtype) if is_lent else None
        self.weights: Weights | UnitWeights | Unplaced = Weights(params, self.job, lending)
        #: Where a device may copy gradients to. Sums on the worker have memory of their own.
        self.locked = None if settings_.sums_on_worker else LockedMemory(self.job, dtype_of(settings_.gradient_dtype))
        if self.ranks is not None:
            self.ranks.copy_into(self.locked)
        self._is_layerwise = options.streaming and options.layerwise
        #: The version that the parameters hold when they are used, and whether a step that was begun has not come so far.
        self.version = 0
        self.is_torn = False
        #: How many steps were made. In a delayed job the parameters have an older version than that.
        self.made = 0
        #: The servers' newest version when the job was opened here, until a step is made.
        self.joined: int | None = None
        #: The parameters that had other weights when the job was opened in the midst of a step.
        self._others: list[Param] = []
        #: Writes to parameters since they had the job's weights.
        self._writes = Writes(params)
        self._looks_for_writes = options.written_weights == "error"

    def put_in_units(self, weights: "UnitWeights") -> None:
        """Weights come unit by unit from now on."""
        self.weights.release()
        self.weights = weights

    def drain(self) -> None:
        """Waits until every step is decided and safe, and asks for the newest weights."""
        self.made = self.job.drain()

    def drain_alone(self) -> None:
        """Does so where other ranks may not. Ranks that read weights together read none for that: the others would not come, and after a
        flush of all of them the parameters have these weights."""
        self.drain()
        reads_together = self.ranks is not None and isinstance(self.weights, Weights)
        if reads_together and self.job.unread_weights() == self.version:
            self.job.take_unread_weights()

    def close(self, delete: bool) -> None:
        """Gives the rank up once the last step is safe; with ``delete`` the job is forgotten."""
        try:
            self.job.close(delete)
        finally:
            self.weights.release()
            if self.locked is not None:
                self.locked.release()

    def end_step(self) -> None:
        """All gradients of the step have left, and the step is decided next."""
        self.is_torn = True
        self.joined = None

    def find(self) -> int | None:
        """The job's version on its servers, if they have it."""
        found: int | None = self.ranks.find(self.job) if self.ranks else self.job.find()
        return found

    def start(self, filling: Filling | None = None, *, found: bool = False, in_step: bool = False) -> int:
        """Opens and joins the job. A new job gets what fills it, or else these parameters' weights; if it is not new they
        get the job's.

        Args:
            filling: what rank 0 fills a new job with.
            found: the job was there before.
            in_step: the model's weights may have been used for the step in hand.

        Returns:
            How many updates the job's weights have behind them.
        """
        in_units = not isinstance(self.weights, Weights)
        _longshore.set_copy_threads(torch.get_num_threads())
        if self.ranks is not None:
            version, applied = self.ranks.start(self.job, self.name, filling, found, self._kept, in_units=in_units)
        else:
            version, applied = self._first(lambda: self._start(filling, found, in_units))
        wanted = filling.applied if filling else None
        if wanted is not None and (version, applied) != (0, wanted):
            raise invalid(
                "job",
                f"{self.name}, at version {version} after {applied} updates",
                f"new, to be filled with a state after {wanted}",
                "name another job=, or go on from this one without loading a state",
                StateError,
            )
        self.joined = self.made = version
        if isinstance(self.weights, Weights):
            self._read_first(in_step)
        else:
            self.read()
        if self.ranks is not None:
            self.ranks.read_kept(self.job, version, self._kept, self.weights.read_frozen)
        else:
            has = self.weights.read_frozen()
            self._kept.read(self.job, version, [param for param in self._kept.whole() if param.index not in has])
        self._note()
        return applied

    def _read_first(self, in_step: bool) -> None:
        if self.job.unread_weights() is None:
            if not in_step:
                _weights.read_rounded(self.params, self._rounding, self._read_again)
        elif in_step:
            self._others = _weights.read_in_step(self.params, self._rounding, self.read)
        else:
            self.read()

    def refuse_other_weights(self) -> None:
        """Refuses gradients that were made before the job was opened, of other weights than it begins with. Ranks that work together do so
        together.

        Raises:
            UsageError: naming the parameter.
        """

        def refuse() -> None:
            if self._others:
                raise invalid(
                    self._others[0].name,
                    "another in this rank's model than on the servers, which have rank 0's",
                    "rank 0's in the first forward",
                    "call open() of the optimizer before it, or build the same model on all ranks, from one seed",
                    UsageError,
                )

        if self.ranks is None:
            refuse()
        else:
            from longshore.distributed import agree  # which needs torch.distributed

            agree.together(refuse)

    def _note(self) -> None:
        """The parameters have the job's weights, but for those that are awaited: they note that when they do."""
        if isinstance(self.weights, Weights):
            self._writes.note()
            self.weights.when_read = self._writes.note if self._looks_for_writes else None
        else:
            self._writes.forget()

    def check_written(self) -> None:
        """Refuses trained weights that were written since the last step, unless ``written_weights`` lets them be lost. Nothing is read where
        torch has counted no write.

        Raises:
            UsageError: naming the parameter.
        """
        if not self._looks_for_writes or not isinstance(self.weights, Weights):
            return
        written = self._writes.written()
        if written:
            self._writes.refuse(written, self._read_again, self.image_dtype, self.name)

    def _read_again(self, param: Param, memory: Tensor) -> None:
        """Reads the weights of the version that the parameters have, into memory of a parameter's shape or its shard's."""
        self.job.pull(self.version, places(param, memory) if self.ranks is None else self.ranks.places_of(param, memory))

    def _start(self, filling: Filling | None, found: bool, in_units: bool) -> tuple[int, int]:
        first, held = self.weights.values()
        # Frozen weights may be large, and only a new job is filled with them.
        frozen, frozen_held = ([], []) if found else self._kept.values()
        source = filling.of_job(self.params, list(map(in_one_piece, self.params)), [], frozen) if filling is not None else None
        started: tuple[int, int] = self.job.start([*first, *frozen], source, found, in_units=in_units)
        del held, frozen_held
        return started

    def _first(self, start: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        if self.world_size == 1:
            return start()
        from longshore.distributed import agree  # which needs torch.distributed

        return agree.rank_0_first(self.name, *self._place, start, is_shared=False)

    def frozen(self) -> list[Param]:
        """The frozen parameters that servers keep, and that each rank has whole."""
        return self._kept.whole()

    def full_state(self, rule: str) -> tuple[list[int], list[dict[str, Tensor]]]:
        """How many updates made each parameter of the newest version, and all state of each."""
        states = _filling.allocate(rule, self.params)
        return self.export_state(rule, states), states

    def left_out(self) -> dict[int, int]:
        """By parameter how many steps have left it out, of those that were left out of any."""
        left_out = dict(self.job.left_out())
        return left_out if self.ranks is None else self.ranks.of_params(left_out)

    def export_state(self, rule: str, states: list[dict[str, Tensor]], *, alone: bool = False) -> list[int]:
        """Writes the newest version into contiguous tensors, by parameter and torch's names. What they do not name is left out.

        Args:
            rule: the optimizer's.
            states: by parameter, the tensors.
            alone: of ranks that do things together only this one does so.

        Returns:
            How many updates made each parameter.
        """
        if alone and self.ranks is not None:
            self.drain_alone()
        else:
            self.drain()
            self.read()
        arrays = _filling.arrays(rule, states)
        left_out = self.left_out()
        if self.ranks is None:
            _, applied = self.job.export_state([_filling.targets(self.params, tensors) for tensors in arrays])
        else:
            applied = self.ranks.export_state(self.job, arrays, alone=alone)
        return [applied - left_out.get(param.index, 0) for param in self.params]

    def export_weights(self, dtype: str, tensors: list[Tensor]) -> None:
        """Writes the newest version's master weights into contiguous tensors of one type, by parameter. Of several ranks one does so."""
        self.drain_alone()
        if self.ranks is None:
            self.job.export_weights(dtype, _filling.targets(self.params, tensors))
        else:
            self.ranks.export_weights(self.job, dtype, tensors)

    def read(self) -> None:
        """Waits for weights that were asked for, and writes them into the parameters."""
        self.is_torn = True
        if self.ranks is not None:
            self.ranks.refuse()
        version = self.job.unread_weights()
        if self.ranks is None or not isinstance(self.weights, Weights):
            self.weights.read()
        elif version is not None:
            self.ranks.read(self.job)
        if version is not None:
            self.version = version
            if self.ranks is not None and self._looks_for_writes:
                self._note()
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
