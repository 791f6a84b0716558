"""``state_dict`` and ``load_state_dict``: a small handle of the state on servers, or all of it on request.

A handle has plain containers and one tensor. :class:`Back` goes back to the version that a handle names, from a checkpoint of the servers.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from longshore.distributed import agree
from longshore.errors import LongshoreError, RefusedError, StateError, UsageError, invalid
from longshore.optim.connection import Connection
from longshore.optim.streaming import Stream
from longshore.transfer import filling as _filling
from longshore.transfer import params as _params
from longshore.transfer.filling import NAMES, Filling
from longshore.transfer.options import Options
from longshore.transfer.params import Param

KEY = "longshore"
_FORMAT = 1


def handle(job: str, version: int, made: int, rule: str, fingerprint: str | None) -> dict[str, Any]:
    """What names a version of a job. The fingerprint is of its parameters, once the job is open.

    Args:
        made: how many steps were made, which is noted where a delayed job has more of them than the version that is held.
    """
    found = {"format": _FORMAT, "job": job, "version": version, "rule": rule, "fingerprint": fingerprint}
    return found if made == version else {**found, "made": made}


def steps_made(handle: dict[str, Any]) -> int:
    """How many steps had been made."""
    steps: int = handle.get("made", handle["version"])
    return steps


def note(state_dict: dict[str, Any]) -> None:
    """Has each param group name the job, too: ``torch.distributed.checkpoint.state_dict`` takes a state apart, and keeps these alone."""
    for group in state_dict["param_groups"]:
        group[KEY] = dict(state_dict[KEY])


def with_handle(state_dict: dict[str, Any], *, has_moments: bool) -> dict[str, Any]:
    """The same with its handle in its place and nowhere else. A state that has moments is one that needs none."""
    groups = state_dict["param_groups"]
    noted = [group[KEY] for group in groups if KEY in group]
    whole = {**state_dict, "param_groups": [{key: value for key, value in group.items() if key != KEY} for group in groups]}
    if noted and KEY not in state_dict and not has_moments:
        whole[KEY] = noted[0]
    return whole


def check_is_whole(state_dict: dict[str, Any], *, has_moments: bool) -> None:
    """Refuses a handle that has lost the job's name, which would pass for a state of torch from before its first step.

    Raises:
        StateError: saying what to save instead.
    """
    steps = [float(state["step"]) for state in state_dict["state"].values() if "step" in state]
    if any(steps) and not has_moments:
        raise invalid(
            "state_dict",
            f"one of {max(steps):.0f} steps without moments and without a job",
            "a handle, or all state",
            "save optimizer.state_dict() as it is, or state_dict(full=True). torch.distributed.checkpoint.state_dict leaves a handle whole "
            "unless it is asked for flatten_optimizer_state_dict=True",
            StateError,
        )


def is_of_job(given: dict[str, Any], job: str) -> bool:
    """Whether it is a handle of this job, or all state of it."""
    theirs = given.get(KEY)
    return isinstance(theirs, dict) and theirs.get("job") == job


def refuse_to_fill(job: str, version: int) -> Exception:
    """The error for a state that was given to a job that has its own."""
    return invalid(
        "state_dict",
        f"one of another optimizer, and job {job} is at version {version}",
        "given to a new job, before its first step",
        "load it right after the optimizer is built, with a job= that the servers do not have; or go on from the servers' state "
        "without loading one",
        StateError,
    )


def check(given: dict[str, Any], mine: dict[str, Any]) -> None:
    """Refuses a state that is not the very one that the servers have.

    Raises:
        StateError: naming what differs, and what to do.
    """
    theirs = given.get(KEY)
    if not isinstance(theirs, dict):
        raise invalid(
            "state_dict",
            f"one with {', '.join(sorted(map(str, given)))}",
            "one that an optimizer of longshore returned",
            "load the state of another optimizer right after building this one, before its first step",
            StateError,
        )
    if theirs.get("format") != _FORMAT:
        remedy = "load it with the version of longshore that saved it"
        raise invalid("state_dict['longshore']['format']", theirs.get("format"), str(_FORMAT), remedy, StateError)
    if theirs["job"] != mine["job"]:
        raise invalid(
            "state_dict['longshore']['job']",
            theirs["job"],
            f"{mine['job']}, this optimizer's job",
            f"build the optimizer with job={theirs['job']!r} and the servers that hold it. A job of a server inside a "
            "process ends with that process, unless its tier is nvme or shm",
            StateError,
        )
    for field in ("rule", "fingerprint"):
        if None not in (theirs[field], mine[field]) and theirs[field] != mine[field]:
            raise invalid(
                f"state_dict['longshore']['{field}']",
                theirs[field],
                f"{mine[field]}, this optimizer's",
                "build the optimizer with the parameters and groups that the job has",
                StateError,
            )
    if theirs["version"] != mine["version"] or steps_made(theirs) < steps_made(mine):
        raise invalid(
            "state_dict['longshore']['version']",
            theirs["version"],
            f"{steps_made(mine)}, which the servers have",
            "go on from the servers' version, or load a state of whose version the servers have a checkpoint: "
            "optimizer.checkpoint() writes one where a server has a folder for them (--checkpoint-dir)",
            StateError,
        )


class Back:
    """The part of an optimizer that goes back to a checkpoint."""

    _options: Options
    _job_name: str
    _connection: Connection | None
    _stream: Stream | None
    _finalizer: Any
    _checkpointed: tuple[int, str] | None
    _is_refused: bool
    #: Whether the step in hand is being given up, and that has not come to its end.
    _starts_over: bool
    version: int
    is_in_units: bool

    def _new_connection(self) -> Connection:
        raise NotImplementedError

    def _guard_clipping(self) -> None:
        raise NotImplementedError

    def _start(self, connection: Connection, *, found: bool = False) -> Connection:
        raise NotImplementedError

    @property
    def rank(self) -> tuple[int, int]:
        """This worker among the job's, and how many these are."""
        return self._options.place()

    @property
    def is_first_rank(self) -> bool:
        """Whether this is rank 0, which decides steps and asks for checkpoints."""
        return self.rank[0] == 0

    @property
    def max_grad_norm(self) -> float | None:
        """What servers clip to. It may be set until the job is opened."""
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
        """Whether gradients have left, in streaming mode, of a step that was not made."""
        return self._stream is not None and self._stream.has_begun

    @property
    def is_named_by_place(self) -> bool:
        """Whether nobody has said names, so that the job calls parameters by their places. The job must be open."""
        assert self._connection is not None
        return any(_params.is_place(param.name) for param in self._connection.params)

    @property
    def accumulates(self) -> tuple[bool, int]:
        """Whether gradients leave as backward makes them, and of how many backward passes a step is made then."""
        return self._options.streaming, self._options.accumulate

    @property
    def passing_checkpoints(self) -> Path | None:
        """The folder of checkpoints of a server that ends with this process; None where the job's servers are others."""
        server = self._options.server()
        return Path(server.checkpoint_dir) if server is not None and server.is_passing and server.checkpoint_dir else None

    @property
    def is_in_memory(self) -> bool:
        """Whether servers have all state in memory, so that this host may have room for it too."""
        return self._options.tier != "nvme"

    def has_checkpoint_folder(self) -> bool:
        """Whether the job's servers have a folder for checkpoints. The job must be open."""
        assert self._connection is not None
        return _listed(self._connection) is not None

    @property
    def waits_for_state(self) -> bool:
        """Whether the servers have the job for another world size, say, so that only a state that is loaded can open it."""
        return self._is_refused and self._connection is None

    def adopt(self, job: str) -> None:
        """Takes the name of a job whose server ended with its process, to go back to a checkpoint of it. The job in hand ends. Where that
        fails or is interrupted, it may be called again; the job ends with this optimizer otherwise."""
        if job == self._job_name:
            return
        if self._connection is not None:
            self._connection.close(True)
            self._finalizer.detach()
            tensors = [id(param.tensor) for param in self._connection.params]
            _params.release(tensors)
            self._connection.weights.forget()
            self._connection = None
        self._job_name = job

    @property
    def resumed(self) -> bytes | None:
        """What :attr:`resume_data` gave with the commit of the version that this optimizer has joined at; None in a new job."""
        return self._connection.job.resumed() if self._connection else None

    def flush(self) -> int:
        raise NotImplementedError

    def _can_start_over(self) -> bool:
        """Whether nobody else waits for the gradients of the step in hand."""
        return self.rank[1] == 1

    def _start_over(self) -> None:
        """Gives up what has left of the step in hand: joins again as a new process would, whose step servers make anew. All of it waits
        for servers, so that each part may be done again where an error or Ctrl-C has ended it."""
        self._starts_over = True
        old = self._connection
        if old is not None:
            old.weights.give_up()
            old.close(False)
            self._finalizer.detach()
            _params.release([id(param.tensor) for param in old.params])
            self._connection = None
        connection = self._start(self._new_connection(), found=True)
        # A delayed step would read the version before.
        connection.drain()
        connection.read()
        self._stream_anew()

    def _stream_anew(self) -> None:
        if self._stream is not None:
            self._stream.unhook()
            room = self._stream.room
            self._stream = Stream(self)
            self._stream.room = room
        self._starts_over = False

    def _may_be_other(self, version: int, name: str | None) -> bool:
        """Whether a checkpoint may be of another run than the job in hand, also at the same version: those that went on from one
        checkpoint of a server that ended with its process have the same job."""
        return self.passing_checkpoints is not None and name is not None and self._checkpointed != (version, name)

    def _go_back(self, state_dict: dict[str, Any]) -> None:
        wanted = _wanted(state_dict, self._job_name)
        is_other = wanted is not None and self._may_be_other(*wanted)
        if wanted is None:
            return
        connection = self._connection
        # A delayed job whose parameters have this version may have made a step more.
        made = steps_made(state_dict[KEY])
        is_here = wanted[0] == self.version and (connection is None or (connection.made == made and not connection.is_torn))
        if is_here and not is_other:
            return
        if connection is not None and connection.joined == wanted[0] and not is_other:
            # The servers are there, but a delayed step would read the version before. The handle was saved after a flush, and
            # the step that followed would have read this one.
            self.flush()
            return
        connection, old = self._new_connection(), self._connection
        name = _find(connection, *wanted)
        if name is None:
            return  # the check that follows says so
        _go(connection, old, self._options.place()[0], wanted[0], name)
        if old is not None:
            self._finalizer.detach()
            old.weights.forget()  # its last step is given up, and nobody is to wait for the weights of that
        tensors = [id(param.tensor) for param in connection.params]
        _params.release(tensors)
        self._start(connection, found=True)
        if self.version != wanted[0]:
            self.flush()  # a checkpoint is written after a flush, too
        self._checkpointed = (wanted[0], name)
        self._stream_anew()


def _wanted(state_dict: dict[str, Any], job: str) -> tuple[int, str | None] | None:
    """The version of this job that a handle names, and its checkpoint if the handle names one; None where the handle is of another
    job."""
    handle = state_dict.get(KEY)
    if not isinstance(handle, dict) or handle.get("job") != job:
        return None
    named = handle.get("version")
    return (named, handle.get("checkpoint")) if isinstance(named, int) else None


def _find(connection: Connection, version: int, name: str | None) -> str | None:
    """The checkpoint of a version: the one that is named, or the one that was written last."""
    there = [found for found, of in _listed(connection) or () if of == version]
    return name if name in there else there[-1] if there else None


def _listed(connection: Connection) -> list[tuple[str, int]] | None:
    """The names and versions of the servers' checkpoints; None where a server has no folder for them."""
    try:
        listed: list[tuple[str, int]] = connection.job.checkpoints()
    except RefusedError as error:
        if error.field != "checkpoint_dir":
            raise
        return None
    return listed


def _go(connection: Connection, old: Connection | None, rank: int, version: int, name: str) -> None:
    """Fills the job from a checkpoint, and gives up what its servers have of it. All ranks must come here."""
    _check_meeting(connection, version)
    job = connection.name
    if old is not None:
        warnings.warn(
            f"job {job} goes back from version {old.made} to {version}, as the state that is loaded says: the steps between are "
            f"given up. Checkpoint {name} stays",
            UserWarning,
            stacklevel=4,
        )
        # The job that it holds may be gone already.
        with contextlib.suppress(LongshoreError):
            old.close(False)
    if connection.world_size == 1:
        connection.job.go_back(name)
        return
    # Another rank's old job is given up before the servers give theirs up.
    agree.together(lambda: None)
    agree.together(lambda: connection.job.go_back(name) if rank == 0 else None)


def _check_meeting(connection: Connection, version: int) -> None:
    """Refuses to go back with several ranks that cannot wait for each other: one may be reading what another gives up."""
    if connection.world_size == 1 or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    raise invalid(
        "state_dict['longshore']['version']",
        version,
        "the servers' version, where ranks cannot wait for each other",
        "initialise torch.distributed (gloo is enough) and load on all ranks, or run `longshore restore --discard-state` while no "
        "rank runs",
        StateError,
    )


class Stateful(torch.optim.Optimizer):
    """``state_dict`` and ``load_state_dict`` of an optimizer whose state lives on servers."""

    rule: ClassVar[str]
    _options: Options
    _job_name: str
    _connection: Connection | None
    #: What a new job is filled with instead of the parameters' weights.
    _filling: Filling | None
    #: The job's parameters, trained and frozen, since it was opened.
    _table: tuple[list[Param], list[Param]] | None
    #: How many updates the weights have behind them.
    _applied: Tensor
    #: A version and the checkpoint that the servers have of it.
    _checkpointed: tuple[int, str] | None
    #: Whether ``state_dict`` takes all state where it is not told. A framework's adapter sets it where the servers end with this process.
    saves_all: bool = False
    #: Whether it is still to be said that a handle ends with this process. An adapter that puts all state in its place says no.
    warns_of_handles: bool = True

    @property
    def passing_checkpoints(self) -> Path | None:
        raise NotImplementedError

    @property
    def version(self) -> int:
        raise NotImplementedError

    def _opened(self) -> Connection:
        raise NotImplementedError

    def _go_back(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError

    def _check_hyper(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def state_dict(self, *, full: bool | None = None) -> dict[str, Any]:
        """A handle of the state on the servers: small, of tensors and plain containers alone.

        It has what torch's has, with ``step`` as each parameter's only state, and under ``"longshore"`` the job and version.

        Args:
            full: take all state: moments under torch's names, in fp32, and the fp32 ``master`` weights. torch's optimizer of the
                same name loads it, and so does an optimizer of this package whose job is new. It takes 12 bytes a parameter of
                this process; :mod:`longshore.checkpoint` writes files without that. None takes it where a framework's adapter saves, and
                the server ends with this process; without an adapter a warning says that the handle ends with it too.
        """
        state = super().state_dict()
        fingerprint = self._connection.fingerprint if self._connection else None
        state[KEY] = self._handle(fingerprint)
        if self._checkpointed is not None and self._checkpointed[0] == self.version:
            state[KEY]["checkpoint"] = self._checkpointed[1]
        if full is None and not self.saves_all:
            self._warn_of_what_ends(state[KEY])
        if self.saves_all if full is None else full:
            # What torch has packed is this object's own: a full state is another one.
            state["state"] = self._full_state()
        else:
            note(state)
        return state

    def _warn_of_what_ends(self, handle: dict[str, Any]) -> None:
        """Says once that nobody can go on from a file of this handle."""
        if not self.warns_of_handles or not self.version or "checkpoint" in handle or self.passing_checkpoints is None:
            return
        self.warns_of_handles = False
        warnings.warn(
            f"state_dict() of job {self._job_name} is a handle, without moments, and the job's server ends with this process: no other process can "
            "go on from a file of it. Save state_dict(full=True), or name servers= and job=, or have the framework's adapter save all state "
            "(longshore.huggingface.Callback, longshore.lightning.Callback, longshore.accelerate.attach). full=False says that a handle is wanted",
            UserWarning,
            stacklevel=3,
        )

    def _handle(self, fingerprint: str | None) -> dict[str, Any]:
        made = self._connection.made if self._connection else self.version
        return handle(self._job_name, self.version, made, self.rule, fingerprint)

    def _full_state(self) -> dict[int, dict[str, Any]]:
        connection = self._opened()
        places = {id(tensor): place for place, tensor in enumerate(self._tensors())}
        steps, states = connection.full_state(self.rule)
        return {
            places[id(param.tensor)]: {"step": torch.tensor(float(step)), **state}
            for param, step, state in zip(connection.params, steps, states, strict=True)
        }

    def _tensors(self) -> list[Tensor]:
        """All parameters, in the order in which a state numbers them."""
        return [tensor for group in self.param_groups for tensor in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state.

        A handle of this job: hyperparameters are taken from it, and the state itself is on the servers already. Where they are at
        another version and have a checkpoint of that one, they go back to it, and what they have is given up. The world size may
        be another one then. All ranks must load it.

        The state of torch's optimizer of the same name, or all state of one of this package: the job must be new. It is filled when it is
        opened, which is in the first step, with the parameters' weights of that time (with the state's ``master`` weights, where
        it has them, which the parameters get at once). Until then the tensors are referred to, not copied: those of
        ``torch.load(path, mmap=True)`` are read from the file when they are sent.

        Raises:
            StateError: for a state of another model, job or version, naming the tensor that is missing, is not known or does
                not fit. Nothing has changed then.
        """
        # Hooks get what torch's own method gives them: the whole state in a dict that is theirs.
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        with self._without_hooks():
            self._load(with_handle(state_dict, has_moments=self._has_moments(state_dict)))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Within it torch's method calls no hooks: it gets a part of the state."""
        names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
        hooks = {name: getattr(self, name) for name in names}
        vars(self).update({name: {} for name in names})
        try:
            yield
        finally:
            vars(self).update(hooks)

    def _table_of_job(self) -> tuple[list[Param], list[Param]]:
        """The parameters that servers train, now or later, and the frozen ones that they keep. Once the job was opened they stay what they
        are, whatever requires a gradient when it is joined again."""
        if self._table is not None:
            return self._table
        params = _params.table(self.param_groups, later=self._options.trains_later)
        return params, _params.frozen_table(self.param_groups, params) if self._options.frozen == "keep" else []

    def _load(self, state_dict: dict[str, Any]) -> None:
        if not is_of_job(state_dict, self._job_name) or (self._connection is None and self._has_moments(state_dict)):
            return self._load_foreign(state_dict)
        _filling.check_sizes(state_dict, self.param_groups)
        self._go_back(state_dict)
        fingerprint = self._connection.fingerprint if self._connection else None
        check(state_dict, self._handle(fingerprint))
        self._take_hyperparameters(state_dict)

    def _has_moments(self, state_dict: dict[str, Any]) -> bool:
        return any(key in state for state in state_dict["state"].values() for key in NAMES[self.rule])

    def _load_foreign(self, state_dict: dict[str, Any]) -> None:
        """Has the new job filled with this when it is opened."""
        if KEY in state_dict and not self._has_moments(state_dict):
            return check(state_dict, self._handle(None))
        _filling.check_groups(state_dict, self.param_groups, self.rule)
        check_is_whole(state_dict, has_moments=self._has_moments(state_dict))
        for saved, mine in zip(state_dict["param_groups"], self.param_groups, strict=True):
            self._check_hyper({**mine, **{key: value for key, value in saved.items() if key in mine}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        tensors = dict(zip(numbers, self._tensors(), strict=True))
        names = dict(zip(numbers, (name for name, _ in _params.named(self.param_groups)), strict=True))
        filling = _filling.of_torch(state_dict, tensors, names, self.rule, later=self._options.trains_later)
        if self._connection is not None:
            applied = (filling.applied if filling else None) or 0
            # A process that was killed after the job was filled comes here again.
            if self.version != 0 or applied != int(self._applied):
                raise refuse_to_fill(self._job_name, self.version)
        elif filling is not None:
            self._fill_with(filling)
        self._take_hyperparameters(state_dict)

    def _fill_with(self, filling: Filling) -> None:
        """Has a new job filled with this, and gives the parameters its weights."""
        if self._connection is not None:
            raise refuse_to_fill(self._job_name, self.version)
        params, _ = self._table_of_job()
        filling.check(params)
        self._filling = filling
        self._applied.fill_(filling.applied or 0)
        with torch.no_grad():
            for param in params:
                weights = filling.read(_filling.MASTER, param)
                if weights is param.tensor:
                    continue
                if _params.is_sharded(param.tensor):
                    from longshore.distributed import dtensor  # which needs torch.distributed

                    dtensor.fill(param, weights)
                else:
                    param.tensor.copy_(weights)

    def _take_hyperparameters(self, state_dict: dict[str, Any]) -> None:
        # The servers have the rest, or get it when the job is opened.
        steps = {key: {"step": of["step"]} if "step" in of else {} for key, of in state_dict["state"].items()}
        super().load_state_dict({"state": steps, "param_groups": state_dict["param_groups"]})
        for group in self.param_groups:
            for tensor in group["params"]:
                loaded = self.state[tensor].get("step", self._applied)
                # In a full state a parameter that steps left out has a smaller count than the job.
                if isinstance(loaded, Tensor) and loaded > self._applied:
                    self._applied.copy_(loaded)
                self.state[tensor] = {"step": self._applied}
