"""Optimizer servers inside this process."""

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from typing import Literal, Self

from longshore import _longshore


class Server:
    """An optimizer server inside this process, on a free loopback port. It ends with ``close()``, at the end of ``with``, or
    with this object.

    Several optimizers may share one: pass it as ``servers=``. Close them first.

    Args:
        memory: bytes that jobs may be admitted to; by default 80 % of what this process may use.
        threads: update threads; by default one a core.
        checkpoint_dir: where checkpoints go. Without it none can be written.
        checkpoint_keep: how many checkpoints of a job stay there, the last ones; 0 keeps all.
        state_dirs: one folder or more for the state of jobs with ``tier="nvme"``. It outlives the process.
        resident: bytes of that state that stay in memory.
        spill: what of such jobs is on the drives instead of in memory, as in ``longshored --spill``: ``"state"``, ``"images"`` (the
            16-bit weights too) or ``"all"`` (gradients too). Folders of jobs belong to one choice.
        shm_dir: a folder of a tmpfs for the state of jobs with ``tier="shm"``. It outlives the process.

    Raises:
        InvalidError: for a setting out of its limits, as ``spill`` without ``state_dirs``.
        LongshoreError: when it cannot start, with the reason.
    """

    def __init__(
        self,
        *,
        memory: int | None = None,
        threads: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_keep: int = 0,
        state_dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        resident: int = 0,
        spill: Literal["state", "images", "all"] = "state",
        shm_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        #: Where checkpoints go.
        self.checkpoint_dir = checkpoint_dir
        #: Whether its folders end with this process.
        self.is_passing = False
        self._inner = _longshore.Server(
            memory=memory,
            threads=threads,
            checkpoints=None if checkpoint_dir is None else (checkpoint_dir, checkpoint_keep),
            nvme=([state_dirs] if isinstance(state_dirs, (str, os.PathLike)) else list(state_dirs), resident, spill),
            shm_dir=shm_dir,
        )

    @property
    def address(self) -> str:
        """What other processes of this host name in ``servers=``."""
        return self._inner.address

    def close(self) -> None:
        """Ends the server, and waits until nothing uses its folders any more, so that another server may have them."""
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> object:
        raise TypeError("a server cannot be copied or pickled: pass its address")


_lock = threading.Lock()
_default: tuple[int, Server] | None = None


def default() -> Server:
    """The server of optimizers that name none: one a process, started when it is first needed."""
    global _default
    with _lock:
        if _default is None or _default[0] != os.getpid():
            # After a fork the parent's server is not here. Its object is kept, since the child must not end it.
            # Checkpoints go there for a moment, when somebody asks for all state.
            _default = (os.getpid(), Server(checkpoint_dir=_passing_folder()))
            _default[1].is_passing = True
        return _default[1]


def passing(drive: str | os.PathLike[str], spill: Literal["state", "images", "all"]) -> Server:
    """A server that keeps state, and what ``spill`` says, in a folder of a drive, as long as this process lives."""
    os.makedirs(drive, exist_ok=True)
    folder = _passing_folder(drive)
    places = [os.path.join(folder, name) for name in ("state", "checkpoints")]
    for place in places:
        os.mkdir(place)
    # Engines alone have such a server, and what they save is copied from there.
    server = Server(state_dirs=places[:1], spill=spill, checkpoint_dir=places[1], checkpoint_keep=1)
    server.is_passing = True
    return server


def _passing_folder(within: str | os.PathLike[str] | None = None) -> str:
    folder = tempfile.mkdtemp(prefix="longshore-", dir=within)
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    # A fork ends with the same calls, and the folder is its parent's.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
