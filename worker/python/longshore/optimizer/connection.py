"""An optimizer's job on its servers. The first use opens the job, and the optimizer's end closes it.

The connection owns the Rust half's job, the weights, page-locked memory and the ranks that reduce gradients together. Only the optimizer and
``longshore.shard`` reach it: on the training thread, and from streaming's hooks on autograd's threads.
"""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longshore import _longshore
from longshore.distributed import collectives
from longshore.errors import StateError, UsageError, invalid
from longshore.optimizer.guards import Writes
from longshore.transfer import device
from longshore.transfer import filling as _filling
from longshore.transfer import weights as _weights
from longshore.transfer.filling import Filling, FrozenParams
from longshore.transfer.job import Hyper, Record, settings
from longshore.transfer.options import Options
from longshore.transfer.params import Columns, Param, dtype_of, fingerprint
from longshore.transfer.partitions import in_one_piece
from longshore.transfer.pinned import Lending, LockedMemory
from longshore.transfer.weights import JobWeights, Weights, is_compiling

if TYPE_CHECKING:
    from longshore.distributed.ranks import Ranks
    from longshore.optimizer.states import Step


class Connection:
    """An open job: its parameters, their memory, and the Rust half's job."""

    def __init__(
        self,
        options: Options,
        job: str,
        rule: str,
        params: list[Param],
        hypers: list[Hyper],
        step: "Step",
        frozen: list[Param],
        ranks: "Ranks | None",
    ) -> None:
        #: The reducing ranks; None if each rank sends all of its gradients.
        self.ranks = ranks
        of_job: list[Any] = params if self.ranks is None else list(self.ranks.layout.pieces())
        partitions = self.ranks.layout.partitions if self.ranks else ()
        #: Frozen parameters that servers keep.
        self._kept = self.ranks.keep(frozen) if self.ranks else FrozenParams(frozen, len(params), options.place()[0] == 0)
        settings_ = settings(options, job, rule, of_job, hypers, partitions, self._kept.described())
        self.params, self.columns = params, Columns(params)
        #: A pair of lists: the trained parameters, and the frozen parameters that servers keep.
        self.table = params, frozen
        self.name = job
        self.gradient_dtype = settings_.gradient_dtype
        #: Type that servers round weights to before workers read them.
        self.image_dtype = dtype_of(settings_.image_dtype)
        self._rounding = _weights.Rounding(self.image_dtype, options.master != "fp32")
        self.world_size = settings_.world_size
        self._place = options.place()
        self.fingerprint = fingerprint(rule, params)
        self.record = Record(settings_)
        self.job: Any = self.ranks.connect(settings_) if self.ranks else _longshore.Job(settings_)
        # Reducing ranks bring weights to their devices by themselves, without lent memory.
        is_lent = self.ranks is None and any(device.accelerator.has(param.tensor) for param in params)
        lending = Lending(self.job, self.image_dtype) if is_lent else None
        self.weights: JobWeights = Weights(params, self.job, lending, is_delayed=options.delay > 0)
        #: Page-locked memory that a device may copy gradients to. None if the worker sums, since sums have memory of
        #: their own.
        sums_here = settings_.accumulate_on == "worker" and settings_.accumulate > 1
        self.locked = None if sums_here else LockedMemory(self.job, dtype_of(settings_.gradient_dtype))
        if self.ranks is not None:
            self.ranks.copy_into(self.locked)
        self._is_layerwise = options.streaming and options.layerwise
        #: The version of the weights that a use of a parameter finds, although they may still be arriving.
        self.version = 0
        self._step = step
        #: Number of steps made. In a delayed job it may be one more than ``version``.
        self.made = 0
        #: The servers' newest version when the job was opened here; None once a step is made.
        self.joined: int | None = None
        #: Parameters whose weights differed from the job's when it was opened within a step.
        self._others: list[Param] = []
        #: Notices torch's writes to parameters since they got the job's weights.
        self._writes = Writes(self.columns)
        self._looks_for_writes = options.written_weights == "error"

    @property
    def ids(self) -> list[int]:
        """The ``id`` of each trained parameter."""
        return list(map(id, self.columns.tensors))

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Context in which other ranks are told of this rank's failure, if they wait for it in collectives."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.telling()

    def put_in_units(self, weights: JobWeights) -> None:
        """Switches to weights that are fetched unit by unit."""
        self.weights.release()
        self.weights = weights

    def drain(self) -> None:
        """Waits until every step is decided and safe, and asks for the newest weights."""
        self.made = self.job.drain()

    def drain_alone(self) -> None:
        """Drains on one rank alone. Ranks that read weights together cannot read here. So a request for weights that
        the parameters have already, as after a flush of all ranks, is dropped."""
        self.drain()
        reads_together = self.ranks is not None and isinstance(self.weights, Weights)
        if reads_together and self.job.unread_weights() == self.version:
            self.job.take_unread_weights()

    def close(self, delete: bool) -> None:
        """Gives the rank up once the last step is safe; ``delete`` deletes the job."""
        try:
            self.job.close(delete)
        finally:
            self.weights.release()
            if self.locked is not None:
                self.locked.release()

    def find(self) -> int | None:
        """Returns the job's version on its servers; None if they do not have it."""
        found: int | None = self.ranks.find(self.job) if self.ranks else self.job.find()
        return found

    def start(self, filling: Filling | None = None, *, found: bool = False, in_step: bool = False, held: int | None = None) -> int:
        """Opens and joins the job. A new job gets ``filling``, or else the parameters' weights. An older job gives the parameters its
        weights.

        Args:
            found: whether the job existed before.
            in_step: whether the current step may have used the model's weights.
            held: the version that the parameters hold and go on with, for a job that is joined again.

        Returns:
            The number of updates that made the job's weights.
        """
        in_units = not isinstance(self.weights, Weights)
        _longshore.set_copy_threads(torch.get_num_threads())
        if self.ranks is not None:
            version, applied = self.ranks.start(self.job, self.name, filling, found, self._kept, in_units=in_units)
        else:
            version, applied = collectives.rank_0_first(
                self.name, *self._place, lambda: self._start(filling, found, in_units), is_shared=False
            )
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
        self._read_first(in_step, held)
        if self.ranks is not None:
            self.ranks.read_kept(self.job, version, self._kept, self.weights.read_frozen)
        else:
            has = self.weights.read_frozen()
            self._kept.read(self.job, version, [param for param in self._kept.whole() if param.index not in has])
        self._note()
        return applied

    def _read_first(self, in_step: bool, held: int | None) -> None:
        def read() -> None:
            if held is not None and self.job.unread_weights() != held:  # the step of a delayed job came after a flush
                self.drain()
            self.read()

        if not isinstance(self.weights, Weights):
            read()
        elif self.job.unread_weights() is None:
            if not in_step:
                _weights.read_rounded(self.params, self._rounding, self._read_again)
        elif in_step:
            self._others = _weights.read_in_step(self.params, self._rounding, read)
        elif held is not None:
            _weights.read_in_step(self.params, _weights.Rounding(self.image_dtype, is_master=False), read)
        else:
            read()

    def refuse_other_weights(self) -> None:
        """Refuses gradients that were computed before the job was opened if the model's weights then were not the
        job's. Reducing ranks raise together."""

        def refuse() -> None:
            if self._others and self.world_size == 1:
                raise invalid(
                    self._others[0].name,
                    f"another in the model than on the servers, which had job {self.name} already",
                    "the job's in the first forward",
                    "give the optimizer another job=, one that no earlier optimizer has, or call its open() before the forward to go on with the "
                    "job's weights",
                    UsageError,
                )
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
            collectives.together(refuse)

    def _note(self) -> None:
        """Notes the parameters' counts of writes, since the parameters have the job's weights now. Awaited parameters
        are noted when they are read."""
        if isinstance(self.weights, Weights):
            self._writes.note()
            self.weights.when_read = self._writes.note if self._looks_for_writes else None
        else:
            self._writes.forget()

    def check_written(self) -> None:
        """Refuses trained weights written since the last step, unless ``written_weights`` allows the loss. Without a write counted by torch
        nothing is read."""
        if not self._looks_for_writes or not isinstance(self.weights, Weights):
            return
        written = self._writes.written()
        if written:
            self._writes.refuse(written, self._read_again, self.image_dtype, self.name)

    def _read_again(self, param: Param, memory: Tensor) -> None:
        """Reads the weights of the parameters' version into memory of a parameter's shape or its shard's."""
        self.job.pull(self.version, [param.place(memory)] if self.ranks is None else self.ranks.places_of(param, memory))

    def _start(self, filling: Filling | None, found: bool, in_units: bool) -> tuple[int, int]:
        first, held = self.weights.values()
        # An existing job is not asked for values of frozen weights: they may be large, and only fill a new job.
        frozen, frozen_held = ([], []) if found else self._kept.values()
        source = filling.of_job(self.params, list(map(in_one_piece, self.params)), [], frozen) if filling is not None else None
        started: tuple[int, int] = self.job.start([*first, *frozen], source, found, in_units=in_units)
        del held, frozen_held
        return started

    def frozen(self) -> list[Param]:
        """Returns the frozen parameters that servers keep and each rank has whole."""
        return self._kept.whole()

    def left_out(self) -> dict[int, int]:
        """Returns by parameter the number of steps that left it out; parameters that no step left out are absent."""
        left_out = dict(self.job.left_out())
        return left_out if self.ranks is None else self.ranks.of_params(left_out)

    def export_state(self, moments: Sequence[str], states: list[dict[str, Tensor]], *, alone: bool = False) -> list[int]:
        """Writes the newest version into contiguous tensors, by parameter and torch's names. State without a tensor is left out.

        Args:
            alone: whether this rank exports without the other reducing ranks.

        Returns:
            The number of updates of each parameter.
        """
        if alone and self.ranks is not None:
            self.drain_alone()
        else:
            self.drain()
            self.read()
        arrays = [[state[name] for state in states] if name in states[0] else [] for name in ("master", *moments)]
        left_out = self.left_out()
        if self.ranks is None:
            _, applied = self.job.export_state([_filling.targets(self.params, tensors) for tensors in arrays])
        else:
            applied = self.ranks.export_state(self.job, arrays, alone=alone)
        return [applied - left_out.get(param.index, 0) for param in self.params]

    def export_weights(self, dtype: str, tensors: list[Tensor]) -> None:
        """Writes the newest version's master weights into contiguous tensors of one type, by parameter. Only a single rank calls it."""
        self.drain_alone()
        if self.ranks is None:
            self.job.export_weights(dtype, _filling.targets(self.params, tensors))
        else:
            self.ranks.export_weights(self.job, dtype, tensors)

    def read(self) -> None:
        """Waits for requested weights, and writes them into the parameters."""
        self._step.tear()
        if self.ranks is not None:
            collectives.refuse()  # parameters may have outdated parts of a failed rank
        version = self.job.unread_weights()
        if version is not None:
            self.version = version
        if self.ranks is None or not isinstance(self.weights, Weights):
            self.weights.read()
        elif version is not None:
            self.ranks.read(self.job)
        if version is not None and self.ranks is not None and self._looks_for_writes:
            self._note()
        self._step.mend()

    def expect(self) -> None:
        """Gives each parameter the requested weights: before its first use, or now."""
        version = self.job.unread_weights()
        if version is None or not self._is_layerwise or self.ranks is not None or is_compiling():
            self.read()  # with units this waits for nothing
            return
        self.version = version
        self.weights.expect()
