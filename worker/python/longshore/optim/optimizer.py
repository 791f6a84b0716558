"""The base of this package's optimizers: a ``torch.optim.Optimizer`` whose step is made by servers.

:class:`Optimizer` joins the parts of this folder: steps, streaming, state, guards. All of it runs on the training thread. An optimizer gives way to a
newer one over the same parameters, as where a notebook's cell runs again.
"""

import contextlib
import dataclasses
import math
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from longshore.errors import LongshoreError, RefusedError, UsageError, invalid
from longshore.optim import guards
from longshore.optim.connection import Connection
from longshore.optim.guards import Absent, Watch
from longshore.optim.state_dict import Stateful
from longshore.optim.step import Stepping
from longshore.optim.streaming import Stream
from longshore.transfer import job as _job
from longshore.transfer import params as _params
from longshore.transfer.filling import Filling
from longshore.transfer.gradients import Gradients
from longshore.transfer.job import Hyper
from longshore.transfer.options import Options
from longshore.transfer.params import Param
from longshore.transfer.tensors import UnitParameter, is_built
from longshore.units.build import Unplaced, filling
from longshore.units.residency import UnitWeights


class Succession:
    """The part of an optimizer that gives way to the next one."""

    param_groups: list[dict[str, Any]]
    _options: Options
    _stream: Stream | None
    _units: UnitWeights | None
    _process: int
    #: Whether another optimizer has taken the parameters over.
    _is_replaced: bool

    @property
    def rank(self) -> tuple[int, int]:
        raise NotImplementedError

    def _tensors(self) -> list[Tensor]:
        raise NotImplementedError

    def flush(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _claim_at_once(self) -> None:
        """Claims the parameters before the first step where backward would send their gradients for another optimizer."""
        trained = [(name, tensor) for name, tensor in _params.named(self.param_groups) if tensor.requires_grad]
        if self._options.streaming or any(other.accumulates[0] for _, other in _params.owners(trained, self)):
            _params.claim(trained, self, is_begun=False)

    def give_way(self, tensors: set[int]) -> bool:
        """Closes this optimizer for another one that updates all of its parameters from now on, as torch lets one follow the other. The
        parameters have the last weights then.

        Args:
            tensors: what the other one updates, by ``id``.

        Returns:
            False where that cannot be, and nothing has changed: it updates others too, other ranks would not know, or its model is in units.
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

    def _check_not_replaced(self) -> None:
        if self._is_replaced:
            raise UsageError("this optimizer was closed when another one took its parameters over: step the newer one")


#: What of a job may be otherwise where it is brought back from a checkpoint: how many gradients make a step, and how it is kept.
_LEFT_OPEN = ("spec.world_size", "spec.micro_steps", "spec.shard_elements", "spec.tier", "spec.unchecked")


class Optimizer(Stepping, Stateful, Succession):
    """An optimizer whose master weights and state live on optimizer servers.

    It is used as any other of torch: hooks, param groups, schedulers, closures, accumulation in ``.grad`` and
    ``GradScaler`` mean what they do there. The job is opened on its servers in the first step, so param groups may be
    added until then. Where ``servers=`` have the job already, it is opened at once, and the parameters get its weights.
    """

    #: The servers' name of the update rule.
    rule: ClassVar[str]

    def __init__(self, params: Any, defaults: dict[str, Any], options: dict[str, Any]) -> None:
        self._options = Options.of(options)
        self._job_name = self._options.job or _job.new_job_name("torch")
        self._process = os.getpid()
        self._connection: Connection | None = None
        #: What a new job is filled with instead of the parameters' weights.
        self._filling: Filling | None = None
        self._table: tuple[list[Param], list[Param]] | None = None
        self._stream: Stream | None = None
        #: What weights come through once the model is in units.
        self._units: UnitWeights | None = None
        self._gradients = Gradients()
        self._watch: Watch | None = None
        self._absent = Absent()
        self._applied = torch.zeros(())
        self.last_report = None
        self._loss = None
        self.resume_data = None
        self._checkpointed: tuple[int, str] | None = None
        self._is_refused = False
        self._starts_over = False
        self._is_pushed = False
        self._is_replaced = False
        super().__init__(params, defaults)
        self._claim_at_once()
        if self._options.servers is not None:
            self._warn_of_no_name()
            self._join_if_there()
        if self._options.streaming:
            self._stream = Stream(self)
        self._guard_clipping()

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, until the job is opened.

        Raises:
            UsageError: once the job is open, since its layout is fixed then.
            InvalidError: naming a parameter that servers cannot keep, or one that is in another group already.
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
        for tensor in group["params"]:
            # One tensor for all: a state that is never empty, so that nobody makes a step to fill it.
            self.state[tensor]["step"] = self._applied
        if self._stream is not None:
            self._stream.hook()
        if hasattr(self, "_optimizer_step_pre_hooks"):
            self._guard_clipping()

    def _check_group(self, group: dict[str, Any]) -> None:
        if "max_grad_norm" in group:
            raise invalid(
                "param_groups['max_grad_norm']",
                group["max_grad_norm"],
                "absent: the norm is that of all groups",
                "give the optimizer max_grad_norm=",
                UsageError,
            )
        self._check_hyper(group)
        # Servers would refuse the step once its gradients have left.
        for name, value in dataclasses.asdict(self._hyper(group)).items():
            if not math.isfinite(value):
                raise invalid(name, value, "finite", "look at the scheduler, and call step() again with a number")

    def _check_hyper(self, group: dict[str, Any]) -> None:
        """Refuses what the servers' rule does not have."""

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        raise NotImplementedError

    # The job

    @property
    def job(self) -> str:
        """The job's name on its servers."""
        return self._job_name

    @property
    def is_in_units(self) -> bool:
        """Whether the model was given to :func:`longshore.shard`."""
        return self._units is not None

    @property
    def version(self) -> int:
        """The version whose weights the parameters hold: the number of decided steps behind them."""
        return self._connection.version if self._connection else 0

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm of the newest decided step, before clipping."""
        return self.last_report.grad_norm if self.last_report else None

    def open(self) -> None:
        """Opens the job now instead of in the first step. A job that is there already gives the parameters its weights.

        Raises:
            LongshoreError: one of :mod:`longshore.errors`.
        """
        self._opened()

    def _new_connection(self) -> Connection:
        tensors = [tensor for _, tensor in _params.named(self.param_groups)]
        if self._units is None and any(isinstance(tensor, UnitParameter) and not is_built(tensor) for tensor in tensors):
            raise UsageError("the model is in units: build its optimizer before shard(), and the model again for another optimizer")
        params, frozen = self._table_of_job()
        connection = Connection(self._options, self._job_name, self.rule, params, len(self.param_groups), frozen)
        if any(map(is_built, tensors)):
            connection.weights = Unplaced()
            self._filling = self._filling or filling(params)
        return connection

    def _warn_of_no_name(self) -> None:
        if self._options.job or self._options.server() is not None:
            return
        warnings.warn(
            f"no job= was given, so this one is {self._job_name}: it stays on the servers when this process ends, and takes their memory "
            "until `longshore delete` ends it. Give it a name, and the next run goes on with it",
            UserWarning,
            stacklevel=4,
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
            # A state that is loaded before the first step may bring the job back with this. Otherwise that step raises.
            self._is_refused = True
            _params.release([id(param.tensor) for param in connection.params])

    def _opened(self, *, in_step: bool = False) -> Connection:
        """The job, which is opened now if it was not before.

        Args:
            in_step: weights may have been used already, as by the forward of a backward that goes on: those that are the job's stay untouched.
        """
        self._check_not_replaced()
        if self._process != os.getpid():
            raise UsageError(
                "the optimizer was built in another process, and a fork has none of its connections: build it in the process "
                "that trains, or start processes with the method spawn"
            )
        if self._starts_over:
            raise UsageError(
                "the step in hand was given up, and joining its job again was interrupted: call zero_grad() or flush(), which go on with "
                "that, and compute the step's gradients again"
            )
        return self._connection or self._start(self._new_connection(), in_step=in_step)

    def _opened_by_gradients(self) -> Connection:
        """The same, for gradients that were made already.

        Raises:
            UsageError: where the job begins with other weights than these were computed with.
        """
        is_first = self._connection is None
        connection = self._opened(in_step=True)
        if is_first:
            connection.refuse_other_weights()
        return connection

    def _start(self, connection: Connection, *, found: bool = False, in_step: bool = False) -> Connection:
        self.check_model()
        _params.claim([(param.name, param.tensor) for param in connection.params], self)
        try:
            if self._units is not None:
                # Not before this: a job that is only asked for its checkpoints has no weights to give.
                connection.put_in_units(self._units.belong_to(connection.job))
            self._applied.fill_(connection.start(self._filling, found=found, in_step=in_step))
            self._gradients.locked = connection.locked
        except BaseException:
            _params.release(id(param.tensor) for param in connection.params)
            raise
        self._connection, self._filling, self._table = connection, None, connection.table
        trained = {id(param.tensor) for param in connection.params}
        self._frozen = [
            (name, tensor)
            for name, tensor in _params.named(self.param_groups)
            if id(tensor) not in trained and tensor.numel()
        ]
        embedded = self._options.servers is None
        self._finalizer = weakref.finalize(self, _closed, connection, embedded, list(trained))
        # At the interpreter's end the process ends the job of a server inside it, and any other job goes on.
        self._finalizer.atexit = False
        return connection

    def close(self) -> None:
        """Waits until the last step is safe, and gives the rank up. The job stays on its servers; one of the server inside
        this process is deleted. The optimizer cannot be used after it. Ranks that gather units gather the last weights as well, so that
        each of them calls it, and waits for the others; where an exception ends one, it pulls all of them. Where it fails or is
        interrupted, it may be called again."""
        if self._connection is not None and self._finalizer.alive:
            tensors = [id(param.tensor) for param in self._connection.params]
            _params.release(tensors)
            guards.release_clipping(tensors)
            if self._stream is not None:
                self._stream.unhook()
            self._connection.weights.settle()
            self._connection.close(self._options.servers is None)
            self._finalizer.detach()

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` has given the rank up. The parameters have the last weights."""
        return self._connection is not None and not self._finalizer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step, and returns when the parameters hold the next step's weights.

        In streaming mode the gradients have left already, and a parameter's weights are waited for when it is used;
        otherwise gradients in ``.grad`` leave now and stay as they are. If no parameter has a gradient, nothing happens, as in
        torch; with several ranks another one may have some, and the step is made unless ``missing_gradients="error"``.

        Args:
            closure: computes the loss again, with gradients, and returns it.

        Returns:
            What the closure returned.

        Raises:
            MissingGradientError: if some parameters have a gradient and others do not, with ``missing_gradients="error"``.
            GradientError: for a gradient of another type, shape or layout.
            LongshoreError: any other of :mod:`longshore.errors`.
        """
        self._check_not_replaced()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._check_group(group)
        if not self.has_begun:
            self.check_model()
        if self._stream is not None:
            made = self._stream.finish()
        else:
            made = self._push()
        if made:
            self._commit()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the step in hand, as torch's does. In streaming mode they may have left already, as where a
        backward or what followed it was interrupted: servers then forget them too, unless there are other ranks, which wait for
        that step."""
        super().zero_grad(set_to_none)
        if self._starts_over or (self._stream is not None and self._stream.has_begun and self._can_start_over()):
            self._start_over()

    def flush(self) -> int:
        """Waits until every step is decided and the parameters hold the newest weights. Call it before an evaluation or a
        save with ``delay=1``, and after a step that was interrupted. The next step computes with these weights. In streaming
        mode it gives up a step whose backward was interrupted, and one that was refused by a :class:`MissingGradientError`, so that it
        can be made of another batch.

        Returns:
            The version of the weights.
        """
        if self._starts_over:
            self._start_over()
        connection = self._connection
        if connection is None:
            return 0
        self._opened()
        made = connection.made
        connection.drain()
        connection.read()
        self._report(connection)
        is_left, self._is_pushed = self._is_pushed and connection.made == made, False
        if (is_left or (self._stream is not None and self._stream.is_broken_off)) and self._can_start_over():
            super().zero_grad()  # what was made and has not left
            self._start_over()
        return self.version

    def _settle(self) -> Connection:
        """Waits until every step is decided, so that servers have the newest state. Any rank may call it alone: where they read weights
        together, parameters stay as they are."""
        if self._connection is None and (self._options.partition is not None or any(map(_params.is_sharded, self._tensors()))):
            raise UsageError("the job is not open, and its ranks open it together: call open() on all of them first, or make a step")
        connection = self._opened()
        if connection.ranks is None:
            self.flush()
        else:
            connection.drain_alone()
            self._report(connection)
        return connection

    def checkpoint(self, name: str) -> str:
        """Has the servers write a checkpoint of their state, while nothing else happens to the job.

        Returns:
            Its name: ``name``, or ``name.2`` and so on where another state has taken that.

        Raises:
            RefusedError: if a server has no folder for checkpoints, or no room.
        """
        connection = self._opened()
        if connection.ranks is None:
            self.flush()  # else all ranks must, since they read together
        kept, version = connection.job.checkpoint(name)
        self._checkpointed = (version, kept)
        return kept

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


def _closed(connection: Connection, embedded: bool, tensors: list[int]) -> None:
    """Ends the job of an optimizer that is gone. Nobody else can reach a job of the server in this process."""
    _params.release(tensors)
    guards.release_clipping(tensors)
    connection.weights.abandon()
    if embedded:
        # In a fork the job is the parent's; and a server that has failed has forgotten it anyway.
        with contextlib.suppress(LongshoreError):
            connection.close(True)
