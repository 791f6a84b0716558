"""Losses that are scaled: by the servers' own scaler, or by torch's ``GradScaler``."""

from typing import TYPE_CHECKING

from longshore.errors import UsageError, invalid

if TYPE_CHECKING:
    from longshore._connection import Connection
    from longshore._options import Options


class Scaling:
    """The part of an optimizer that knows of loss scales."""

    _options: "Options"
    _connection: "Connection | None"
    #: Whether a framework's adapter knows that no ``GradScaler`` is there, where torch is asked as if there were one.
    has_no_scaler: bool = False

    def _opened(self, *, in_step: bool = False) -> "Connection":
        raise NotImplementedError

    def _opened_by_gradients(self) -> "Connection":
        raise NotImplementedError

    @property
    def loss_scale(self) -> float:
        """What the loss of the next backward pass must be multiplied by; 1 without the option ``loss_scale``."""
        return 1.0 if self._options.loss_scale is None else self._opened(in_step=True).job.loss_scale()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``GradScaler`` asks before it leaves unscaling to this class, and Lightning before it clips. In safe mode ``GradScaler``
        unscales ``.grad`` as for any optimizer, so that it can be clipped. It leaves it here where that would go wrong without a word, and
        :meth:`_unscale` says so."""
        if self.has_no_scaler:
            return False
        if self._options.streaming:
            raise UsageError("gradients leave before GradScaler can look at them: use bf16, or streaming=False")
        wire = self._options.gradient_dtype if self._connection is None else self._connection.gradient_dtype
        drifts = self._options.place()[1] > 1 and self._options.partition != "all-reduced"
        return self._options.loss_scale is not None or drifts or wire == "fp16"

    def _unscale(self) -> float | None:
        """What gradients must be multiplied by, for a ``GradScaler``; None if it found inf or NaN."""
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
