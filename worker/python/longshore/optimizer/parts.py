"""The attributes that the parts of an optimizer share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longshore.optimizer.connection import Connection
    from longshore.optimizer.states import Step
    from longshore.transfer.filling import Filling
    from longshore.transfer.gradients import Gradients
    from longshore.transfer.job import Hyper, StepReport
    from longshore.transfer.options import Options
    from longshore.transfer.params import Param
    from longshore.transfer.weights import WeightsInUnits


class Connected(torch.optim.Optimizer):
    """State that the parts of an optimizer share; :class:`longshore.optim.Optimizer` joins the parts."""

    #: The servers' name of the update rule.
    rule: ClassVar[str]
    #: Torch's names of the arrays that servers keep beside the master weights.
    _moments: ClassVar[tuple[str, ...]]
    #: Fields of :class:`Hyper` that must keep their values of the first step.
    _lasting: ClassVar[tuple[str, ...]] = ()
    _options: Options
    _job_name: str
    _connection: Connection | None
    _finalizer: Any
    _now: Step
    #: True if servers refused the job, so that a loaded state may restore it.
    _is_refused: bool
    _is_version_known: bool
    #: The handle of the latest state that was taken, until a state is loaded.
    _taken: dict[str, Any] | None
    #: A version and the name of its checkpoint on the servers.
    _checkpointed: tuple[int, str] | None
    #: Number of updates that made the weights.
    _applied: Tensor
    #: Each group's values of the fields in ``_lasting`` in the last step, which was made here or loaded. Empty before
    #: the first step.
    _kept: list[list[float]]
    #: State that fills a new job instead of the parameters' weights.
    _filling: Filling | None
    #: The job's trained and frozen parameters, since it was opened.
    _table: tuple[list[Param], list[Param]] | None
    #: Names and tensors of parameters in the param groups that do not train.
    _frozen: list[tuple[str, Tensor]]
    _gradients: Gradients
    #: In streaming mode a :class:`longshore.optimizer.step.Stream`, whose module imports this one.
    _stream: Any
    #: Weights of the job once the model is in units.
    _units: WeightsInUnits | None

    #: Report of the newest decided step; None before the first.
    last_report: StepReport | None

    # Properties and methods of the parts.
    version: Any
    passing_checkpoints: Any
    flush: Callable[[], int]
    check_model: Callable[[], None]
    _new_connection: Callable[[], Connection]
    _opened: Callable[..., Connection]
    _opened_by_gradients: Callable[[], Connection]
    _start: Callable[..., Connection]
    _stream_anew: Callable[[], None]
    _report: Callable[[Connection], None]
    _check_unused: Callable[[], None]
    _drop: Callable[..., None]
    _guard_clipping: Callable[[], None]
    _groups_of_job: Callable[[], list[dict[str, Any]]]
    _lasting_values: Callable[[], list[list[float]]]
    _table_of_job: Callable[[], tuple[list[Param], list[Param]]]
    _tensors: Callable[[], list[Tensor]]
    _hyper: Callable[[dict[str, Any]], Hyper]
    _check_hyper: Callable[[dict[str, Any]], None]

    @property
    def _version(self) -> int:
        return self._connection.version if self._connection else 0


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer of this package, unwrapped from Accelerate's or Lightning's wrapper; None for another one."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, Connected) else None
