"""Steps: gradients leave in ``step``, servers decide, and a report comes back. Losses may be scaled.

The scale comes from the servers or from torch's ``GradScaler``. The training thread makes steps.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from longshore.errors import LongshoreError, UsageError, invalid, warn
from longshore.optim import guards
from longshore.optim.connection import Connection
from longshore.optim.state import Step
from longshore.optim.state_dict import Back
from longshore.transfer import params as _params
from longshore.transfer.gradients import Gradients, Group
from longshore.transfer.job import Hyper, StepReport
from longshore.transfer.options import Options
from longshore.transfer.params import Param

if TYPE_CHECKING:
    from longshore.optim.connection import Connection
    from longshore.transfer.options import Options


class Scaling:
    """The part of an optimizer that handles loss scales."""

    _options: "Options"
    _connection: "Connection | None"
    #: Set by a framework's adapter that knows no ``GradScaler`` exists, although the framework asks torch as if there were one.
    has_no_scaler: bool = False

    def _opened(self, *, in_step: bool = False) -> "Connection":
        raise NotImplementedError

    def _opened_by_gradients(self) -> "Connection":
        raise NotImplementedError

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


class Watching:
    """The part of an optimizer that refuses replaced parameters, and names parameters without a gradient."""

    _options: Options
    _connection: Connection | None
    param_groups: list[dict[str, Any]]
    #: The guard of the model's parameters; None where no adapter has named the model.
    _watch: guards.Watch | None
    _absent: guards.Absent

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
        connection = self._connection
        with contextlib.nullcontext() if connection is None or connection.ranks is None else connection.ranks.telling():
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
            # Another rank may have had gradients. Servers count the steps that left a parameter out.
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


class Stepping(Back, Scaling, Watching):
    """The part of an optimizer that makes steps."""

    param_groups: list[dict[str, Any]]
    _gradients: Gradients
    #: Parameters in the param groups that do not train.
    _frozen: list[tuple[str, Tensor]]
    _applied: Tensor
    _loss: float | None
    _now: Step
    #: Report of the newest decided step; None before the first.
    last_report: StepReport | None
    #: Called at each commit. Returns at most 1 MiB of rank 0's data to keep with it, for :attr:`resumed`.
    resume_data: Callable[[], bytes] | None
    _is_version_known: bool

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        raise NotImplementedError

    def _groups_of_job(self) -> list[dict[str, Any]]:
        """Returns the param groups in the job's order, or raises for other ones than the job's."""
        raise NotImplementedError

    def _push(self) -> bool:
        """Sends the gradients in ``.grad``. Returns whether there were any."""
        scale = self._unscale()
        if scale is None:
            return False
        if self._connection is None and self._options.partition is None and not self._options.may_differ():
            if all(tensor.grad is None for group in self.param_groups for tensor in group["params"]):
                return False
        connection = self._opened_by_gradients()
        self._now.check_open()
        _params.check_unchanged([], self._frozen)
        with contextlib.nullcontext() if connection.ranks is None else connection.ranks.telling():
            connection.check_written()
        if connection.ranks is not None:
            return connection.ranks.push(connection.job, scale, self._check_missing)
        self._gradients.group = Group()  # without gradients of a refused step
        missing = self._gradients.take_together(connection.columns, connection.columns.gradients(), scale)
        if len(missing) == len(connection.params) and not self._options.may_differ():
            return False
        self._check_missing(missing)
        connection.weights.finish_copies()
        self._gradients.push(connection.job)
        if missing:
            connection.job.begin_step()
            connection.job.push_zeros([param.index for param in missing])
        connection.job.end_micro_step()
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
        self._now.push(connection.made)
        self._warn_of_older_steps(connection.joined)
        connection.joined = None
        kept = connection.record.data + (self.resume_data() if self.resume_data is not None else b"")
        loss, self._loss = self._loss, None
        connection.weights.finish_copies()  # copies of weights read since the gradients left
        connection.made = connection.job.commit([self._hyper(group) for group in self._groups_of_job()], kept, loss)
        connection.expect()
        self._now.end()
        connection.record.check_rank(connection.job)
        self._report(connection)
        self._warn_of_unused(connection)

    def _warn_of_older_steps(self, joined: int | None) -> None:
        """Warns at the first step of a script that goes on with a job and has not asked for its version."""
        if joined and not self._is_version_known:
            message = (
                f"the job goes on from version {joined}, and this script did not ask for it: its own step counter and schedule began anew. Read "
                "optimizer.version before the loop, or name another job= for a new run"
            )
            warn(message)
        self._is_version_known = True

    def _report(self, connection: Connection) -> None:
        reports = [StepReport.of(fields) for fields in connection.job.outcomes()]
        if reports:
            self.last_report = reports[-1]
        skipped = [report for report in reports if report.skipped]
        self._applied += len(reports) - len(skipped)
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
