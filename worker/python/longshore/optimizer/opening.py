"""An optimizer's param groups and its job: opened, closed, checkpointed, moved, and handed over to a newer optimizer.

All calls come from the training thread, but one: the first gradient of streaming mode opens the job on autograd's thread. A newer optimizer
over the same parameters replaces an older one, for example when a notebook's cell runs again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from longshore.errors import LongshoreError, RefusedError, UsageError, invalid, warn
from longshore.optimizer import guards
from longshore.optimizer.guards import Groups
from longshore.optimizer.parts import Connected
from longshore.optimizer.states import State
from longshore.transfer import device
from longshore.transfer import params as _params
from longshore.transfer.job import Hyper
from longshore.transfer.options import Options, listed

if TYPE_CHECKING:
    from longshore.optimizer.connection import Connection

#: Names of the job's options, which a param group must not have.
OPTIONS = frozenset(field.name for field in dataclasses.fields(Options))

#: Fields of ``JobSpec`` that may differ when a job is restored from a checkpoint.
_LEFT_OPEN = ("spec.world_size", "spec.micro_steps", "spec.shard_elements", "spec.tier")


class Opening(Connected):
    """The part of an optimizer that opens its job, closes it, and hands parameters over to another optimizer."""

    #: The process that built the optimizer.
    _process: int
    #: The guard of the job's param groups; None until the job is opened.
    _groups: Groups | None
    #: Each group's hyperparameters at the time when the group was added.
    _first_hypers: list[Hyper]
    #: True until a warning has said that checkpoints end with this process.
    _warns_of_checkpoints: bool = True
    #: True if another optimizer has taken over the parameters.
    _is_replaced: bool

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. Only possible until the job is opened.

        Raises:
            UsageError: once the job is open, since its layout is fixed then.
            InvalidError: naming a parameter that servers cannot keep, or that another group has already.
        """
        if getattr(self, "_connection", None) is not None:
            raise invalid(
                "param_groups",
                "extended after the job was opened",
                "complete by the first step",
                "give the optimizer all groups when it is built, with requires_grad=False and frozen='train-later' for what trains later; or "
                "build a new optimizer, which starts a new job",
                UsageError,
            )
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):
            param_group["params"] = params = list(params)
            _params.check_group(self.param_groups, params, later=self._options.trains_later)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._check_group(group)
        self._first_hypers.append(self._hyper(group))
        for tensor in group["params"]:
            # Other code fills an empty state by making a step, so each parameter's state has an entry. All share a
            # tensor.
            self.state[tensor]["step"] = self._applied
        if self._stream is not None:
            self._stream.hook()
        if hasattr(self, "_optimizer_step_pre_hooks"):
            self._guard_clipping()

    def _check_group(self, group: dict[str, Any]) -> None:
        for option in OPTIONS & group.keys():
            limit = "absent: the norm is that of all groups" if option == "max_grad_norm" else "absent: options are those of the whole job"
            raise invalid(f"param_groups['{option}']", group[option], limit, f"give the optimizer {option}=", UsageError)
        self._check_hyper(group)
        # Checked here, since servers would refuse the step only after its gradients have left.
        hyper = self._hyper(group)
        for name in Hyper.__slots__:
            if not math.isfinite(getattr(hyper, name)):
                raise invalid(name, getattr(hyper, name), "finite", "look at the scheduler, and call step() again with a number")

    def _lasting_values(self) -> list[list[float]]:
        return [[getattr(self._hyper(group), name) for name in self._lasting] for group in self._groups_of_job()]

    def _check_kept(self, groups: list[list[float]]) -> None:
        """Refuses hyperparameters that differ from earlier steps', where servers compute state of the rule from this
        step's values and the step count."""
        for number, (before, now) in enumerate(zip(self._kept, groups, strict=bool(self._kept))):
            for name, theirs, mine in zip(self._lasting, before, now, strict=True):
                if mine != theirs:
                    field = f"param_groups[{number}]['{'betas' if name == 'beta1' else name}']" + ("[0]" if name == "beta1" else "")
                    remedy = (
                        "set it back, pass cycle_momentum=False to a scheduler that cycles it, or use AdamW: servers compute mu_product from "
                        "this step's value"
                    )
                    raise invalid(field, mine, f"{theirs}, as in the steps before", remedy)

    def _groups_of_job(self) -> list[dict[str, Any]]:
        return self.param_groups if self._groups is None else self._groups.in_order(self.param_groups)

    # The job

    @property
    def job(self) -> str:
        """The job's name on its servers."""
        return self._job_name

    @property
    def rank(self) -> tuple[int, int]:
        """This worker's rank and the job's world size."""
        return self._options.place()

    @property
    def is_first_rank(self) -> bool:
        """True if this worker is rank 0, which decides steps and asks for checkpoints."""
        return self.rank[0] == 0

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that servers clip to. Writable until the job is opened."""
        return self._options.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        if norm == self._options.max_grad_norm:
            return
        if self._connection is not None:
            raise invalid(
                "max_grad_norm",
                norm,
                f"{self._options.max_grad_norm}, as when the job was opened",
                "set it before the first step; or close() this optimizer and build another one with it, which goes on with the "
                "same job= of the same servers",
                UsageError,
            )
        options = dataclasses.replace(self._options, max_grad_norm=norm)
        options._check()
        self._options = options
        self._guard_clipping()

    @property
    def has_begun(self) -> bool:
        """True if streaming mode has sent gradients of a step that is not decided yet."""
        return self._now.has_begun

    @property
    def is_named_by_place(self) -> bool:
        """True if the job calls parameters by their places, since no names were given. The job must be open."""
        assert self._connection is not None
        return any(_params.is_place(param.name) for param in self._connection.params)

    @property
    def accumulates(self) -> tuple[bool, int]:
        """A pair: True if gradients leave during backward, and the number of backward passes that a step has then."""
        return self._options.streaming, self._options.accumulate

    @property
    def is_in_units(self) -> bool:
        """True if the model was given to :func:`longshore.shard`."""
        return self._units is not None

    @property
    def version(self) -> int:
        """The version whose weights the parameters hold: the number of decided steps behind them."""
        self._is_version_known = True  # a script that asks needs no warning
        return self._version

    @property
    def global_step(self) -> int:
        """The number of steps made, by which a restarted script goes on with its data and schedule. With ``delay=1`` it is one more than
        :attr:`version` until a :meth:`flush`."""
        self._is_version_known = True
        return self._connection.made if self._connection else 0

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm of the newest decided step, before clipping."""
        return self.last_report.grad_norm if self.last_report else None

    def open(self) -> None:
        """Opens the job now instead of in the first step. An existing job gives the parameters its weights.

        Raises:
            LongshoreError: one of :mod:`longshore.errors`.
        """
        self._opened()

    def _warn_of_no_name(self) -> None:
        if self._options.job or self._options.server() is not None:
            return
        warn(
            f"no job= was given, so this one is {self._job_name}: it stays on the servers when this process ends, and takes their memory "
            "until `longshore delete` ends it. Give it a name, and the next run goes on with it"
        )

    def _join_if_there(self) -> None:
        connection = self._new_connection()
        if connection.find() is None:
            return
        try:
            self._start(connection, found=True)
        except RefusedError as error:
            if error.field not in _LEFT_OPEN:
                raise
            # No error yet: a state that is loaded before the first step may restore the job with these options. If none
            # is, the first step raises.
            self._is_refused = True
            _params.release(connection.ids)

    def _opened(self, *, in_step: bool = False) -> Connection:
        """Returns the job, opened now if necessary.

        Args:
            in_step: weights may have been used already, for example by the forward of a running backward. Weights that equal the job's stay
                untouched.
        """
        self._check_not_replaced()
        if self._process != os.getpid():
            raise UsageError(
                "the optimizer was built in another process, and a fork has none of its connections: build it in the process "
                "that trains, or start processes with the method spawn"
            )
        self._now.refuse(State.GIVEN_UP)
        return self._connection or self._start(self._new_connection(), in_step=in_step)

    def _opened_by_gradients(self) -> Connection:
        """Returns the job for gradients that exist already, opened now if necessary.

        Raises:
            UsageError: if the gradients were computed with other weights than the job's first.
        """
        is_first = self._connection is None
        connection = self._opened(in_step=True)
        if is_first:
            connection.refuse_other_weights()
        return connection

    def _start(self, connection: Connection, *, found: bool = False, in_step: bool = False, held: int | None = None) -> Connection:
        self.check_model()
        _params.claim([(param.name, param.tensor) for param in connection.params], self)
        try:
            if self._units is not None:
                # Units attach only here: a job that is merely asked for its checkpoints gives the model no weights.
                connection.put_in_units(self._units.belong_to(connection.job, held))
            self._applied.fill_(connection.start(self._filling, found=found, in_step=in_step, held=held))
            self._gradients.locked = connection.locked
            self._gradients.may_be_on_device = device.has_any(connection.columns.tensors)
        except BaseException:
            _params.release(connection.ids)
            raise
        if self._filling is not None:
            self._filling.warn_of_others()
        self._connection, self._filling, self._table = connection, None, connection.table
        self._groups = self._groups or Groups(self.param_groups, connection.params)
        trained = set(connection.ids)
        named = _params.named(self.param_groups)
        self._frozen = [(name, tensor) for name, tensor in named if id(tensor) not in trained and tensor.numel()]
        self._finalizer = weakref.finalize(self, _closed, connection, self._options.servers is None)
        # Nothing is to be done at the interpreter's end. An embedded server's job ends with the process, and any other
        # job goes on.
        self._finalizer.atexit = False
        return connection

    def close(self) -> None:
        """Waits until the last step is safe, and gives the rank up. The optimizer cannot be used afterwards.

        The job stays on its servers; a job of the server inside this process is deleted. Ranks that gather units gather the last weights,
        so each calls this method and waits for the others. After an exception a rank pulls all of them alone. If closing fails or is
        interrupted, the caller may call it again."""
        if self._connection is not None and self._finalizer.alive:
            _params.release(self._connection.ids)
            guards.release_clipping(self._connection.ids)
            if self._stream is not None:
                self._stream.unhook()
            self._connection.weights.settle()
            self._connection.close(self._options.servers is None)
            self._finalizer.detach()

    @property
    def is_closed(self) -> bool:
        """True if :meth:`close` has given the rank up. The parameters have the last weights."""
        return self._connection is not None and not self._finalizer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> Connection:
        """Waits until every step is decided, so that servers have the newest state. Any rank may call it alone: if ranks read weights
        together, the parameters stay unchanged."""
        if self._connection is None and (self._options.partition is not None or any(map(_params.is_sharded, self._tensors()))):
            raise UsageError("the job is not open, and its ranks open it together: call open() on all of them first, or make a step")
        connection = self._opened()
        if connection.ranks is None:
            self.flush()
        else:
            connection.drain_alone()
            self._report(connection)
        return self._opened()  # flush may have joined the job again

    def checkpoint(self, name: str) -> str:
        """Makes the servers write a checkpoint of their state. Nothing else happens to the job meanwhile.

        Without ``servers=`` the checkpoint ends with this process, and a warning says so.

        Returns:
            The checkpoint's name: ``name``, or ``name.2`` and so on if another state has that name.

        Raises:
            RefusedError: if a server has no folder for checkpoints, or too little space.
        """
        kept = self._write_checkpoint(name)
        if self._warns_of_checkpoints and self.passing_checkpoints is not None:
            self._warns_of_checkpoints = False
            warn(
                f"checkpoint {kept} of job {self._job_name} is in {self.passing_checkpoints}, and this folder is deleted when this process "
                "ends: no other process can go back to it. Name servers= and job=, or pass servers=longshore.Server(checkpoint_dir=...)"
            )
        return kept

    def _write_checkpoint(self, name: str) -> str:
        if self._opened().ranks is None:
            self.flush()  # reducing ranks read together, so one alone cannot flush
        kept, version = self._opened().job.checkpoint(name)
        self._checkpointed = (version, kept)
        return kept

    def scale(self, servers: str | Sequence[str], *, tier: str | None = None, max_exposed: float = 0.05) -> None:
        """Moves the job to other servers while training goes on: its shards move with the next steps, and no bit changes.

        Returns once the servers know of the wish. A later one replaces it. Called by a single rank.

        Args:
            servers: addresses of all servers that the job shall have (``"host1:7070,host2:7070"`` or a sequence).
            tier: where new servers keep the job, as in `AdamW(tier=...)`; no server of another tier may stay. None: the tier of the present servers.
            max_exposed: largest part of a step's time that updates may wait for shards that move, above 0 and at most 1.

        Raises:
            RefusedError: for an empty list or one with repetitions, a job that cannot move, and an identity without the role operator.
        """
        self._opened().job.scale(listed(servers), tier, max_exposed)

    # Other optimizers of the same parameters

    def _claim_at_once(self) -> None:
        """Claims the parameters before the first step if backward would send their gradients for another optimizer."""
        trained = [(name, tensor) for name, tensor in _params.named(self.param_groups) if tensor.requires_grad]
        if self._options.streaming or any(other.accumulates[0] for _, other in _params.owners(trained, self)):
            _params.claim(trained, self, is_begun=False)

    def give_way(self, tensors: set[int]) -> bool:
        """Closes this optimizer if another one updates all of its parameters from now on, as torch allows. The parameters then hold the
        last weights.

        Args:
            tensors: the parameters that the other optimizer updates, by ``id``.

        Returns:
            False, with nothing changed, if this optimizer updates other parameters too, has other ranks, or has its model in units.
        """
        mine = {id(tensor) for tensor in self._tensors() if tensor.requires_grad}
        if not mine <= tensors or self.rank[1] > 1 or self._units is not None or self._process != os.getpid():
            return False
        self.flush()
        self.close()
        if self._stream is not None:
            self._stream.unhook()
        guards.release_clipping(mine)
        self._is_replaced = True
        return True

    def _check_unused(self) -> None:
        """Refuses an act that brings new weights while the model's units are in use."""
        if self._units is not None:
            self._units.check_unused()

    def _check_not_replaced(self) -> None:
        if self._is_replaced:
            raise UsageError("this optimizer was closed when another one took its parameters over: step the newer one")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: its state is job {self._job_name} on its servers, of which there "
            "is one. Save state_dict() instead, or build another optimizer"
        )

    def _guard_clipping(self) -> None:
        options = self._options
        guards.release_clipping(id(tensor) for tensor in self._tensors())
        why = guards.STREAMING if options.streaming else guards.SCALED if options.loss_scale else guards.SERVERS
        if options.streaming or options.loss_scale or options.max_grad_norm is not None:
            guards.guard_clipping(self, _params.named(self.param_groups), why)


def _closed(connection: Connection, embedded: bool) -> None:
    """Ends the job of a freed optimizer. Nobody else can reach a job of the server in this process."""
    _params.release(connection.ids)
    guards.release_clipping(connection.ids)
    connection.weights.abandon()
    if embedded:
        # Errors are ignored: in a fork the job is the parent's, and a failed server has forgotten the job anyway.
        with contextlib.suppress(LongshoreError):
            connection.close(True)
