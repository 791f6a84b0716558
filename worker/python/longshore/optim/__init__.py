"""Optimizers: torch's own, with their arguments, and Lion. Each also takes the options of :class:`longshore.transfer.options.Options` by
keyword.
"""

import functools
from typing import Any, Unpack

from torch import Tensor

from longshore.errors import invalid
from longshore.optim.optimizer import Optimizer
from longshore.transfer import device
from longshore.transfer.job import Hyper, StepReport
from longshore.transfer.options import JobOptions

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "NAdam", "Optimizer", "StepReport"]


#: Flags of torch that servers' rules do not have, with the remedy. None and False are torch's defaults and pass.
_FLAGS = {
    "amsgrad": "servers keep no largest second moment: leave it out",
    "maximize": "servers minimise: negate the loss",
    "capturable": "a step that waits for servers cannot be captured in a graph: leave it out",
    "differentiable": "backward does not reach servers: leave it out",
    "decoupled_weight_decay": "servers add it to the gradient: leave it out, or use longshore.AdamW",
    "initial_accumulator_value": "servers start from 0: leave it out",
}
#: torch's words for hyperparameters that are at least 0.
_AT_LEAST_0 = {
    "lr": "learning rate",
    "momentum": "momentum value",
    "eps": "epsilon value",
    "lr_decay": "lr_decay value",
    "weight_decay": "weight_decay value",
    "momentum_decay": "momentum_decay value",
}


def _check_number(what: str, value: Any) -> None:
    """Refuses text and other values that are no numbers, although ``float`` takes some of them."""
    if not hasattr(value, "__float__"):  # a protocol's `isinstance` takes 30 us
        raise invalid(what, repr(value), "a number", "pass a float, not text")


def _check(what: str, value: Any, *, below: float | None = None) -> None:
    """Refuses a value outside a rule's domain, which begins at 0. The message uses torch's words."""
    _check_number(what, value)
    number = float(value)
    if number >= 0.0 and (below is None or number < below):
        return
    raise invalid(what, value, "at least 0" if below is None else f"at least 0 and below {below:g}", f"Invalid {what}: {value}")


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a constructor that are settings of a param group."""
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "options", "__class__")}


class _Rule(Optimizer):
    """Checks the hyperparameters that a group has, and returns them as servers take them."""

    def _check_hyper(self, group: dict[str, Any]) -> None:
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise invalid("lr", lr.tolist(), "one number", "Tensor lr must be 1-element")
        for name, what in _AT_LEAST_0.items():
            if name in group:
                _check(what, group[name])
        if "dampening" in group:
            _check_number("dampening", group["dampening"])
        if "betas" in group:
            first, second = group["betas"]
            if isinstance(first, Tensor) is not isinstance(second, Tensor):
                raise invalid("betas", group["betas"], "of one kind", "betas must be either both floats or both Tensors")
            for index, beta in enumerate((first, second)):
                _check(f"beta parameter at index {index}", beta, below=1.0)
        if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise invalid("nesterov", True, "False here", "Nesterov momentum requires a momentum and zero dampening")
        for name, remedy in _FLAGS.items():
            if group.get(name) and not (name == "decoupled_weight_decay" and self.rule == "adamw"):
                raise invalid(name, group[name], "0" if name == "initial_accumulator_value" else "False", remedy)

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        # torch allows tensors of one element.
        given = {name: float(group[name]) for name in (*_AT_LEAST_0, "dampening") if name in group}
        if "betas" in group:
            given["beta1"], given["beta2"] = map(float, group["betas"])
        return Hyper(**given, nesterov=bool(group.get("nesterov")))


class AdamW(_Rule):
    """``torch.optim.AdamW`` with its arguments, its state on optimizer servers.

    Args:
        params: ``model.named_parameters()``, which gives the servers the model's names; or any form that torch takes.
        lr, betas, eps, weight_decay: as in torch. Schedulers may change them in ``param_groups`` between steps.
        amsgrad, maximize, capturable, differentiable: must be False.
        foreach, fused: ignored.
        **options: options of the job; see :class:`longshore.transfer.options.Options`.

    Raises:
        InvalidError: naming the argument, its limit and a remedy.
    """

    rule = "adamw"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[JobOptions],
    ) -> None:
        super().__init__(params, _settings(locals()), dict(options))


class Adam(_Rule):
    """``torch.optim.Adam`` with its arguments: weight decay is added to the gradient. See :class:`AdamW`."""

    rule = "adam"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[JobOptions],
    ) -> None:
        if decoupled_weight_decay:
            raise invalid("decoupled_weight_decay", True, "False", "use longshore.AdamW")
        del decoupled_weight_decay
        super().__init__(params, _settings(locals()), dict(options))


class NAdam(_Rule):
    """``torch.optim.NAdam`` with its arguments: weight decay is added to the gradient. See :class:`AdamW`.

    torch keeps the product of all steps' momenta. Servers compute it from this step's ``betas[0]`` and ``momentum_decay``, so a step with
    other values than the steps before is refused.

    Raises:
        InvalidError: for ``decoupled_weight_decay=True``.
    """

    rule = "nadam"
    _lasting = ("beta1", "momentum_decay")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Unpack[JobOptions],
    ) -> None:
        super().__init__(params, _settings(locals()), dict(options))

    def _derived(self, group: dict[str, Any], step: int) -> dict[str, Tensor]:
        return {"mu_product": device.host_number(_mu_product(float(group["betas"][0]), float(group["momentum_decay"]), step))}


@functools.lru_cache
def _mu_product(beta1: float, momentum_decay: float, step: int) -> float:
    """Returns the product of the momenta of all steps, rounded at each as torch does."""
    product = device.host_number(1)
    for index in range(1, step + 1):
        product *= beta1 * (1.0 - 0.5 * 0.96 ** (index * momentum_decay))
        if product == 0:
            break
    return product.item()


class SGD(_Rule):
    """``torch.optim.SGD`` with its arguments. See :class:`AdamW`."""

    rule = "sgd"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[JobOptions],
    ) -> None:
        super().__init__(params, _settings(locals()), dict(options))


class Adagrad(_Rule):
    """``torch.optim.Adagrad`` with its arguments. See :class:`AdamW`.

    Raises:
        InvalidError: for an ``initial_accumulator_value`` other than 0, since servers start from 0.
    """

    rule = "adagrad"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[JobOptions],
    ) -> None:
        super().__init__(params, _settings(locals()), dict(options))


class Lion(_Rule):
    """Lion as in Algorithm 2 of its paper, with decoupled weight decay. See :class:`AdamW`."""

    rule = "lion"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        **options: Unpack[JobOptions],
    ) -> None:
        super().__init__(params, _settings(locals()), dict(options))

