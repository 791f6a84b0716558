"""Streaming mode: each gradient leaves as backward makes it, while the rest of backward runs.

Hooks of :class:`Stream` take gradients on autograd's threads. Small gradients of the host leave together: a call for each of them takes longer than
its copy.
"""

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from longshore.distributed import ddp
from longshore.errors import GradientError, UsageError, invalid
from longshore.transfer import device, params
from longshore.transfer.gradients import Gradients, Place, Pusher
from longshore.transfer.params import Param

if TYPE_CHECKING:
    from longshore.distributed.ranks import Ranks
    from longshore.optim.connection import Connection
    from longshore.optim.guards import Watch
    from longshore.transfer.options import Options


#: Gradients are pushed in groups of at least this many elements. A chunk of a MiB has more elements, and is sent once complete. So grouping
#: does not delay servers.
ENOUGH = 64 * 1024


class Together:
    """Gradients of one micro-step that were taken and not pushed, in the order of their arrival.

    Attributes:
        connection: the job of the gradients; None if there are none.
        is_enough: whether to push them now.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.connection: Connection | None = None
        self.is_enough = False
        self._places: list[Place] = []
        #: References that keep the gradients' memory alive.
        self._held: list[Tensor] = []
        self._elements = 0

    def add(self, connection: "Connection", param: Param, gradient: Tensor) -> None:
        """Checks a gradient, and keeps it until it is pushed."""
        self._places += self._gradients.take(param, gradient)
        self._held.append(gradient)
        self._elements += param.elements
        self.is_enough = self._elements >= ENOUGH
        self.connection = connection

    def push(self, job: Any) -> None:
        """Pushes the gradients. After a failure or an interrupt they stay."""
        if self._places:
            self._gradients.push(job, self._places)
            self.forget()

    def forget(self) -> None:
        """Drops the gradients."""
        self._places.clear()
        self._held.clear()
        self._gradients.release()
        self._elements = 0
        self.is_enough = False
        self.connection = None


class Streamed(Protocol):
    """The parts of the optimizer that a stream uses."""

    param_groups: list[dict[str, Any]]
    _options: "Options"
    _gradients: Gradients
    _connection: "Connection | None"
    _frozen: list[tuple[str, Tensor]]
    _watch: "Watch | None"

    def _opened_by_gradients(self) -> "Connection": ...

    def _check_whole(self, connection: "Connection") -> None: ...

    def _check_missing(self, missing: list[Param]) -> None: ...


class Stream:
    """Gradients of the current step that were sent. Hooks hold a weak reference, so the optimizer can be freed."""

    def __init__(self, optimizer: Streamed) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._hooks: dict[int, Any] = {}
        self._by_tensor: dict[int, Param] = {}
        #: Parameters whose gradients of this micro-step were taken, and the number of complete micro-steps.
        self._taken: set[int] = set()
        self._micro_steps = 0
        #: True if the current step was refused: some gradients have left and others are missing.
        self.is_refused = False
        #: Pushes gradients that a device copies first.
        self._pusher: Pusher | None = None
        #: Gradients of the host that were taken and have not left.
        self._together = Together(optimizer._gradients)
        #: Most bytes of unsent gradients that may stay where the model is; None for no limit.
        self.room: int | None = None
        self._is_checked = False
        self.hook()

    def hook(self) -> list[Tensor]:
        """Hooks the parameters that require a gradient and have no hook yet. torch allows no hook on others.

        Returns:
            The newly hooked parameters.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        stream = weakref.ref(self)

        def left(tensor: Tensor) -> None:
            found = stream()
            if found is not None:
                found._take(tensor)

        new = []
        with torch._C.DisableTorchFunctionSubclass():
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    if id(tensor) not in self._hooks and tensor.requires_grad:
                        self._hooks[id(tensor)] = tensor.register_post_accumulate_grad_hook(left)
                        new.append(tensor)
        return new

    def _watches_all(self) -> bool:
        """Returns whether each of the job's parameters has a hook. A parameter that required no gradient earlier may train now."""
        return bool(self._by_tensor) and self._by_tensor.keys() <= self._hooks.keys()

    def unhook(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
        self._together.forget()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    @property
    def has_begun(self) -> bool:
        """True if gradients have left of a step that is not decided yet."""
        return bool(self._taken or self._micro_steps)

    @property
    def is_broken_off(self) -> bool:
        """True if a backward pass has not finished, or its step was refused."""
        return bool(self._taken) or self.is_refused

    def has_left(self, param: Param) -> bool:
        """Returns whether the step's whole gradient of a parameter has left."""
        optimizer = self._optimizer()
        return optimizer is None or (
            self._micro_steps >= optimizer._options.accumulate
            or (param.index in self._taken and self._micro_steps + 1 == optimizer._options.accumulate)
        )

    def _open(self) -> tuple[Streamed, "Connection"]:
        optimizer = self._optimizer()
        if optimizer is None:
            raise UsageError("the optimizer is gone, and its parameters still train: keep it until training ends")
        if not self._is_checked:
            if ddp.has_any(tensor for group in optimizer.param_groups for tensor in group["params"]):
                raise UsageError(
                    "DistributedDataParallel reduces gradients after they have left: use streaming=False with "
                    "partition='all-reduced', or leave the model unwrapped and let the servers sum or pass "
                    "partition='reduce-scatter'"
                )
            self._is_checked = True
        connection = optimizer._opened_by_gradients()
        if not self._by_tensor:
            self._by_tensor = {id(param.tensor): param for param in connection.params}
            if connection.ranks is None and any(device.accelerator.has(param.tensor) for param in connection.params):
                self._pusher = Pusher(connection.job)
        return optimizer, connection

    def _take(self, tensor: Tensor) -> None:
        """Sends the gradient that backward has just made, and frees it. A small one leaves with the next ones."""
        param, connection = self._by_tensor.get(id(tensor)), self._together.connection
        if connection is not None and param is not None and param.index not in self._taken:
            # The first gradient checked everything but this gradient itself; leaving checks it all again.
            gradient = tensor.grad
            if gradient is not None:
                self._add(connection, param, gradient)
            return
        optimizer, connection = self._open()
        if not self._taken and not self._watches_all():
            for other in self.hook():
                # The parameter trains since the last check, and this backward may have made its gradient already. An accelerator's gradient
                # may be of another stream, which nothing here waits for: it leaves when backward has ended.
                if not device.accelerator.has(other):
                    self._take(other)
        with contextlib.nullcontext() if connection.ranks is None else connection.ranks.telling(), torch.no_grad():
            self._leave(optimizer, connection, tensor)

    def _leave(self, optimizer: Streamed, connection: "Connection", tensor: Tensor) -> None:
        optimizer._check_whole(connection)
        param = self._by_tensor.get(id(tensor))
        gradient = tensor.grad
        if gradient is None:
            return
        if param is None:
            params.check_unchanged([], optimizer._frozen)
            return
        if not self.has_begun:
            if optimizer._watch is not None:
                optimizer._watch.check()
            connection.check_written()
        if param.index in self._taken:
            # Another backward has begun, and the one before left parameters out.
            self._end_micro_step(optimizer, connection)
        if self._micro_steps >= optimizer._options.accumulate:
            raise invalid(
                f"{param.name}.grad",
                f"of backward pass {self._micro_steps + 1} of this step",
                f"of one of {optimizer._options.accumulate}",
                "pass accumulate= with the number of backward passes between two calls of step, or call zero_grad() of the optimizer or "
                "engine, not of the model, where a step was interrupted. Where one backward reaches this parameter from several blocks of a "
                "reentrant checkpoint, pass it use_reentrant=False: each of them makes a gradient of its own",
                GradientError,
            )
        if connection.ranks is None and self._pusher is None:
            self._add(connection, param, gradient)
            return
        params.check_unchanged([param], [])
        _check(connection, param, gradient)
        if connection.ranks is not None:
            connection.ranks.take(connection.job, param, gradient)
        elif self._pusher is not None:
            self._pusher.wait_for(param.index)
            if self.room is not None:
                self._pusher.wait_for_room(gradient.nbytes, self.room)
            if len(self._taken) + 1 == len(connection.params):
                self._pusher.then(connection.weights.finish_copies)
            self._pusher.push(param.index, optimizer._gradients.start(param, gradient))
        self._taken.add(param.index)
        tensor.grad = None
        if len(self._taken) == len(connection.params):
            self._end_micro_step(optimizer, connection)

    def _add(self, connection: "Connection", param: Param, gradient: Tensor) -> None:
        """Takes a gradient of the host. The group leaves once it is large enough, or with the last gradient."""
        if gradient.requires_grad or connection.weights.is_awaited(param):
            _check(connection, param, gradient)
        self._together.add(connection, param, gradient)
        self._taken.add(param.index)
        param.tensor.grad = None
        if len(self._taken) == len(connection.params):
            self._end_micro_step(*self._open())
        elif self.room is not None or self._together.is_enough:
            self._push_together()

    def _push_together(self) -> None:
        """Sends the gradients of the host that were taken and have not left."""
        optimizer, connection = self._open()
        optimizer._check_whole(connection)
        self._together.push(connection.job)

    def _end_micro_step(self, optimizer: Streamed, connection: "Connection") -> None:
        if connection.ranks is not None:
            connection.weights.meet()
            self._micro_steps += connection.ranks.end_micro_step(connection.job, optimizer._check_missing)
            self._taken.clear()
            return
        self._push_together()
        missing = [param for param in connection.params if param.index not in self._taken]
        self.is_refused = True
        optimizer._check_missing(missing)
        self.is_refused = False
        self._end_pass(connection, missing)
        self._taken.clear()

    def _take_left(self, optimizer: Streamed) -> None:
        """Sends gradients that no hook has seen: backward made them before their parameters had hooks, or the caller wrote ``.grad``."""
        if not self._watches_all():
            self.hook()
        with torch._C.DisableTorchFunctionSubclass():
            tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
            left = [tensor for tensor in tensors if tensor.grad is not None and tensor.numel()]
        for tensor in left:
            if id(tensor) not in self._by_tensor or self._by_tensor[id(tensor)].index not in self._taken:
                self._take(tensor)

    def finish(self) -> bool:
        """Ends the step's gradients. Returns whether there were any.

        Raises:
            UsageError: if a parameter that is frozen for the job has a gradient.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        if optimizer._connection is not None:
            params.check_unchanged([], optimizer._frozen)
        self._take_left(optimizer)
        is_alone = optimizer._options.partition is None and not optimizer._options.may_differ()
        if not self._taken and not self._micro_steps and is_alone:
            return False
        optimizer, connection = self._open()
        optimizer._check_whole(connection)
        if connection.ranks is not None:
            with connection.ranks.telling():
                made = self._finish_together(optimizer, connection, connection.ranks)
                connection.weights.meet()
            return made
        if self._taken:
            self._end_micro_step(optimizer, connection)
        while self._micro_steps < optimizer._options.accumulate:
            # An epoch's last step may have fewer backward passes, and a rank may have none: this adds zero.
            self._end_pass(connection, connection.params)
        if self._pusher is not None:
            self._pusher.wait()
        connection.weights.meet()
        self._micro_steps = 0
        return True

    def _finish_together(self, optimizer: Streamed, connection: "Connection", ranks: "Ranks") -> bool:
        """Implements :meth:`finish` for ranks that reduce gradients together. A rank without gradients takes part in the collectives too."""
        while self._micro_steps < optimizer._options.accumulate:
            connection.weights.meet()
            if not ranks.end_micro_step(connection.job, optimizer._check_missing):
                if not self._micro_steps:
                    return False
                ranks.empty_micro_step(connection.job)
            self._taken.clear()
            self._micro_steps += 1
        self._micro_steps = 0
        return True

    def _end_pass(self, connection: "Connection", missing: list[Param]) -> None:
        """Ends a micro-step once all of it has been pushed. ``missing`` have no gradient in it."""
        end = functools.partial(_end, connection, [param.index for param in missing])
        if self._pusher is None:
            end()
        else:
            self._pusher.then(end)
        self._micro_steps += 1


def _end(connection: "Connection", absent: list[int]) -> None:
    """Ends a micro-step. ``absent`` have no gradient in it."""
    if absent:
        connection.weights.finish_copies()
        connection.job.push_zeros(absent)
    connection.job.end_micro_step()


def _check(connection: "Connection", param: Param, gradient: Tensor) -> None:
    """Refuses a gradient with a graph, and one computed with older weights than its step's."""
    params.check_has_no_graph(param, gradient)
    if connection.weights.is_awaited(param):
        raise invalid(
            f"{param.name}.grad",
            "computed with the weights of the step before",
            "computed with the newest, which had not been read",
            "something reads this parameter past torch's functions: pass layerwise=False, or call optimizer.flush() before it",
            UsageError,
        )
