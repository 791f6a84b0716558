"""Optimizer servers inside this process."""

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from typing import Literal, NoReturn, Self

from longshore import _longshore


class Server:
    """An optimizer server inside this process, for this user alone. ``close()``, the end of ``with`` or of this object ends it.

    Several optimizers may share one: pass it as ``servers=``. Close them first.

    Args:
        memory: bytes that jobs may be admitted to; by default 80 % of what this process may use.
        threads: update threads; by default one a core.
        checkpoint_dir: folder for checkpoints. None refuses checkpoints.
        checkpoint_keep: number of a job's newest checkpoints to keep; 0 keeps all.
        state_dirs: one or more folders for the state of jobs with ``tier="nvme"``. The state outlives the process.
        resident: bytes of that state that stay in memory.
        spill: the parts of such jobs that are on the drives instead of in memory, as in ``longshored --spill``: ``"state"``, or ``"all"``
            (16-bit weights and gradients too). Folders of jobs belong to one choice.
        shm_dir: a folder of a tmpfs for the state of jobs with ``tier="shm"``. The state outlives the process.

    Raises:
        InvalidError: for a setting out of its limits, for example ``spill`` without ``state_dirs``.
        LongshoreError: if the server cannot start, with the reason.
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
        spill: Literal["state", "all"] = "state",
        shm_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        #: Folder for checkpoints.
        self.checkpoint_dir = checkpoint_dir
        #: True if the server's folders are deleted at the end of this process.
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
        """Address for ``servers=`` in other processes of this user on this host: a Unix socket, ``unix:/path``."""
        return self._inner.address

    def close(self) -> None:
        """Ends the server, and waits until nothing uses its folders, so that another server may take them."""
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a server cannot be copied or pickled: pass its address")


_lock = threading.Lock()
_default: tuple[int, Server] | None = None


def default() -> Server:
    """Returns the process's shared server for optimizers without ``servers=``, started at the first call."""
    global _default
    with _lock:
        if _default is None or _default[0] != os.getpid():
            # The parent's server does not run in a fork, which gets a server of its own. The folder holds a checkpoint
            # only briefly, when a caller asks for the full state.
            _default = (os.getpid(), Server(checkpoint_dir=_passing_folder()))
            _default[1].is_passing = True
        return _default[1]


def passing(drive: str | os.PathLike[str], spill: Literal["state", "all"]) -> Server:
    """Returns a server that keeps state, and the parts named by ``spill``, in a drive's folder until this process ends."""
    os.makedirs(drive, exist_ok=True)
    folder = _passing_folder(drive)
    places = [os.path.join(folder, name) for name in ("state", "checkpoints")]
    for place in places:
        os.mkdir(place)
    # A single checkpoint is enough: only engines have such a server, and they copy each save out of its folder.
    server = Server(state_dirs=places[:1], spill=spill, checkpoint_dir=places[1], checkpoint_keep=1)
    server.is_passing = True
    return server


def _passing_folder(within: str | os.PathLike[str] | None = None) -> str:
    folder = tempfile.mkdtemp(prefix="longshore-", dir=within)
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    # A fork runs this handler too, but the folder is its parent's.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
