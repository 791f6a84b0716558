"""Steps: gradients leave in ``step``, or as backward makes them; servers decide, and a report comes back. Losses may be scaled.

In streaming mode hooks of :class:`Stream` take gradients on autograd's threads, one gradient at a time. Small ones leave together: a call for
each of them takes longer than its copy. The training thread makes steps. A loss scale comes from the servers or from torch's ``GradScaler``.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longshore.distributed import collectives
from longshore.errors import GradientError, LongshoreError, UsageError, invalid, warn
from longshore.optimizer import guards
from longshore.optimizer.parts import Connected
from longshore.optimizer.states import State
from longshore.transfer import device
from longshore.transfer import params as _params
from longshore.transfer.gradients import ENOUGH, ENOUGH_ON_DEVICE, Group, Pusher
from longshore.transfer.job import StepReport
from longshore.transfer.params import Columns, Param, check_gradient
from longshore.transfer.weights import Weights

if TYPE_CHECKING:
    from longshore.distributed.ranks import Ranks
    from longshore.optimizer.connection import Connection


_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_task = torch._C._current_graph_task_id


class Stream:
    """Sends gradients of the current step. Hooks hold a weak reference, so the optimizer can be freed."""

    def __init__(self, optimizer: Stepping) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._hooks: dict[int, Any] = {}
        self._by_tensor: dict[int, Param] = {}
        self._step, self._gradients = optimizer._now, optimizer._gradients
        self._lock = self._step.lock
        self._gradients.group = Group()
        #: Parameters whose gradients leave next, as a group.
        self._params: list[Param] = []
        #: The gradients of `_params`.
        self._waiting: list[Tensor] = []
        #: Number of elements of `_waiting`, and the number from which on they leave.
        self._elements, self._enough = 0, ENOUGH
        #: Groups of an earlier step, by the index of the first parameter. Backward has the same order in each step of
        #: most models, so groups come again.
        self._groups: dict[int, Columns] = {}
        #: True once each of the job's parameters has a hook.
        self._watches_all = False
        #: Pushes gradients that a device must copy first. None if the host's memory has all of them, or ranks reduce.
        self._pusher: Pusher | None = None
        #: Largest number of bytes that unsent gradients may take where the model is; None for no limit.
        self._room: int | None = None
        #: Indices of all parameters of a parameter's unit, by the parameter's index. Empty for a model without units.
        self._units: dict[int, frozenset[int]] = {}
        #: Indices of the parameters of the current group's unit; all parameters for a model without units.
        self._unit: frozenset[int] = frozenset()
        self._is_checked = False
        self.hook()

    def hook(self) -> list[Tensor]:
        """Hooks the parameters that require a gradient and have no hook yet, and returns them. torch allows no hook on others."""
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
        # False while some parameter of the job requires no gradient, since such a parameter may train later.
        self._watches_all = bool(self._by_tensor) and self._by_tensor.keys() <= self._hooks.keys()
        return new

    def keep_within(self, room: int, units: list[frozenset[int]]) -> None:
        """Lets unsent gradients take at most ``room`` bytes where the model is. A group ends with its unit from now on.

        Args:
            room: bytes, enough for the gradients of any unit.
            units: indices of each unit's parameters.
        """
        self._room, self._units = room, {index: unit for unit in units for index in unit}

    def unhook(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
        self._gradients.group, self._params, self._waiting, self._elements = Group(), [], [], 0
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def has_left(self, param: Param) -> bool:
        """Returns whether a parameter's gradients of all backward passes of the step have left."""
        optimizer, step = self._optimizer(), self._step
        return optimizer is None or step.passes + (param.index in step.taken) >= optimizer._options.accumulate

    def _open(self) -> tuple[Stepping, Connection]:
        optimizer = self._optimizer()
        if optimizer is None:
            raise UsageError("the optimizer is gone, and its parameters still train: keep it until training ends")
        if not self._is_checked:
            if collectives.has_ddp(tensor for group in optimizer.param_groups for tensor in group["params"]):
                raise UsageError(
                    "DistributedDataParallel reduces gradients after they have left: use streaming=False with "
                    "partition='all-reduced', or leave the model unwrapped and let the servers sum or pass "
                    "partition='reduce-scatter'"
                )
            self._is_checked = True
        connection = optimizer._opened_by_gradients()
        if not self._by_tensor:
            self._by_tensor = {id(param.tensor): param for param in connection.params}
            self._unit = frozenset(param.index for param in connection.params)
            if connection.ranks is None and any(device.accelerator.has(param.tensor) for param in connection.params):
                self._pusher, self._enough = Pusher(connection.job), ENOUGH_ON_DEVICE
        return optimizer, connection

    def _take(self, tensor: Tensor) -> None:
        """Sends the gradient that backward has just made, and frees it. A small one leaves with the next ones."""
        with self._lock:
            waiting, taken = self._waiting, self._step.taken
            param, gradient = self._by_tensor.get(id(tensor)), tensor.grad
            if not waiting or param is None or gradient is None:
                self._take_first(tensor)
                return
            index = param.index
            if index in taken or index not in self._unit or _task() not in self._step.running:
                self._take_first(tensor)
                return
            if self._pusher is not None:
                self._gradients.note_stream(gradient)
                gradient = gradient.resolve_neg()
            # Nothing is checked here. The group's first gradient had the optimizer checked, and the gradients of a
            # group are checked together when they leave.
            self._params.append(param)
            waiting.append(gradient)
            taken.add(index)
            tensor.grad = None
            self._elements += param.elements
            if self._elements >= self._enough or self._unit <= taken:
                self._end_group()

    def _take_first(self, tensor: Tensor) -> None:
        """Implements :meth:`_take` with all checks."""
        optimizer, connection = self._open()
        task = _task()
        if task != -1 and task not in self._step.running:
            self._step.running.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end_backward, task))
        if not self._step.taken and not self._watches_all:
            for other in self.hook():
                # The parameter began to train since the last check, and this backward may have made its gradient
                # already. An accelerator's gradient leaves only after backward: another stream may still be making it.
                if not device.accelerator.has(other):
                    self._take(other)
        with connection.telling(), torch.no_grad():
            self._leave(optimizer, connection, tensor)

    def _end_backward(self, task: int) -> None:
        """Notes that a backward has run to its end, and sends what waits."""
        with self._lock:
            if self._waiting:
                self._leave_together()
            self._step.running.difference_update((-1, task))

    def _leave(self, optimizer: Stepping, connection: Connection, tensor: Tensor) -> None:
        step, param, gradient = self._step, self._by_tensor.get(id(tensor)), tensor.grad
        step.check_open()
        if gradient is None:
            return
        if param is None:
            _params.check_unchanged([], optimizer._frozen)
            return
        if not step.has_begun:
            if optimizer._watch is not None:
                optimizer._watch.check()
            connection.check_written()
        if param.index in step.taken:
            # A second gradient of the parameter: another backward has begun, and the one before left parameters out.
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
        _params.check_unchanged([param], [])
        _check(connection, param, gradient)
        connection.ranks.take(connection.job, param, gradient)
        step.take(param.index)
        tensor.grad = None
        if len(step.taken) == len(connection.params):
            self._end_micro_step()

    def _add(self, connection: Connection, param: Param, gradient: Tensor) -> None:
        """Takes a gradient. The group leaves once it is large enough, or with the last gradient of its unit or of the step."""
        step, index = self._step, param.index
        if gradient.requires_grad or index in connection.weights.awaited:
            _check(connection, param, gradient)
        check_gradient(param, gradient)
        if self._units:
            unit = self._units.get(index, frozenset([index]))
            if self._waiting and unit is not self._unit:
                self._leave_together()  # some parameter of the previous unit has no gradient
            self._unit = unit
        if self._pusher is not None:
            self._gradients.note_stream(gradient)
            gradient = gradient.resolve_neg()
        step.take(index)
        self._params.append(param)
        self._waiting.append(gradient)
        self._elements += param.elements
        param.tensor.grad = None
        if self._elements >= self._enough or self._unit <= step.taken:
            self._end_group()

    def _end_group(self) -> None:
        """Sends the group. Ends the micro-step if no gradient is missing."""
        if len(self._step.taken) == len(self._by_tensor):
            self._end_micro_step()
        else:
            self._leave_together()

    def _leave_together(self, *, is_last: bool = False) -> None:
        """Sends the gradients that were taken and have not left."""
        _, connection = self._open()
        self._step.check_open()
        if self._pusher is None:
            self._collect(connection)
            self._gradients.push(connection.job)
        else:
            for param in self._params:
                self._pusher.wait_for(param.index)
            if self._room is not None:
                self._pusher.wait_for_room(sum(gradient.nbytes for gradient in self._waiting), self._room)
            self._collect(connection)
            if is_last:
                self._pusher.then(connection.weights.finish_copies)
            self._pusher.push(self._gradients.leave())

    def _collect(self, connection: Connection) -> None:
        """Checks the gradients that wait, and gives them to the group."""
        if not self._waiting:
            return
        if connection.weights.awaited or any(map(_requires_grad, self._waiting)):
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

    def _take_left(self, optimizer: Stepping) -> None:
        """Sends gradients that no hook has seen: backward made them before their parameters had hooks, or the caller wrote ``.grad``."""
        if not self._watches_all:
            self.hook()
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            gradients = list(map(_params.grad_of, tensors))
            if all(map(is_, gradients, repeat(None))):
                return
            left = [tensor for tensor, gradient in zip(tensors, gradients, strict=True) if gradient is not None and tensor.numel()]
        for tensor in left:
            self._take(tensor)

    def finish(self) -> bool:
        """Ends the step's gradients. Returns whether there were any.

        Raises:
            UsageError: if a parameter that is frozen for the job has a gradient.
        """
        optimizer, step = self._optimizer(), self._step
        assert optimizer is not None
        step.running.add(-1)  # flush() gives up a step that is refused or interrupted from here on
        if optimizer._connection is not None:
            _params.check_unchanged([], optimizer._frozen)
        self._take_left(optimizer)
        if step.state is State.IDLE and optimizer._options.partition is None and not optimizer._options.may_differ():
            return False
        optimizer, connection = self._open()
        step.check_open()
        if connection.ranks is not None:
            with connection.telling():
                made = self._finish_together(optimizer, connection, connection.ranks)
                connection.weights.meet()
            return made
        if step.taken:
            self._end_micro_step()
        while step.passes < optimizer._options.accumulate:
            # Each missing backward pass adds zeros. An epoch's last step may have fewer passes, and a rank may have
            # none.
            self._end_pass(connection, connection.params)
        if self._pusher is not None:
            self._pusher.wait()
        connection.weights.meet()
        return True

    def _finish_together(self, optimizer: Stepping, connection: Connection, ranks: Ranks) -> bool:
        """Implements :meth:`finish` for ranks that reduce gradients together. A rank without gradients takes part in the collectives too."""
        while self._step.passes < optimizer._options.accumulate:
            connection.weights.meet()
            if not ranks.end_micro_step(connection.job, optimizer._check_missing):
                if not self._step.passes:
                    return False
                ranks.empty_micro_step(connection.job)
            self._step.end_pass()
        return True

    def _end_pass(self, connection: Connection, missing: list[Param]) -> None:
        """Ends a micro-step once all of it has been pushed. ``missing`` have no gradient in it."""
        end = functools.partial(_end, connection, [param.index for param in missing])
        if self._pusher is None:
            end()
        else:
            self._pusher.then(end)
        self._step.end_pass()


def _end(connection: Connection, absent: list[int]) -> None:
    """Ends a micro-step. ``absent`` have no gradient in it."""
    if absent:
        connection.weights.finish_copies()
        connection.job.begin_step()
        connection.job.push_zeros(absent)
    connection.job.end_micro_step()


def _check(connection: Connection, param: Param, gradient: Tensor) -> None:
    """Refuses a gradient with a graph, which a later backward needs, and one computed with older weights than its step's."""
    if gradient.requires_grad:
        raise invalid(
            f"{param.name}.grad",
            "made with create_graph=True",
            "made by the last backward in streaming mode",
            "take forces and other derivatives by torch.autograd.grad, which accumulates into no parameter, or pass streaming=False",
            GradientError,
        )
    weights = connection.weights
    if param.index in weights.awaited and not (isinstance(weights, Weights) and weights.has(param.index)):
        raise invalid(
            f"{param.name}.grad",
            "computed with the weights of the step before",
            "computed with the newest, which had not been read",
            "something reads this parameter past torch's functions: pass layerwise=False, or call optimizer.flush() before it",
            UsageError,
        )


class Stepping(Connected):
    """The part of an optimizer that makes steps."""

    _stream: Stream | None
    #: The guard of the model's parameters; None where no adapter has named the model.
    _watch: guards.Watch | None
    _absent: guards.Absent
    _loss: float | None
    #: True if a framework's adapter has found no ``GradScaler``, although the framework asks as if one existed.
    has_no_scaler: bool = False
    #: Called at each commit. Returns at most 1 MiB of rank 0's data to keep with it, for :attr:`resumed`.
    resume_data: Callable[[], bytes] | None

    # Loss scales

    @property
    def loss_scale(self) -> float:
        """Factor for the loss of the next backward pass; 1 without the option ``loss_scale``."""
        given = self._options.loss_scale
        if given is None:
            return 1.0
        return given.initial if self._connection is None else self._connection.job.loss_scale()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``GradScaler`` reads this before it leaves unscaling to this class, and Lightning before it clips.

        False in most of safe mode: ``GradScaler`` unscales ``.grad`` as for any optimizer, so that it can be clipped. True where that would
        silently train wrongly; :meth:`_unscale` raises then."""
        if self.has_no_scaler:
            return False
        if self._options.streaming:
            raise UsageError("gradients leave before GradScaler can look at them: use bf16, or streaming=False")
        wire = self._options.gradient_dtype if self._connection is None else self._connection.gradient_dtype
        drifts = self._options.place()[1] > 1 and self._options.partition != "all-reduced"
        return self._options.loss_scale is not None or drifts or wire == "fp16"

    def _unscale(self) -> float | None:
        """Returns the gradients' factor for a ``GradScaler``; None if it found inf or NaN."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and found_inf is None:
            return 1.0
        if self._options.loss_scale is not None:
            raise UsageError("a GradScaler and loss_scale would both scale the loss: use one of them")
        connection = self._opened_by_gradients()
        if connection.world_size > 1 and self._options.partition != "all-reduced":
            raise UsageError(
                "each rank's GradScaler would find its own overflows, and scales would drift apart: train in bf16 with several "
                "ranks, or with DistributedDataParallel and partition='all-reduced'"
            )
        if connection.gradient_dtype == "fp16":
            raise invalid(
                "gradient_dtype",
                "fp16",
                "fp32 or bf16 with a GradScaler",
                "gradients leave unscaled, and small ones would vanish in fp16",
            )
        if found_inf is not None and found_inf.item():
            return None
        return 1.0 if scale is None else 1.0 / float(scale)

    # Guards

    def watch(self, *models: nn.Module) -> None:
        """Refuses steps and saves from now on once a model has replaced one of the optimizer's parameters. Adapters of frameworks call
        it."""
        connection = self._connection
        if connection is not None:
            params = [(param.name, param.tensor) for param in [*connection.params, *connection.frozen()]]
        else:
            keeps = self._options.frozen != "leave"
            params = [(name, tensor) for name, tensor in _params.named(self.param_groups) if tensor.requires_grad or keeps]
        self._watch = guards.Watch(models, params) if models else None

    def check_model(self) -> None:
        """Raises if a watched model has replaced a parameter.

        Raises:
            UsageError: naming the parameter.
        """
        if self._watch is None:
            return
        with contextlib.nullcontext() if self._connection is None else self._connection.telling():
            self._watch.check()

    def _warn_of_unused(self, connection: Connection) -> None:
        """Ends a step, and warns of parameters without a gradient in all of the first steps, unless ``missing_gradients`` is given."""
        unused = self._absent.end_step()
        if not unused or self._options.missing_gradients is not None:
            return
        rank, world_size = self._options.place()
        if rank != 0:
            return
        steps = guards.FIRST_STEPS
        if world_size > 1:
            # Other ranks may have had gradients of these parameters. Only servers know how many steps left a parameter
            # out.
            left_out = connection.left_out()
            unused = {index for index in unused if left_out.get(index, 0) > guards.FIRST_STEPS // 2}
            steps = min([guards.FIRST_STEPS, *(left_out[index] for index in unused)])
        names = [param.name for param in connection.params if param.index in unused]
        if not names:
            return
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warn(
            f"{shown} got no gradient in {'all' if steps == guards.FIRST_STEPS else steps} of the first {guards.FIRST_STEPS} steps, and do not train. If the model "
            "was changed after its optimizer was built (a layer replaced, its embedding resized), the new parameters do not train either: build the "
            "optimizer after that. Otherwise freeze these with requires_grad_(False), or pass missing_gradients='skip' if some later step will use "
            "them"
        )

    # Steps

    def _push(self) -> bool:
        """Sends the gradients in ``.grad``. Returns whether there were any."""
        scale = self._unscale()
        if scale is None:
            return False
        if self._connection is None and self._options.partition is None and not self._options.may_differ():
            if all(tensor.grad is None for group in self.param_groups for tensor in group["params"]):
                return False
        connection = self._opened_by_gradients()

        def leave(missing: list[Param]) -> None:
            self._check_missing(missing)
            self._now.push(connection.made)

        self._now.check_open()
        _params.check_unchanged([], self._frozen)
        with connection.telling():
            connection.check_written()
        if connection.ranks is not None:
            return connection.ranks.push(connection.job, scale, leave if self._can_start_over() else self._check_missing)
        self._gradients.group = Group()  # drops gradients of a refused step
        missing = self._gradients.take_together(connection.columns, connection.columns.gradients(), scale)
        if len(missing) == len(connection.params) and not self._options.may_differ():
            return False
        leave(missing)
        connection.weights.finish_copies()
        self._gradients.push(connection.job)
        _end(connection, [param.index for param in missing])
        return True

    def _check_missing(self, missing: list[Param]) -> None:
        self._absent.note(missing)
        if self._options.on_missing() != "error":
            return
        if self._stream is None:
            afterwards = ""
        elif self._can_start_over():
            afterwards = ". The others have left: call backward for what lacks one and step() again, or flush() to give this step up"
        else:
            afterwards = ". The others have left: end all ranks and start them again, and they go on from the last step"
        _params.check_missing(missing, afterwards)

    def _commit(self) -> None:
        connection = self._opened()
        if self._now.state is not State.PUSHED:
            self._now.push(connection.made)
        if connection.joined is not None:
            groups = ({**group, "lr": group.get("initial_lr", group["lr"])} for group in self._groups_of_job())  # a scheduler's first rate
            connection.record.begin(connection.job, list(map(self._hyper, groups)))
        if connection.joined and not self._is_version_known:
            warn(
                f"the job goes on from version {connection.joined}, and this script did not ask for it: its own step counter and schedule began anew. "
                "Read optimizer.global_step before the loop, or name another job= for a new run"
            )
        self._is_version_known, connection.joined = True, None
        kept = connection.record.data + (self.resume_data() if self.resume_data is not None else b"")
        loss, self._loss = self._loss, None
        connection.weights.finish_copies()  # copies of weights read since the gradients left
        connection.made = connection.job.commit([self._hyper(group) for group in self._groups_of_job()], kept, loss)
        connection.expect()
        self._now.end()
        connection.record.check_rank(connection.job)
        self._report(connection)
        self._warn_of_unused(connection)

    def _report(self, connection: Connection) -> None:
        reports = [StepReport.of(fields) for fields in connection.job.outcomes()]
        if reports:
            self.last_report = reports[-1]
        skipped = [report for report in reports if report.skipped]
        self._applied.fill_(self._applied.item() + len(reports) - len(skipped))
        if self._options.loss_scale is not None and self._options.loss_scale.dynamic:
            return  # the dynamic scale is found by skipped steps
        if skipped and self._options.nonfinite == "raise":
            raise LongshoreError(skipped[0].why_skipped(), field="gradient", value="not finite")
        for report in skipped:
            warn(report.why_skipped(), RuntimeWarning)

    def report_loss(self, loss: float) -> None:
        """Shows this loss with the next step on the servers' status page and in metrics. Only rank 0's loss is shown.

        Args:
            loss: a number. The caller reads an accelerator's tensor, since reading waits for the device.
        """
        self._loss = float(loss)

    def _can_start_over(self) -> bool:
        """Returns whether this rank is the only one, so that no other rank waits for the current step's gradients."""
        return self._options.place()[1] == 1

    def _start_over(self) -> None:
        """Abandons the current step's sent gradients: joins again as a new process does, and servers begin the step
        anew. Parameters stay unwritten, since a forward may have used them. After an error or Ctrl-C the call may be
        repeated."""
        self._check_unused()
        old = self._connection
        if old is not None:
            self._now.give_up(old.version)
            old.weights.give_up()
            self._drop(old, delete=False)
        self._start(self._new_connection(), found=True, held=self._now.version)
        self._stream_anew()

    def _drop(self, connection: Connection, *, delete: bool) -> None:
        """Ends the connection, for another one in its place."""
        connection.close(delete)
        self._finalizer.detach()
        _params.release(connection.ids)
        connection.weights.forget()
        self._connection = None

    def _stream_anew(self) -> None:
        if self._stream is not None:
            before = self._stream
            before.unhook()
            self._stream = Stream(self)
            self._stream._room, self._stream._units, self._stream._is_checked = before._room, before._units, before._is_checked
        self._now.end()
