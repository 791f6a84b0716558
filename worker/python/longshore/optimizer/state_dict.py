"""``state_dict`` and ``load_state_dict``: a small handle of the state on servers, or the full state on request.

A handle has plain containers and one tensor. An optimizer returns to the version that a handle names, from a checkpoint of the servers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longshore import _longshore
from longshore.distributed import collectives, dtensor
from longshore.errors import LongshoreError, RefusedError, StateError, invalid, warn
from longshore.optimizer.parts import Connected
from longshore.optimizer.states import State
from longshore.transfer import device
from longshore.transfer import filling as _filling
from longshore.transfer import params as _params
from longshore.transfer.filling import Filling
from longshore.transfer.job import Record
from longshore.transfer.params import Param
from longshore.transfer.tensors import on_host

if TYPE_CHECKING:
    from longshore.optimizer.connection import Connection

KEY = "longshore"
_FORMAT = 1


def steps_made(handle: dict[str, Any]) -> int:
    """Returns the number of steps made when the handle was saved."""
    steps: int = handle.get("made", handle["version"])
    return steps


def with_handle(state_dict: dict[str, Any], *, has_moments: bool) -> dict[str, Any]:
    """Returns the state with its handle under one key, removed from the groups. A state with moments needs no handle."""
    groups = state_dict["param_groups"]
    noted = [group[KEY] for group in groups if KEY in group]
    whole = {**state_dict, "param_groups": [{key: value for key, value in group.items() if key != KEY} for group in groups]}
    if noted and KEY not in state_dict and not has_moments:
        whole[KEY] = noted[0]
    return whole


def check_is_whole(state_dict: dict[str, Any], *, has_moments: bool) -> None:
    """Refuses a handle without the job's name, which looks like a torch state from before its first step."""
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


def refuse_to_fill(job: str, version: int) -> Exception:
    """Returns the error for a foreign state loaded into a job that has state of its own."""
    return invalid(
        "state_dict",
        f"one of another optimizer, and job {job} is at version {version}",
        "given to a new job, before its first step",
        "load it right after the optimizer is built, with a job= that the servers do not have; or go on from the servers' state "
        "without loading one",
        StateError,
    )


def check(given: dict[str, Any], mine: dict[str, Any]) -> None:
    """Refuses a handle that differs from the servers' state."""
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
        raise _no_checkpoint(theirs["version"], f"{steps_made(mine)}, which the servers have")


def _no_checkpoint(version: Any, limit: str) -> Exception:
    return invalid(
        "state_dict['longshore']['version']",
        version,
        limit,
        "go on from the servers' version, or load a state of whose version the servers have a checkpoint: "
        "optimizer.checkpoint() writes one where a server has a folder for them (--checkpoint-dir; in this process servers=longshore.Server("
        "checkpoint_dir=...) with a job=)",
        StateError,
    )


def _listed(connection: Connection) -> list[tuple[str, int]] | None:
    """Returns the names and versions of the servers' checkpoints; None if a server has no folder for them."""
    try:
        listed: list[tuple[str, int]] = connection.job.checkpoints()
    except RefusedError as error:
        if error.field != "checkpoint_dir":
            raise
        return None
    return listed


def _go(connection: Connection, old: Connection | None, rank: int, version: int, name: str) -> None:
    """Fills the job from a checkpoint, and abandons the servers' current state. All ranks must call it."""
    if connection.world_size > 1 and not collectives.has_group():
        # A rank might read state while another has the servers abandon it.
        raise invalid(
            "state_dict['longshore']['version']",
            version,
            "the servers' version, where ranks cannot wait for each other",
            "initialise torch.distributed (gloo is enough) and load on all ranks, or run `longshore restore --discard-state` while no "
            "rank runs",
            StateError,
        )
    job = connection.name
    if old is not None:
        warn(
            f"job {job} goes back from version {old.made} to {version}, as the state that is loaded says: the steps between are "
            f"given up. Checkpoint {name} stays"
        )
        # An error is ignored, since the job of ``old`` may be deleted already.
        with contextlib.suppress(LongshoreError):
            old.close(False)
    if connection.world_size == 1:
        connection.job.go_back(name)
        return
    # All ranks have closed their old connections before rank 0 has the servers abandon their state.
    collectives.together(lambda: None)
    collectives.together(lambda: connection.job.go_back(name) if rank == 0 else None)


class Stateful(Connected):
    """``state_dict`` and ``load_state_dict`` of an optimizer whose state lives on servers, and the return to a checkpoint."""

    #: Number of returns to a checkpoint, and the version to which the last one returned.
    _returns: tuple[int, int] = (0, 0)
    #: Default of ``state_dict(full=)``. A framework's adapter sets it where the servers end with this process.
    saves_all: bool = False
    #: True until a warning has said that a handle ends with this process. An adapter that saves the full state sets
    #: False.
    warns_of_handles: bool = True

    # The job and its checkpoints

    @property
    def passing_checkpoints(self) -> Path | None:
        """The checkpoint folder of a server that ends with this process; None for any other server."""
        server = self._options.server()
        return Path(server.checkpoint_dir) if server is not None and server.is_passing and server.checkpoint_dir else None

    @property
    def is_in_memory(self) -> bool:
        """True if servers keep all state in memory. This host may have room for the state too then."""
        return not _longshore.lies_on_drives(self._options.tier)

    def has_checkpoint_folder(self) -> bool:
        """Returns whether the job's servers have a folder for checkpoints. The job must be open."""
        assert self._connection is not None
        return _listed(self._connection) is not None

    @property
    def waits_for_state(self) -> bool:
        """True if the servers refused this job, for example for its world size. Only a loaded state can open the job then."""
        return self._is_refused and self._connection is None

    def adopt(self, job: str) -> None:
        """Takes the name of a job whose server ended with its process, to return to one of its checkpoints. The current job ends. After an
        error or an interrupt the caller may call this again; otherwise the old job ends with this optimizer."""
        if job == self._job_name:
            return
        if self._connection is not None:
            self._drop(self._connection, delete=True)
        self._job_name = job

    @property
    def resumed(self) -> bytes | None:
        """The bytes of :attr:`resume_data` committed with the version that this optimizer joined at; None in a new job."""
        self._is_version_known = True
        data = self._connection.job.resumed() if self._connection else None
        return None if data is None else Record.split(data)[1]

    def _go_back(self, given: dict[str, Any]) -> None:
        """Returns to the version of a handle of this job, if the servers have a checkpoint of it."""
        version, named = given.get("version"), given.get("checkpoint")
        if not isinstance(version, int):
            return
        returns, returned_to = self._returns
        is_given_up = version > returned_to and returns not in (0, given.get("returns", 0))
        # Runs that continue from one checkpoint of an embedded server share the job's name, so a checkpoint may belong to
        # another run, even at the same version.
        is_other = is_given_up or (self.passing_checkpoints is not None and named is not None and self._checkpointed != (version, named))
        connection = self._connection
        # A delayed job may have made one more step than its parameters' version says.
        made = steps_made(given)
        is_whole = self._now.state not in (State.PUSHED, State.TORN)
        is_here = version == self._version and (connection is None or (connection.made == made and is_whole))
        # Accelerate loads the handle that it has just taken, whether or not the script chose a version. Any other
        # handle shows that the script chose the version.
        self._is_version_known |= self._taken != given
        self._taken = None
        if is_here and not is_other:
            return
        if connection is not None and connection.joined == version and not is_other:
            # The servers are at this version, but a delayed step would read the version before. The handle was saved
            # after a flush, and a step after a flush reads the flushed version.
            self.flush()
            return
        self._check_unused()
        connection, old = self._new_connection(), self._connection
        there = [found for found, of in _listed(connection) or () if of == version]
        name = named if named in there else there[-1] if there else None
        if is_given_up and name is None:
            raise _no_checkpoint(version, "of steps that no return has given up")
        if name is None:
            return  # check() raises for this next
        _go(connection, old, self._options.place()[0], version, name)
        if old is not None:
            self._finalizer.detach()
            old.weights.forget()  # the last step is abandoned, so nobody may wait for its weights
        _params.release(connection.ids)
        self._start(connection, found=True)
        if self.version != version:
            self.flush()  # the checkpoint was written after a flush, which read its version
        self._checkpointed, self._returns = (version, name), (returns + 1, version)
        self._stream_anew()

    # States

    def state_dict(self, *, full: bool | None = None) -> dict[str, Any]:
        """Returns a handle of the state on the servers: small, of tensors and plain containers alone.

        The keys are torch's, with ``step`` as each parameter's only state. ``"longshore"`` has the job and version.

        Args:
            full: take all state: moments under torch's names, in fp32, and the fp32 ``master`` weights. torch's optimizer of the same name
                loads it. An optimizer of this package loads it into a new job. The full state takes 12 bytes a parameter of this process;
                :mod:`longshore.checkpoint` writes files without that. None is True where a framework's adapter saves and the server ends
                with this process. Without an adapter a warning says that the handle ends with the process.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        with self._without_hooks("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"):
            state = self._state_dict(full)
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state)
            state = state if replaced is None else replaced
        return state

    def _state_dict(self, full: bool | None) -> dict[str, Any]:
        state = super().state_dict()
        state[KEY] = self._handle()
        self._taken = {**state[KEY]}
        if self._checkpointed is not None and self._checkpointed[0] == self._version:
            state[KEY]["checkpoint"] = self._checkpointed[1]
        if full is None and not self.saves_all:
            self._warn_of_what_ends(state[KEY])
        if self.saves_all if full is None else full:
            # torch made the dictionary for this call, so it may change. The caller's own entries stay.
            of_params = self._full_state()
            frozen = {number for group in state["param_groups"] for number in group["params"]} - of_params.keys()
            for number, of in of_params.items():
                of.update((key, value) for key, value in state["state"].get(number, {}).items() if key not in of)
            state["state"] = {key: of for key, of in {**state["state"], **of_params}.items() if key not in frozen}
        else:
            # torch.distributed.checkpoint.state_dict keeps the groups and drops other keys.
            for group in state["param_groups"]:
                group[KEY] = dict(state[KEY])
        return state

    def _warn_of_what_ends(self, handle: dict[str, Any]) -> None:
        """Warns once that no process can continue from a file of this handle."""
        if not self.warns_of_handles or not self._version or "checkpoint" in handle or self.passing_checkpoints is None:
            return
        self.warns_of_handles = False
        warn(
            f"state_dict() of job {self._job_name} is a handle, without moments, and the job's server ends with this process: no other process can "
            "go on from a file of it. Save state_dict(full=True), or name servers= and job=, or have the framework's adapter save all state "
            "(longshore.huggingface.Callback, longshore.lightning.Callback, longshore.accelerate.attach). full=False says that a handle is wanted"
        )

    def _handle(self) -> dict[str, Any]:
        """Returns the dictionary that names the job's version. The parameters' fingerprint is known once the job is open.

        ``made`` is there if a delayed job has made more steps than ``version`` says. ``returns`` counts this process's returns to a
        checkpoint: each may give up steps, and their numbers come again."""
        connection, version = self._connection, self._version
        fingerprint, made = (connection.fingerprint, connection.made) if connection else (None, 0)
        found = {"format": _FORMAT, "job": self._job_name, "version": version, "rule": self.rule, "fingerprint": fingerprint}
        found |= {"returns": self._returns[0]} if self._returns[0] else {}
        return found if made == version else {**found, "made": made}

    def _full_state(self) -> dict[int, dict[str, Any]]:
        connection = self._opened()
        places = {id(tensor): place for place, tensor in enumerate(self._tensors())}
        groups = {id(tensor): group for group in self.param_groups for tensor in group["params"]}
        arrays = ("master", *self._moments)
        states = [{name: device.host_empty(param.shape, torch.float32) for name in arrays} for param in connection.params]
        steps = connection.export_state(self._moments, states)
        return {
            places[id(param.tensor)]: {"step": device.host_number(step), **self._derived(groups[id(param.tensor)], step), **state}
            for param, step, state in zip(connection.params, steps, states, strict=True)
        }

    def _derived(self, group: dict[str, Any], step: int) -> dict[str, Tensor]:
        """Returns the numbers that torch keeps for a parameter and that follow from its step count."""
        return {}

    def _without_derived(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a state without the numbers that follow from its step counts.

        Raises:
            StateError: for a number that does not follow.
        """
        states = dict(state_dict["state"])
        for saved, mine in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for number in saved["params"]:
                state = dict(states.get(number, {}))
                for name, value in self._derived({**mine, **saved}, int(state.get("step", 0))).items():
                    found = float(state.pop(name, value))
                    if not math.isclose(found, value, rel_tol=1e-3, abs_tol=1e-6):
                        limit = f"{float(value)}, as the group's hyperparameters give it at step {state.get('step', 0)}"
                        remedy = "servers know no earlier hyperparameters: start from the weights alone"
                        raise invalid(f"state[{number}].{name}", found, limit, remedy, StateError)
                if number in states:
                    states[number] = state
        return {**state_dict, "state": states}

    def _tensors(self) -> list[Tensor]:
        """Returns all parameters, in the order in which a state numbers them."""
        return [tensor for group in self.param_groups for tensor in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state.

        A handle of this job: hyperparameters are taken from it, and the state itself is on the servers already. Servers at another version
        return to the handle's version if they have a checkpoint of it, and abandon their own. The world size may differ then. All ranks
        must load the handle.

        A state of torch's optimizer of the same name, or a full state of this package: the job must be new. The first step opens the job,
        and fills it with the parameters' weights of that time. Where these are the rounding of the state's ``master`` weights, the
        ``master`` weights fill it. A warning names other weights. Until then the tensors are referred to, not copied. Tensors of
        ``torch.load(path, mmap=True)`` are read from the file when sent.

        Raises:
            StateError: for a state of another model, job or version, naming the tensor that is missing, unknown or of another shape.
                Nothing has changed then.
        """
        # Hooks run here and not in torch's method, which would give them only a part of the state.
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        # torch lets a state have entries of the caller's own beside those of parameters.
        numbers = {number for group in state_dict["param_groups"] for number in group["params"]}
        own = {key: of for key, of in state_dict["state"].items() if key not in numbers}
        state_dict = {**state_dict, "state": {key: of for key, of in state_dict["state"].items() if key in numbers}}
        with self._without_hooks("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"):
            self._load(with_handle(state_dict, has_moments=self._has_moments(state_dict)))
        self.state.update(own)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @contextlib.contextmanager
    def _without_hooks(self, *names: str) -> Iterator[None]:
        """Disables hooks during a call of torch's method, which gets only a part of the state."""
        hooks = {name: getattr(self, name) for name in names}
        vars(self).update({name: {} for name in names})
        try:
            yield
        finally:
            vars(self).update(hooks)

    def _table_of_job(self) -> tuple[list[Param], list[Param]]:
        """Returns the parameters that servers train, now or later, and the frozen ones that they keep. Both are fixed once the job was
        opened, even if ``requires_grad`` changes before it is joined again."""
        if self._table is not None:
            return self._table
        params = _params.table(self.param_groups, later=self._options.trains_later)
        return params, _params.frozen_table(self.param_groups, params) if self._options.frozen == "keep" else []

    def _load(self, state_dict: dict[str, Any]) -> None:
        given = state_dict.get(KEY)
        is_of_job = isinstance(given, dict) and given.get("job") == self._job_name
        if not is_of_job or (self._connection is None and self._has_moments(state_dict)):
            return self._load_foreign(state_dict)
        _filling.check_sizes(state_dict, self.param_groups)
        self._go_back(state_dict[KEY])
        check(state_dict, self._handle())
        self._take_hyperparameters(state_dict)

    def _has_moments(self, state_dict: dict[str, Any]) -> bool:
        return any(key in state for state in state_dict["state"].values() for key in self._moments)

    def _load_foreign(self, state_dict: dict[str, Any]) -> None:
        """Fills the new job with this state when it is opened."""
        if KEY in state_dict and not self._has_moments(state_dict):
            return check(state_dict, self._handle())
        _filling.check_groups(state_dict, self.param_groups, self.rule)
        check_is_whole(state_dict, has_moments=self._has_moments(state_dict))
        for saved, mine in zip(state_dict["param_groups"], self.param_groups, strict=True):
            self._check_hyper({**mine, **{key: value for key, value in saved.items() if key in mine}})
        state_dict = self._without_derived(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        tensors = dict(zip(numbers, self._tensors(), strict=True))
        names = dict(zip(numbers, (name for name, _ in _params.named(self.param_groups)), strict=True))
        filling = _filling.of_torch(state_dict, tensors, names, self._moments, later=self._options.trains_later)
        if self._connection is not None:
            applied = (filling.applied if filling else None) or 0
            # A process that was killed after it had filled the job loads the same state again on its restart. The job
            # then has the state's number of updates, at version 0.
            if self.version != 0 or applied != int(self._applied):
                raise refuse_to_fill(self._job_name, self.version)
        elif filling is not None:
            self._fill_with(filling, gives_weights=False)
        self._take_hyperparameters(state_dict)

    def _fill_with(self, filling: Filling, *, gives_weights: bool = True) -> None:
        """Fills a new job with this state when it opens, and gives the parameters its weights now.

        Args:
            gives_weights: whether all parameters get the state's weights. False gives them only to unsharded parameters
                whose own weights are a rounding of the state's.
        """
        if self._connection is not None:
            raise refuse_to_fill(self._job_name, self.version)
        params, _ = self._table_of_job()
        filling.check(params)
        self._filling = filling
        self._applied.fill_(filling.applied or 0)
        with torch.no_grad():
            for param in params:
                weights = filling.read(_filling.MASTER, param)
                if not gives_weights and (weights is param.tensor or _params.is_sharded(param.tensor)):
                    continue
                if not gives_weights and not _params.is_rounding(on_host(param.tensor), on_host(weights)):
                    continue
                if _params.is_sharded(param.tensor):
                    dtensor.fill(param, weights)
                else:
                    param.tensor.copy_(weights)

    def _take_hyperparameters(self, state_dict: dict[str, Any]) -> None:
        # torch loads only step counts and param groups. Servers have the rest, or get it when the job is opened.
        steps = {key: {"step": of["step"]} if "step" in of else {} for key, of in state_dict["state"].items()}
        super().load_state_dict({"state": steps, "param_groups": state_dict["param_groups"]})
        for group in self.param_groups:
            for tensor in group["params"]:
                loaded = self.state[tensor].get("step", self._applied)
                # The job's count is the largest: a parameter that steps left out has a smaller one in a full state.
                if isinstance(loaded, Tensor) and loaded > self._applied:
                    self._applied.copy_(loaded)
                self.state[tensor] = {"step": self._applied}
        self._kept = self._lasting_values() if self._applied else []
