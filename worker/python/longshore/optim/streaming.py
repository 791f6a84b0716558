"""Streaming mode: each gradient leaves as backward makes it, while the rest of backward runs.

Hooks of :class:`Stream` take gradients on autograd's threads. Small gradients leave together: a call for each of them takes longer than its
copy.
"""

import contextlib
import functools
import weakref
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from longshore.distributed import ddp
from longshore.errors import GradientError, UsageError, invalid
from longshore.optim.state import Step
from longshore.transfer import device, params
from longshore.transfer.gradients import ENOUGH, Gradients, Group, Pusher
from longshore.transfer.params import Columns, Param, check_gradient

if TYPE_CHECKING:
    from longshore.distributed.ranks import Ranks
    from longshore.optim.connection import Connection
    from longshore.optim.guards import Watch
    from longshore.transfer.options import Options


_grad = Tensor.grad.__get__  # type: ignore[attr-defined]

#: Groups of gradients in a bounded room of a device.
_GROUPS = 8


class Streamed(Protocol):
    """The parts of the optimizer that a stream uses."""

    param_groups: list[dict[str, Any]]
    _options: "Options"
    _gradients: Gradients
    _connection: "Connection | None"
    _frozen: list[tuple[str, Tensor]]
    _watch: "Watch | None"
    _now: Step

    def _opened_by_gradients(self) -> "Connection": ...

    def _check_missing(self, missing: list[Param]) -> None: ...


class Stream:
    """Sends gradients of the current step. Hooks hold a weak reference, so the optimizer can be freed."""

    def __init__(self, optimizer: Streamed) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._hooks: dict[int, Any] = {}
        self._by_tensor: dict[int, Param] = {}
        self._step, self._gradients = optimizer._now, optimizer._gradients
        self._gradients.group = Group()
        #: Parameters of the host whose gradients leave next, these gradients, and the number of their elements.
        self._params: list[Param] = []
        self._waiting: list[Tensor] = []
        self._elements = 0
        #: Parameters that left together in an earlier step, by the first one's index: backward has one order in most models.
        self._groups: dict[int, Columns] = {}
        #: Whether each of the job's parameters has a hook.
        self._watches_all = False
        #: Pushes gradients that a device copies first.
        self._pusher: Pusher | None = None
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
        # A parameter that requires no gradient yet may train later.
        self._watches_all = bool(self._by_tensor) and self._by_tensor.keys() <= self._hooks.keys()
        return new

    def unhook(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
        self._gradients.group, self._params, self._waiting, self._elements = Group(), [], [], 0
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def has_left(self, param: Param) -> bool:
        """Returns whether the step's whole gradient of a parameter has left."""
        optimizer, step = self._optimizer(), self._step
        return optimizer is None or step.passes + (param.index in step.taken) >= optimizer._options.accumulate

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
        waiting, taken = self._waiting, self._step.taken
        param, gradient = self._by_tensor.get(id(tensor)), tensor.grad
        if not waiting or param is None or param.index in taken or gradient is None or gradient.requires_grad:
            self._take_first(tensor)
            return
        # The group's first gradient checked the optimizer. Leaving checks that again, and all gradients at once.
        self._params.append(param)
        waiting.append(gradient)
        taken.add(param.index)
        tensor.grad = None
        self._elements += param.elements
        if len(taken) == len(self._by_tensor):
            self._end_micro_step()
        elif self._elements >= ENOUGH:
            self._leave_together()

    def _take_first(self, tensor: Tensor) -> None:
        """Implements :meth:`_take` with all checks."""
        optimizer, connection = self._open()
        if not self._step.taken and not self._watches_all:
            for other in self.hook():
                # The parameter trains since the last check, and this backward may have made its gradient already. An accelerator's gradient
                # may be of another stream, which nothing here waits for: it leaves when backward has ended.
                if not device.accelerator.has(other):
                    self._take(other)
        with contextlib.nullcontext() if connection.ranks is None else connection.ranks.telling(), torch.no_grad():
            self._leave(optimizer, connection, tensor)

    def _leave(self, optimizer: Streamed, connection: "Connection", tensor: Tensor) -> None:
        step, param, gradient = self._step, self._by_tensor.get(id(tensor)), tensor.grad
        step.check_open()
        if gradient is None:
            return
        if param is None:
            params.check_unchanged([], optimizer._frozen)
            return
        if not step.has_begun:
            if optimizer._watch is not None:
                optimizer._watch.check()
            connection.check_written()
        if param.index in step.taken:
            # Another backward has begun, and the one before left parameters out.
            self._end_micro_step()
        if step.passes >= optimizer._options.accumulate:
            raise invalid(
                f"{param.name}.grad",
                f"of backward pass {step.passes + 1} of this step",
                f"of one of {optimizer._options.accumulate}",
                "pass accumulate= with the number of backward passes between two calls of step, or call zero_grad() of the optimizer or "
                "engine, not of the model, where a step was interrupted. Where one backward reaches this parameter from several blocks of a "
                "reentrant checkpoint, pass it use_reentrant=False: each of them makes a gradient of its own",
                GradientError,
            )
        if connection.ranks is None:
            self._add(connection, param, gradient)
            return
        params.check_unchanged([param], [])
        _check(connection, param, gradient)
        connection.ranks.take(connection.job, param, gradient)
        step.take(param.index)
        tensor.grad = None
        if len(step.taken) == len(connection.params):
            self._end_micro_step()

    def _add(self, connection: "Connection", param: Param, gradient: Tensor) -> None:
        """Takes a gradient. The group leaves once it is large enough, or with the last gradient."""
        step, index, room = self._step, param.index, self.room
        if gradient.requires_grad or index in connection.weights.awaited:
            _check(connection, param, gradient)
        if self._pusher is None:
            check_gradient(param, gradient)
            self._params.append(param)
            self._waiting.append(gradient)
            self._elements += param.elements
            is_full = self._elements >= ENOUGH or room is not None
        else:
            self._pusher.wait_for(index)
            if room is not None:
                if self._gradients.group.nbytes + gradient.nbytes > room:
                    self._leave_together()
                self._pusher.wait_for_room(self._gradients.group.nbytes + gradient.nbytes, room)
            group = self._gradients.take(param, gradient)
            is_full = group.elements >= ENOUGH or (room is not None and (not group.nbytes or group.nbytes * _GROUPS >= room))
        step.take(index)
        param.tensor.grad = None
        if len(step.taken) == len(connection.params):
            self._end_micro_step()
        elif is_full:
            self._leave_together()

    def _leave_together(self, *, is_last: bool = False) -> None:
        """Sends the gradients that were taken and have not left."""
        _, connection = self._open()
        self._step.check_open()
        if self._pusher is None:
            self._collect(connection)
            self._gradients.push(connection.job)
        else:
            if is_last:
                self._pusher.then(connection.weights.finish_copies)
            self._pusher.push(self._gradients.leave())

    def _collect(self, connection: "Connection") -> None:
        """Checks the gradients that wait, and gives them to the group."""
        if not self._waiting:
            return
        if connection.weights.awaited:
            for param, gradient in zip(self._params, self._waiting, strict=True):
                _check(connection, param, gradient)
        first = self._params[0].index
        columns = self._groups.get(first)
        if columns is None or columns.params != self._params:
            columns = self._groups[first] = Columns(self._params)
        self._gradients.take_together(columns, self._waiting)
        self._params, self._waiting, self._elements = [], [], 0

    def _end_micro_step(self) -> None:
        step, (optimizer, connection) = self._step, self._open()
        if connection.ranks is not None:
            connection.weights.meet()
            if connection.ranks.end_micro_step(connection.job, optimizer._check_missing):
                step.end_pass()
            step.taken.clear()
            return
        missing = [param for param in connection.params if param.index not in step.taken]
        self._leave_together(is_last=not missing)
        optimizer._check_missing(missing)
        self._end_pass(connection, missing)

    def _take_left(self, optimizer: Streamed) -> None:
        """Sends gradients that no hook has seen: backward made them before their parameters had hooks, or the caller wrote ``.grad``."""
        if not self._watches_all:
            self.hook()
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            gradients = list(map(_grad, tensors))
            if all(map(is_, gradients, repeat(None))):
                return
            left = [tensor for tensor, gradient in zip(tensors, gradients, strict=True) if gradient is not None and tensor.numel()]
        for tensor in left:
            if id(tensor) not in self._by_tensor or self._by_tensor[id(tensor)].index not in self._step.taken:
                self._take(tensor)

    def finish(self) -> bool:
        """Ends the step's gradients. Returns whether there were any.

        Raises:
            UsageError: if a parameter that is frozen for the job has a gradient.
        """
        optimizer, step = self._optimizer(), self._step
        assert optimizer is not None
        if optimizer._connection is not None:
            params.check_unchanged([], optimizer._frozen)
        self._take_left(optimizer)
        if not step.has_begun and optimizer._options.partition is None and not optimizer._options.may_differ():
            return False
        optimizer, connection = self._open()
        step.check_open()
        if connection.ranks is not None:
            with connection.ranks.telling():
                made = self._finish_together(optimizer, connection, connection.ranks)
                connection.weights.meet()
            return made
        if step.taken:
            self._end_micro_step()
        while step.passes < optimizer._options.accumulate:
            # An epoch's last step may have fewer backward passes, and a rank may have none: this adds zero.
            self._end_pass(connection, connection.params)
        if self._pusher is not None:
            self._pusher.wait()
        connection.weights.meet()
        return True

    def _finish_together(self, optimizer: Streamed, connection: "Connection", ranks: "Ranks") -> bool:
        """Implements :meth:`finish` for ranks that reduce gradients together. A rank without gradients takes part in the collectives too."""
        while self._step.passes < optimizer._options.accumulate:
            connection.weights.meet()
            if not ranks.end_micro_step(connection.job, optimizer._check_missing):
                if not self._step.passes:
                    return False
                ranks.empty_micro_step(connection.job)
            self._step.end_pass()
        return True

    def _end_pass(self, connection: "Connection", missing: list[Param]) -> None:
        """Ends a micro-step once all of it has been pushed. ``missing`` have no gradient in it."""
        end = functools.partial(_end, connection, [param.index for param in missing])
        if self._pusher is None:
            end()
        else:
            self._pusher.then(end)
        self._step.end_pass()


def _end(connection: "Connection", absent: list[int]) -> None:
    """Ends a micro-step. ``absent`` have no gradient in it."""
    if absent:
        connection.weights.finish_copies()
        connection.job.begin_step()
        connection.job.push_zeros(absent)
    connection.job.end_micro_step()


def _check(connection: "Connection", param: Param, gradient: Tensor) -> None:
    """Refuses a gradient with a graph, and one computed with older weights than its step's."""
    params.check_has_no_graph(param, gradient)
    if param.index in connection.weights.awaited:
        raise invalid(
            f"{param.name}.grad",
            "computed with the weights of the step before",
            "computed with the newest, which had not been read",
            "something reads this parameter past torch's functions: pass layerwise=False, or call optimizer.flush() before it",
            UsageError,
        )
