"""What an optimizer says of its state, and what it goes on from."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from longshore import _filling, _params, _state
from longshore._connection import Connection
from longshore._filling import Filling
from longshore._full import NAMES
from longshore._options import Options
from longshore._params import Param


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
        state[_state.KEY] = self._handle(fingerprint)
        if self._checkpointed is not None and self._checkpointed[0] == self.version:
            state[_state.KEY]["checkpoint"] = self._checkpointed[1]
        if full is None and not self.saves_all:
            self._warn_of_what_ends(state[_state.KEY])
        if self.saves_all if full is None else full:
            # What torch has packed is this object's own: a full state is another one.
            state["state"] = self._full_state()
        else:
            _state.note(state)
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
        return _state.handle(self._job_name, self.version, made, self.rule, fingerprint)

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
            self._load(_state.with_handle(state_dict, has_moments=self._has_moments(state_dict)))
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
        if not _state.is_of_job(state_dict, self._job_name) or (self._connection is None and self._has_moments(state_dict)):
            return self._load_foreign(state_dict)
        _filling.check_sizes(state_dict, self.param_groups)
        self._go_back(state_dict)
        fingerprint = self._connection.fingerprint if self._connection else None
        _state.check(state_dict, self._handle(fingerprint))
        self._take_hyperparameters(state_dict)

    def _has_moments(self, state_dict: dict[str, Any]) -> bool:
        return any(key in state for state in state_dict["state"].values() for key in NAMES[self.rule])

    def _load_foreign(self, state_dict: dict[str, Any]) -> None:
        """Has the new job filled with this when it is opened."""
        if _state.KEY in state_dict and not self._has_moments(state_dict):
            return _state.check(state_dict, self._handle(None))
        _filling.check_groups(state_dict, self.param_groups, self.rule)
        _state.check_is_whole(state_dict, has_moments=self._has_moments(state_dict))
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
                raise _state.refuse_to_fill(self._job_name, self.version)
        elif filling is not None:
            self._fill_with(filling)
        self._take_hyperparameters(state_dict)

    def _fill_with(self, filling: Filling) -> None:
        """Has a new job filled with this, and gives the parameters its weights."""
        if self._connection is not None:
            raise _state.refuse_to_fill(self._job_name, self.version)
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
                    from longshore import _sharding  # which needs torch.distributed

                    _sharding.fill(param, weights)
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
