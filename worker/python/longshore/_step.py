"""What goes into a step, and what becomes of it."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepReport:
    """What became of a step.

    Attributes:
        step: its number, counted from 1.
        read: the version of the weights that its gradient was computed with.
        skipped: whether nothing was updated, since the gradient was not finite.
        grad_norm: the global gradient norm before clipping; 0 where the job takes none, and nan where the step was skipped.
        clip_coefficient: what gradients were multiplied by; 1 when they were not clipped.
        loss_scale: what the step's loss was multiplied by; 1 without the option ``loss_scale``.
        overflow: the parameter and element that was not finite first. Rank 0 knows it.
        wall_s: seconds from its first push to the return of its commit.
        exposed_s: seconds of these in which this process waited.
        pushed_bytes, pulled_bytes: payload on the wire.
    """

    step: int
    read: int
    skipped: bool
    grad_norm: float
    clip_coefficient: float
    loss_scale: float
    overflow: str | None
    wall_s: float
    exposed_s: float
    pushed_bytes: int
    pulled_bytes: int

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "StepReport":
        """What the job says. All ranks have the same norm: a commit carries none that is not finite."""
        return cls(**{**fields, "grad_norm": math.nan} if fields["skipped"] else fields)

    def why_skipped(self) -> str:
        """What to say of a step that was skipped."""
        where = f"first in {self.overflow}" if self.overflow is not None else "and rank 0 says where"
        return (
            f"step {self.step} was skipped, and nothing is lost: the gradient is not finite, {where}. "
            "Look at the data of this step, lower the learning rate, or pass nonfinite='apply' to use it as it is"
        )


@dataclass(slots=True)
class Hyper:
    """Hyperparameters of a param group in one step. A rule ignores those that it does not have.

    Attributes:
        lr: the learning rate.
        beta1, beta2, eps: of AdamW, Adam and Lion; Adagrad has ``eps`` too.
        weight_decay: decoupled with AdamW and Lion, otherwise a part of the gradient.
        momentum, dampening, nesterov: of SGD.
        lr_decay: of Adagrad.
    """

    # The fields are those of `GivenHyper` in settings.rs.

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
