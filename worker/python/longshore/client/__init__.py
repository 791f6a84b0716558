"""A rank of a job for any framework: gradients go in and weights come out as arrays."""

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from longshore import _longshore
from longshore.client import arrays as _arrays
from longshore.errors import GradientError, LongshoreError, MissingGradientError, UsageError, invalid, warn
from longshore.transfer import job as _job
from longshore.transfer.job import Hyper, StepReport
from longshore.transfer.options import JobOptions, Options

__all__ = ["Client", "Hyper", "Shape", "StepReport"]

Array = Any
"""A NumPy array, or what exports DLPack from the host's memory, or what NumPy makes an array of. fp32, bf16 or fp16."""


#: Bytes of an element on the wire.
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Shape:
    """A parameter without memory in this process.

    Args:
        shape: any but empty.
        dtype: type of its pulled weights: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
    """

    shape: tuple[int, ...]
    dtype: str = "fp32"

    @property
    def wire(self) -> str:
        if self.dtype not in _BYTES:
            raise invalid("dtype", repr(self.dtype), 'one of "fp32", "bf16", "fp16"', "name one of them")
        return self.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Param:
    index: int
    name: str
    group: int
    shape: tuple[int, ...]
    wire: str
    elements: int


class Client:
    """A rank of a job: ``push`` gradients, ``commit`` the step, ``pull`` weights.

    >>> client = longshore.Client({"w": w, "b": b}, longshore.Hyper(lr=1e-3), max_grad_norm=1.0)  # doctest: +SKIP
    >>> weights = client.pull()  # doctest: +SKIP
    >>> for batch in batches:  # doctest: +SKIP
    ...     client.push(gradients(weights, batch))
    ...     client.commit()
    ...     weights = client.pull()

    The constructor opens the job. A job that the servers have already continues with their weights, and ``params`` gives only shapes and
    types. No framework is needed: arrays are NumPy's, or export DLPack. Calls come from one thread at a time. Each wait releases the GIL,
    ends with Ctrl-C and has a deadline.

    Args:
        params: the weights by name, in the order of forward; of fp32, bf16 or fp16, any shape but empty. A :class:`longshore.Shape` stands
            for weights made by ``initial``.
        hyper: hyperparameters of all parameters, or one set for each group.
        rule: the update rule's name, such as ``"adamw"``; the others are in :data:`longshore.optim.RULES`.
        groups: names of each group's parameters, for the groups after the first. Group 0 has all other parameters.
        initial: function for the first weights of each :class:`longshore.Shape` in a new job, piece by piece. ``initial(name, first,
            count)`` returns an array of ``count`` elements from ``first`` on, in the order of the flattened parameter. A repeated call must
            return the same elements.
        **options: options of the job; see :class:`longshore.transfer.options.Options`. ``accumulate`` is the number of pushes of each
            parameter in a step. ``streaming`` is ignored, since each push leaves at once.

    Raises:
        InvalidError: naming the parameter or argument, its limit and a remedy.
        LongshoreError: any other of :mod:`longshore.errors`.
    """

    def __init__(
        self,
        params: Mapping[str, Array | Shape],
        hyper: Hyper | Sequence[Hyper],
        *,
        rule: str = "adamw",
        groups: Sequence[Collection[str]] = (),
        initial: Callable[[str, int, int], Array] | None = None,
        **options: Unpack[JobOptions],
    ) -> None:
        if "initial_seed" in options:
            raise TypeError("longshore.Client takes no 'initial_seed': let the callable that is passed as initial= draw the weights")
        self._options = Options.of({**options, "streaming": True})
        if self._options.frozen != "leave":
            remedy = "pass the arrays that train alone, or shall later: a step leaves out those that are not pushed"
            raise invalid("frozen", repr(self._options.frozen), "'leave': arrays do not say whether they train", remedy)
        arrays = {
            name: value if isinstance(value, Shape) else _arrays.readable(name, value) for name, value in params.items()
        }
        self._params = _table(arrays, groups)
        pieces = _pieces(self._params, arrays, initial)
        self._by_name = {param.name: param for param in self._params}
        self._groups = len(groups) + 1
        self._hyper = self._each(hyper)
        #: Indices of the parameters pushed in this micro-step.
        self._pushed: set[int] = set()
        #: Number of the current step's complete micro-steps.
        self._micro_steps = 0
        #: True from a step's first push until its commit has returned. An interrupted push or commit leaves it True.
        self._has_begun = False
        #: The version with which an abandoned step begins anew. zero_grad() keeps it here for its own repetition after
        #: an interrupt. None at any other time.
        self._held: int | None = None
        #: Report of the newest decided step; None before the first.
        self.last_report: StepReport | None = None
        name = self._options.job or _job.new_job_name("client")
        self._settings = _job.settings(self._options, name, rule, self._params, self._hyper)
        self._name = self._settings.job
        self._job = self._connected()
        #: Number of the last committed step. `_version` below is the last pulled version.
        self._step, _ = self._job.start([] if pieces else _places(self._params, arrays), pieces=pieces)
        self._record = _job.Record(self._settings)
        self._record.warn_of_others(self._job)
        self._version = self._step

    def _connected(self) -> Any:
        job = _longshore.Job(self._settings)
        self._finalizer = weakref.finalize(self, _closed, job, self._options.servers is None)
        # Nothing is to be done at the interpreter's end. An embedded server's job ends with the process, and any other
        # job goes on.
        self._finalizer.atexit = False
        return job

    @property
    def job(self) -> str:
        """The job's name on its servers."""
        return self._name

    @property
    def step(self) -> int:
        """The number of the last committed step; 0 in a new job."""
        return self._step

    @property
    def version(self) -> int:
        """Version of the last pulled weights."""
        return self._version

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        return {param.name: param.shape for param in self._params}

    def push(self, gradients: Mapping[str, Array], scale: float = 1.0) -> None:
        """Sends gradients of some or all parameters. A micro-step is complete once each parameter was pushed.

        Gradients of several micro-steps add up, and those of several ranks are averaged. Gradients are copied before this returns.

        Args:
            gradients: by the parameters' names, of their shapes; fp32, bf16 or fp16.
            scale: factor of all gradients, such as 1 / (a loss scale).

        Raises:
            GradientError: naming a gradient of another shape, or one pushed before. Nothing was sent.
        """
        taken = []
        for name, value in gradients.items():
            if name not in self._by_name:
                known = ", ".join(list(self._by_name)[:4])
                remedy = "push gradients by the names that the client was given"
                raise invalid(f"gradient of {name}", "of no parameter", f"of one of {known}, ...", remedy, GradientError)
            param = self._by_name[name]
            array = _arrays.readable(f"gradient of {name}", value)
            _arrays.check_like(f"gradient of {name}", array, param.shape)
            taken.append((param, array))
        accumulate = self._options.accumulate
        for param, _ in taken:
            if param.index in self._pushed or self._micro_steps >= accumulate:
                raise invalid(
                    f"gradient of {param.name}",
                    "pushed again" if param.index in self._pushed else f"of micro-step {self._micro_steps + 1} of this step",
                    f"one of {accumulate} in a step",
                    "commit first, pass accumulate= with the number of gradients that add up to a step, or call zero_grad() where a step was "
                    "interrupted",
                    GradientError,
                )
        self._has_begun = True
        self._job.begin_step()
        self._job.push([(param.index, array.address, param.elements, array.wire) for param, array in taken], float(scale))
        self._pushed.update(param.index for param, _ in taken)
        if len(self._pushed) == len(self._params):
            self._end_micro_step()

    def _end_micro_step(self) -> None:
        self._job.end_micro_step()
        self._pushed.clear()
        self._micro_steps += 1

    def commit(self, hyper: Hyper | Sequence[Hyper] | None = None) -> int:
        """Ends the step. Without a delay this waits until the step is decided; the update goes on in the background.

        Args:
            hyper: this step's hyperparameters, one set for all groups or one for each; by default the constructor's. Only rank 0's are
                used.

        Returns:
            The step's number, counted from 1.

        Raises:
            MissingGradientError: naming a parameter that was not pushed, with ``missing_gradients="error"``. Nothing was committed. By
                default the step leaves the parameter out, as in torch.
            UsageError: if nothing was pushed.
        """
        hypers = self._hyper if hyper is None else self._each(hyper)
        self._complete()
        self._step = self._job.commit(hypers, self._record.data)
        self._micro_steps, self._has_begun = 0, False
        self._record.check_rank(self._job)
        self._report()
        return self._step

    def zero_grad(self) -> None:
        """Drops the gradients pushed since the last commit, for example after an interrupt: the next push begins the step anew. An
        interrupted commit may have made its step, which :attr:`step` and :meth:`pull` tell afterwards. After an error or an interrupt the
        caller may call this again.

        Raises:
            UsageError: with several ranks, which wait for each other's gradients.
        """
        if not self._has_begun:
            return
        if self._options.place()[1] > 1:
            raise UsageError(
                "gradients of this step have left, and other ranks wait for it: end all ranks and start them again, and they go on from the last "
                "step"
            )
        if self._held is None:
            unread = self._job.unread_weights()
            self._held = self._version if unread is None else unread
        self._job.close(False)
        self._finalizer.detach()
        self._job = self._connected()
        self._step, _ = self._job.start([], found=True)
        if self._job.unread_weights() != self._held:  # the step of a delayed job came after a flush
            self._job.drain()
        self._pushed.clear()
        self._micro_steps, self._has_begun, self._held = 0, False, None

    def _complete(self) -> None:
        """Ends the current micro-step, and adds the micro-steps that the step lacks."""
        if not self._pushed and not self._micro_steps:
            raise UsageError("no gradient was pushed in this step: call push before commit")
        missing = [param for param in self._params if param.index not in self._pushed] if self._pushed else []
        if missing and self._options.on_missing() == "error":
            raise invalid(
                f"gradient of {missing[0].name}",
                "missing",
                "pushed in a step in which others are",
                "push it, or pass missing_gradients='skip' or 'zeros'",
                MissingGradientError,
            )
        while self._pushed or self._micro_steps < self._options.accumulate:
            self._job.push_zeros([param.index for param in self._params if param.index not in self._pushed])
            self._end_micro_step()

    def pull(self, dtype: str | None = None, out: Mapping[str, Array] | None = None) -> dict[str, Any]:
        """Waits for the next step's weights.

        With ``delay=1``, the weights do not yet include the last step, unless :meth:`flush` was called after it.

        Args:
            dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for all; by default each parameter keeps its type. NumPy has bf16 where ml_dtypes is
                installed.
            out: arrays to write into, by name: an array of NumPy or DLPack for each parameter, contiguous and writable.

        Returns:
            Each parameter by its name: ``out``'s own arrays, or new ones of NumPy.
        """
        if dtype not in (None, "fp32", "bf16", "fp16"):
            raise invalid("dtype", dtype, "fp32, bf16 or fp16", "choose one of them")
        given, targets = {}, {}
        for name, param in self._by_name.items():
            if out is not None and name not in out:
                raise invalid("out", f"without {name}", "an array for each parameter", "add it")
            given[name] = _arrays.empty(param.shape, dtype or param.wire) if out is None else out[name]
            targets[name] = _arrays.writable(name, given[name])
            _arrays.check_like(name, targets[name], param.shape)
        places = _places(self._params, targets)
        version = self._job.read_weights(places)
        if version is None:
            # None means that no new weights are expected: they were pulled before, or this rank filled a new job with
            # them.
            self._job.pull(self._version, places)
        else:
            self._version = version
        return given

    def flush(self) -> int:
        """Waits until every step is decided. The next :meth:`pull` gives the newest weights, also with ``delay=1``, and the next step
        computes with these. Call it before an evaluation.

        Returns:
            The version of these weights.
        """
        version = self._job.drain()
        self._report()
        return version

    def checkpoint(self, name: str) -> str:
        """Makes the servers write a checkpoint of their state. Nothing else happens to the job meanwhile.

        Returns:
            The checkpoint's name: ``name``, or ``name.2`` and so on if another state has that name.

        Raises:
            RefusedError: if a server has no folder for checkpoints, or too little space.
        """
        self._job.drain()
        return self._job.checkpoint(name)[0]

    def state_hash(self) -> tuple[int, str]:
        """Returns the newest version, and the hash of all state at it: equal hashes mean equal bits."""
        self._job.drain()
        return self._job.state_hash()

    def close(self) -> None:
        """Waits until the last step is safe, and gives the rank up. The client cannot be used afterwards.

        The job stays on its servers; a job of the server inside this process is deleted. If closing fails or is interrupted, the caller may
        call it again."""
        if self._finalizer.alive:
            self._job.close(self._options.servers is None)
            self._finalizer.detach()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a client cannot be copied or pickled: its state is job {self._name} on its servers")

    def _each(self, hyper: Hyper | Sequence[Hyper]) -> list[Hyper]:
        hypers = [hyper] * self._groups if isinstance(hyper, Hyper) else list(hyper)
        if len(hypers) != self._groups:
            limit = f"{self._groups}, one for each group"
            raise invalid("hyper", f"{len(hypers)} of them", limit, "group 0 has the other parameters")
        return hypers

    def _report(self) -> None:
        for fields in self._job.outcomes():
            report = self.last_report = StepReport.of(fields)
            if report.skipped:
                if self._options.nonfinite == "raise":
                    raise LongshoreError(report.why_skipped(), field="gradient", value="not finite")
                warn(report.why_skipped(), RuntimeWarning)


def _table(arrays: Mapping[str, _arrays.HostArray | Shape], groups: Sequence[Collection[str]]) -> list[_Param]:
    """Returns the job's parameters.

    Raises:
        InvalidError: without parameters, for an empty one, or for a group with unknown names.
    """
    if not arrays:
        raise invalid("params", "empty", "at least one parameter", "pass the weights by name")
    group_of = {name: number for number, names in enumerate(groups, 1) for name in names}
    if sum(map(len, groups)) != len(group_of):
        raise invalid("groups", "with a name twice", "of one name each", "leave it out of one group")
    for name in group_of:
        if name not in arrays:
            raise invalid("groups", f"with {name}", "of the names of parameters", "pass names that are in params")
    params = []
    for index, (name, array) in enumerate(arrays.items()):
        if not array.elements:
            raise invalid(name, "empty", "of at least one element", "leave it out of the job")
        params.append(_Param(index, name, group_of.get(name, 0), array.shape, array.wire, array.elements))
    return params


def _places(params: Sequence[_Param], arrays: Mapping[str, Any]) -> list[tuple[int, int, int, str]]:
    return [(param.index, arrays[param.name].address, param.elements, arrays[param.name].wire) for param in params]


def _pieces(
    params: Sequence[_Param],
    arrays: Mapping[str, _arrays.HostArray | Shape],
    initial: Callable[[str, int, int], Array] | None,
) -> Callable[[int, int, int], tuple[tuple[int, int, int, str], object]] | None:
    """Returns a function for pieces of a new job's first weights; None if all weights are arrays.

    Raises:
        InvalidError: for a shape without ``initial``, and an ``initial`` that cannot be called.
    """
    if initial is not None and not callable(initial):
        limit = "a callable (name, start, count) -> array"
        raise invalid("initial", type(initial).__name__, limit, "pass a function that makes a piece of a parameter's weights")
    shapes = [name for name, array in arrays.items() if isinstance(array, Shape)]
    if not shapes:
        return None
    if initial is None:
        raise invalid(shapes[0], "a shape without weights", "with initial=", "pass initial= to make its weights, or pass an array of them")

    def piece(index: int, start: int, count: int) -> tuple[tuple[int, int, int, str], object]:
        name, array = params[index].name, arrays[params[index].name]
        if isinstance(array, Shape):
            made = _arrays.readable(f"initial of {name}", initial(name, start, count))
            if made.elements != count:
                remedy = "return as many elements as were asked for"
                raise invalid(f"initial of {name}", f"of {made.elements} elements", f"of {count}, from element {start} on", remedy)
            return (index, made.address, count, made.wire), made
        return (index, array.address + start * _BYTES[array.wire], count, array.wire), array

    return piece


def _closed(job: Any, embedded: bool) -> None:
    """Ends the job of a freed client if its server is embedded, since no other process can reach that job."""
    if embedded:
        # Errors are ignored: in a fork the job is the parent's, and a failed server has forgotten the job anyway.
        with contextlib.suppress(LongshoreError):
            job.close(True)
