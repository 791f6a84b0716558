"""Back to a version that a handle names, from a checkpoint that the servers wrote of it."""

import contextlib
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch

from longshore import _agree, _params, _state
from longshore._connection import Connection
from longshore._options import Options
from longshore._streaming import Stream
from longshore.errors import LongshoreError, RefusedError, StateError, UsageError, invalid


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
        made = _state.made(state_dict[_state.KEY])
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
    handle = state_dict.get(_state.KEY)
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
    _agree.together(lambda: None)
    _agree.together(lambda: connection.job.go_back(name) if rank == 0 else None)


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
