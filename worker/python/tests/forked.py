"""Python processes of tests, forked from a fork server that has imported PyTorch and Longshore once for all of them.

The fork server has one thread, and no process group, optimizer server or CUDA context: a fork would break these. A child runs its program
as ``python PROGRAM`` or ``python -c CODE`` does, with own streams, environment and interpreter exit. The test's process adopts the child,
so that :class:`subprocess.Popen` can wait for it and kill it.
"""

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

#: Modules imported once before the fork, because each child would otherwise import them itself.
PRELOADED = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "longshore.checkpoint",
    "longshore.engine",
    "longshore.optim",
    "longshore.units.shard",
)
_MAX_REQUEST = 200_000
_PR_SET_CHILD_SUBREAPER = 36
#: The environment before any test changes it. NumPy's BLAS gets one thread, since further threads would be missing
#: after a fork.
_ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
_server: socket.socket | None = None


class Forked(subprocess.Popen[str]):
    """A forked interpreter that has imported PyTorch and Longshore.

    Args:
        program: Python code, or the path of a program.
        arguments: The program's arguments.
        environment: The whole environment of the process, in place of this one's.
        imports: Further modules that the fork server imports before it forks.
        streams: ``stdout=`` and ``stderr=``, as of :class:`subprocess.Popen`.
    """

    def __init__(
        self,
        program: str | Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        **streams: Any,
    ) -> None:
        self._request = {
            "program": str(program),
            "is_path": isinstance(program, Path),
            "arguments": arguments,
            "environment": dict(os.environ if environment is None else environment),
            "imports": imports,
            "folder": os.getcwd(),
        }
        super().__init__([], text=True, **streams)

    def _execute_child(  # type: ignore[override]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_,
    ) -> None:  # fmt: skip
        try:
            self.pid = _fork(self._request, [1 if c2pwrite == -1 else c2pwrite, 2 if errwrite == -1 else errwrite])
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self._child_created = True


def _fork(request: dict[str, Any], streams: list[int]) -> int:
    """Asks the fork server for a child with these streams, and adopts it."""
    global _server
    if _server is None:
        # Descendants whose parent has ended become children of this process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        subprocess.Popen(command, env=_ENVIRONMENT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()
    socket.send_fds(_server, [json.dumps(request).encode()], streams)
    answer = _server.recv(64)
    assert answer, "the fork server ended: its standard error says why"
    return int(answer)


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Forks a child for each request, until the test's process ends. Returns the request, in the child."""
    while True:
        message, streams, *_ = socket.recv_fds(channel, _MAX_REQUEST, 2)
        if not message:
            sys.exit()
        request: dict[str, Any] = json.loads(message)
        for name in request["imports"]:
            __import__(name)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"{len(threads)} threads would not be there after a fork"
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(tells, str(child).encode())
                os._exit(0)
            channel.close()
            for place, stream in enumerate(streams, start=1):
                os.dup2(stream, place)
            for descriptor in (told, tells, *streams):
                os.close(descriptor)
            return request
        for descriptor in (tells, *streams):
            os.close(descriptor)
        # After the end of the process in between, the parent has adopted the child.
        os.waitpid(between, 0)
        channel.send(os.read(told, 64))
        os.close(told)


def _become(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Turns this process into a program's. Returns its code, and the names of its module ``__main__``."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path += [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    module = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["-c", *request["arguments"]]
    if not request["is_path"]:
        return compile(request["program"], "<string>", "exec"), vars(module)
    path = Path(request["program"])
    sys.argv[0] = module.__file__ = str(path)
    sys.path.insert(0, str(path.parent))
    return compile(path.read_text(), path, "exec"), vars(module)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _channel:
        sys.path.append(str(Path(__file__).parent.parent / "examples"))
        for _name in PRELOADED:
            __import__(_name)
        # Garbage collections of a child would read and write these objects, and so would the package's search for DDP
        # models. Each optimizer would take 0.3 s longer.
        gc.freeze()
        _request = _serve(_channel)
    exec(*_become(_request))
