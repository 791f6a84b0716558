"""Options of a job, which optimizers take in addition to torch's arguments: names, types, defaults and checks. Servers inside this process.

Every optimizer and client is built with :class:`Options`. ``Settings`` of :mod:`longshore.transfer.job` hands them to the Rust half.
"""

import atexit
import difflib
import functools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, Self, TypedDict, get_args, get_origin, get_type_hints

from longshore import _longshore
from longshore.errors import invalid

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


def default_server() -> Server:
    """Returns the process's shared server for optimizers without ``servers=``, started at the first call."""
    global _default
    with _lock:
        if _default is None or _default[0] != os.getpid():
            # The parent's server does not run in a fork, which gets a server of its own. The folder holds a checkpoint
            # only briefly, when a caller asks for the full state.
            _default = (os.getpid(), Server(checkpoint_dir=_passing_folder()))
            _default[1].is_passing = True
        return _default[1]


def passing_server(drive: str | os.PathLike[str], spill: Literal["state", "all"]) -> Server:
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


Dtype = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class LossScale:
    """Factor for the losses of an fp16 model, as in DeepSpeed's section ``fp16``. Servers divide gradients by it again.

    Attributes:
        initial: the first scale, or the constant one.
        dynamic: whether it halves after an overflow, whose step is skipped, and doubles after clean steps.
        window: number of clean steps before it doubles.
        hysteresis: number of overflows before it halves; consecutive_hysteresis: whether a clean step resets their count.
        min: the floor. An overflow at the floor pauses the job, since a smaller scale would not help.
    """

    initial: float = 65536.0
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min: float = 1.0


def listed(servers: str | Sequence[str]) -> list[str]:
    """Returns the addresses of a sequence, or of a string with commas between them."""
    if isinstance(servers, str):
        return [address.strip() for address in servers.split(",") if address.strip()]
    return list(servers)


class JobOptions(TypedDict, total=False):
    """Keyword arguments that every optimizer of this package takes. :class:`Options` documents them, and checks choices by these types."""

    servers: str | Sequence[str] | Server | None
    tls_dir: str | os.PathLike[str] | None
    job: str | None
    rank: int | None
    world_size: int | None
    max_ranks: int | None
    partition: Literal["reduce-scatter", "all-reduced"] | None
    reduce_dtype: Literal["auto", "fp32"]
    streaming: bool
    layerwise: bool
    frozen: Literal["leave", "keep", "train-later"]
    accumulate: int
    accumulate_on: Literal["servers", "worker"]
    max_grad_norm: float | None
    missing_gradients: Literal["skip", "zeros", "error"] | None
    written_weights: Literal["error", "drop"]
    nonfinite: Literal["skip", "raise"]
    loss_scale: LossScale | None
    gradient_dtype: Dtype
    image_dtype: Dtype
    delay: int
    warmup_steps: int
    correction: Literal["look-ahead", "none"]
    tier: Literal["memory", "shm", "nvme"]
    replicas: int
    state: Literal["fp32", "bf16", "block8"]
    master: Literal["fp32", "bf16"]
    seed: int
    shard_elements: int | None
    transport: Literal["auto", "tcp", "unix", "memfd"]
    deadline: float


@dataclass(frozen=True)
class Options:
    """Options of a job: how it is opened, and how its gradients and weights travel.

    Attributes:
        servers: addresses (``"host1:7070,host2:7070"`` or a sequence), a :class:`longshore.Server`, or None for a server
            inside this process.
        tls_dir: a folder with ``ca.pem``, and ``client.pem`` and ``client.key``, or ``token``. Encrypts connections to servers that have
            ``--tls-dir``. By default ``LONGSHORE_TLS_DIR`` of the environment.
        job: the job's name on its servers. With ``servers=`` a new process finds the job again by it. By default a unique name.
        rank, world_size: this worker's rank, and the number of ranks whose gradients the servers sum. Defaults, in this order: those of
            an initialised process group, torchrun's ``RANK`` and ``WORLD_SIZE``, srun's ``SLURM_PROCID`` and ``SLURM_STEP_NUM_TASKS``, 0
            and 1. A ``WORLD_SIZE`` other than the group's is refused. A step applies the mean over ranks. All ranks may start again with
            another number of them, as torchrun's do.
        max_ranks: the largest number of ranks that the job will have. By default the number that opens it. Servers reserve memory for the
            gradients of so many.
        partition: with ``"reduce-scatter"`` ranks reduce gradients with torch.distributed. Each rank sends its part of them, reads its part
            of the weights and gathers the rest, as in ZeRO-2. ``"all-reduced"`` says that gradients come reduced, as
            DistributedDataParallel makes them. By default the servers sum; models of ``fully_shard`` need no value here.
        reduce_dtype: the type in which ``"reduce-scatter"`` adds gradients. ``"auto"`` is their own type.
        streaming: whether gradients leave as backward makes them, instead of in ``step``.
        layerwise: in streaming mode, a parameter's first use after a step reads its new weights. So the next forward starts while the last
            weights arrive. False has ``step`` wait for all of them.
        frozen: handling of parameters with ``requires_grad=False``. ``"leave"`` leaves them to the framework. ``"keep"`` has servers keep
            their weights, in ``image_dtype`` and without state: exports, checkpoints and a process that finds the job again then have the
            whole model. ``"train-later"`` gives them state as well: steps leave them out while they get no gradient. Setting
            ``requires_grad=True`` between two steps trains them from then on.
        accumulate: in streaming mode, the number of backward passes in a step. Their gradients add up, as in torch.
        accumulate_on: the adder of these gradients. Servers get each gradient; a worker takes 4 bytes a parameter of this host and sends
            one sum.
        max_grad_norm: the largest global gradient norm; servers clip to it exactly. None does not clip.
        missing_gradients: handling of a parameter that got no gradient in a step, from any rank and any backward pass. ``"skip"`` leaves
            the parameter out of the step, as torch does: its weight, its moments and its step count stay. ``"zeros"`` takes zeros, as
            DeepSpeed does: moments and weights then decay. ``"error"`` refuses a step in which others have a gradient. The default is
            ``"skip"``, and ``"error"`` with ``state="block8"``, which cannot skip.
        written_weights: handling of trained weights that were written since the last step and differ from the servers'. ``"error"`` refuses
            the step, naming the parameter. ``"drop"`` computes the step with the written weights and loses them.
        nonfinite: handling of a step whose gradient has inf or NaN. ``"skip"`` leaves everything unchanged and warns. ``"raise"`` leaves
            everything unchanged and raises.
        loss_scale: factor of losses, for fp16: ``(loss * optimizer.loss_scale).backward()``. None means no factor.
        gradient_dtype, image_dtype: the types of gradients and of weights on the wire. ``"auto"`` is the parameters' own type, or fp32 if
            these differ.
        delay: 1 lets a step compute with the weights of the step before last, so that all transfers and updates hide.
        warmup_steps: number of exact steps before the delay starts. The first steps move the weights most.
        correction: correction of the delay: ``"look-ahead"``, or ``"none"``, which rules that cannot look ahead need (docs/delay.md).
        tier: where servers keep the state.
        replicas: the number of servers that hold each shard, 1 or 2. With 2 the loss of a server loses no step; gradients are pushed to
            both, and the tier is memory.
        state, master: the servers' formats of moments and master weights.
        seed: seed of stochastic rounding, if state is not fp32.
        shard_elements: the size of a shard; by default it follows from the model's size.
        transport: how payloads travel; ``"auto"`` is shared memory on one host and sockets elsewhere.
        deadline: most seconds for an operation that a healthy job does at once.
    """

    servers: str | Sequence[str] | Server | None = None
    tls_dir: str | os.PathLike[str] | None = None
    job: str | None = None
    rank: int | None = None
    world_size: int | None = None
    max_ranks: int | None = None
    partition: str | None = None
    reduce_dtype: str = "auto"
    streaming: bool = False
    layerwise: bool = True
    frozen: str = "leave"
    accumulate: int = 1
    accumulate_on: str = "servers"
    max_grad_norm: float | None = None
    missing_gradients: str | None = None
    written_weights: str = "error"
    nonfinite: str = "skip"
    loss_scale: LossScale | None = None
    gradient_dtype: str = "auto"
    image_dtype: str = "auto"
    delay: int = 0
    warmup_steps: int = 300
    correction: str = "look-ahead"
    tier: str = "memory"
    replicas: int = 1
    state: str = "fp32"
    master: str = "fp32"
    seed: int = 0
    shard_elements: int | None = None
    transport: str = "auto"
    deadline: float = 60.0

    @classmethod
    def of(cls, given: dict[str, Any], arguments: Iterable[str] = ()) -> "Options":
        """Returns checked options.

        Args:
            arguments: names of the caller's other arguments, for the message about a wrong name.

        Raises:
            TypeError: for an unknown name.
            InvalidError: for a value that cannot be used, or that contradicts another.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            meant = _nearest(unknown[0], known, arguments)
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}{meant}options of the job are {', '.join(sorted(known))}")
        options = cls(**given)
        options._check()
        return options

    def _check(self) -> None:
        if self.correction.startswith(("worker-local", "compensation", "look-ahead-by-this-rate")):
            raise invalid("correction", repr(self.correction), "'look-ahead' or 'none'", "choose 'look-ahead', which does its work now")
        if self.nonfinite == "apply":
            raise invalid("nonfinite", "'apply'", "'skip' or 'raise'", "leave it out: gradients are always checked")
        for field, allowed in _choices().items():
            value = getattr(self, field)
            if value not in allowed:
                raise invalid(field, repr(value), "one of " + ", ".join(filter(None, allowed)), "choose one of them")
        for field, (kind, is_optional) in _kinds().items():
            value, (said, is_of) = getattr(self, field), _KINDS[kind]
            if not (is_optional and value is None) and not is_of(value):
                raise invalid(field, repr(value), said, f"pass {said}")
        for field, (least, most, remedy) in _RANGES.items():
            value = getattr(self, field)
            if value < least or most is not None and value > most:
                raise invalid(field, value, f"at least {least}" if most is None else f"{least} or {most}", remedy)
        if self.servers is not None and not isinstance(self.servers, Server) and not listed(self.servers):
            remedy = "name them, for example after an unset variable, or pass None for a server inside this process"
            raise invalid("servers", repr(self.servers), "addresses as host:port", remedy)
        if self.partition == "all-reduced" and self.streaming:
            raise invalid(
                "partition",
                "'all-reduced'",
                "'reduce-scatter' with streaming=True",
                "gradients leave before another has reduced them: let the optimizer do it, without DistributedDataParallel",
            )
        if self.trains_later and self.missing_gradients not in (None, "skip"):
            remedy = "leave it out: what does not train yet has no gradient, and zeros for it would let its weights decay"
            raise invalid("missing_gradients", repr(self.missing_gradients), "'skip' with frozen='train-later'", remedy)
        if self.trains_later and self.on_missing() != "skip":
            remedy = "it cannot leave parameters out of a step, and what does not train yet has to be: choose another, or unfreeze before the first step"
            raise invalid("state", "'block8'", "'fp32' or 'bf16' with frozen='train-later'", remedy)
        if self.accumulate > 1 and not self.streaming:
            raise invalid(
                "accumulate",
                self.accumulate,
                "1 without streaming",
                "leave it out: gradients add up in .grad until step, as in torch",
            )
        if self.nonfinite != "skip" and self.loss_scale is not None:
            raise invalid("nonfinite", repr(self.nonfinite), "'skip' with loss_scale", "a scale is found by skipping what overflows")
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < float("inf"):
            raise invalid("max_grad_norm", self.max_grad_norm, "finite and above 0", "use None for no clipping")
        rank, world_size = self.place()
        if not 0 <= rank < world_size:
            raise invalid("rank", rank, f"in 0..{world_size}, the world size", "set RANK and WORLD_SIZE, or both arguments")
        if self.max_ranks is not None and self.max_ranks < world_size:
            raise invalid("max_ranks", self.max_ranks, f"at least {world_size}, the ranks that there are", "start fewer ranks, or raise it")
        if self.max_ranks is not None and self.partition is not None:
            raise invalid(
                "max_ranks",
                self.max_ranks,
                f"left out with partition={self.partition!r}, whose parts are those of so many ranks",
                "let the servers sum (partition=None), or checkpoint and restore for another number of ranks",
            )
        if world_size > 1 and self.is_embedded():
            raise invalid(
                "servers",
                self.servers,
                f"addresses that all {world_size} ranks share",
                "start longshored and pass its address on every rank, or pass world_size=1 if each process trains alone",
            )
        if world_size > 1 and self.job is None:
            raise invalid("job", None, "a name with several ranks", "pass the same job= on every rank")

    @property
    def trains_later(self) -> bool:
        """True if parameters frozen at the first step train once they are unfrozen."""
        return self.frozen == "train-later"

    def on_missing(self) -> str:
        """Returns the handling of a parameter without a gradient."""
        return self.missing_gradients or ("error" if self.state == "block8" else "skip")

    def may_differ(self) -> bool:
        """Returns whether another rank may have gradients in a step in which this one has none."""
        return self.place()[1] > 1 and self.on_missing() != "error"

    def place(self) -> tuple[int, int]:
        """Returns rank and world size."""
        rank_name, world_size_name = _launcher()
        group_rank, group_size = _group()
        world_size = _of_environment(world_size_name, group_size) if self.world_size is None else self.world_size
        if self.rank is not None:
            return self.rank, world_size
        if self.world_size is None and group_size > 1 and world_size != group_size:
            limit = f"{group_size}, as torch.distributed's process group has it"
            raise invalid(world_size_name, world_size, limit, "set it right, or pass rank= and world_size=")
        if world_size == group_size:
            # The group's rank counts, since Accelerate's debug_launcher writes RANK=0 in all processes.
            return group_rank, world_size
        return (0 if world_size == 1 else _of_environment(rank_name, group_rank)), world_size

    def server(self) -> Server | None:
        """Returns the server inside this process, if it holds the job."""
        if self.servers is None:
            return default_server()
        return self.servers if isinstance(self.servers, Server) else None

    def addresses(self) -> list[str]:
        """Returns the servers' addresses."""
        server = self.server()
        return listed(self.servers) if server is None else [server.address]  # type: ignore[arg-type]

    def is_embedded(self) -> bool:
        """Returns whether the server is inside this process."""
        return self.servers is None or isinstance(self.servers, Server)

    def tls_folder(self) -> str | None:
        """Returns the folder of certificates and tokens. A server inside this process has none."""
        if self.is_embedded():
            return None
        folder = os.environ.get("LONGSHORE_TLS_DIR") if self.tls_dir is None else self.tls_dir
        return os.fspath(folder) if folder else None


#: Our name of an argument or option, by the name that other libraries give it.
_ELSEWHERE = {
    "learning_rate": "lr",
    "gradient_accumulation_steps": "accumulate",
    "accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate",
    "gradient_clipping": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "address": "servers",
    "job_name": "job",
    "epsilon": "eps",
    "beta1": "betas",
    "beta2": "betas",
    "wd": "weight_decay",
    "decay": "weight_decay",
}


def _nearest(name: str, options: Iterable[str], arguments: Iterable[str]) -> str:
    """Returns a question with the name that was probably meant."""
    names = {*options, *arguments}
    meant = _ELSEWHERE.get(name.lower())
    close = [meant] if meant in names else difflib.get_close_matches(name.lower(), sorted(names), 1, 0.6)
    return f", did you mean {close[0]!r}? The " if close else "; "


#: For each type in :class:`JobOptions`: its words in errors, and a check whether a value has the type.
_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: not isinstance(value, str) and value in (False, True)),
    int: ("an int", lambda value: hasattr(value, "__index__") and not isinstance(value, bool)),
    float: ("a float", lambda value: hasattr(value, "__float__") and not isinstance(value, bool)),
    LossScale: ("a longshore.LossScale", lambda value: isinstance(value, LossScale)),
}
#: The least and the largest value of an option, and a remedy. None as largest value means no limit.
_RANGES: dict[str, tuple[int, int | None, str]] = {
    "accumulate": (1, None, "count the backward passes of a step"),
    "delay": (0, 1, "choose 0 for exact steps, or 1 for delayed ones"),
    "warmup_steps": (0, None, "choose 0 for a delay from the first step on"),
    "replicas": (1, 2, "choose 2 where the loss of a server shall lose no step"),
    "seed": (0, None, "choose another"),
}


@functools.cache
def _kinds() -> dict[str, tuple[type, bool]]:
    """Returns the type of each option that :data:`_KINDS` knows, and whether it may be None."""
    hints = {field: (hint, *get_args(hint)) for field, hint in get_type_hints(JobOptions).items()}
    return {field: (kind, type(None) in of) for field, of in hints.items() for kind in of if kind in _KINDS}


@functools.cache
def _choices() -> dict[str, tuple[str | None, ...]]:
    found = {}
    for field, hint in get_type_hints(JobOptions).items():
        kinds = [hint] if get_origin(hint) is Literal else get_args(hint)
        values = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        if values:
            found[field] = (*values, *(None for kind in kinds if kind is type(None)))
    return found


def _group() -> tuple[int, int]:
    """Returns torch.distributed's rank and world size, or 0 and 1 without a process group."""
    torch = sys.modules.get("torch")  # other frameworks' clients run without torch
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _launcher() -> tuple[str, str]:
    # SLURM_NTASKS does not count, since sbatch sets it even for a script's single process. Only srun sets
    # SLURM_STEP_NUM_TASKS, in each process that it starts.
    if "WORLD_SIZE" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        return "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
    return "RANK", "WORLD_SIZE"


def _of_environment(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise invalid(name, repr(text), "a whole number", f"set {name} right, or pass rank= and world_size=") from None
