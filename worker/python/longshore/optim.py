"""The public optimizers: torch's own, with their arguments, and Lion. Their state lives on optimizer servers.

Each also takes the options of :class:`longshore.transfer.options.Options` by keyword. :class:`Optimizer` joins the parts of
:mod:`longshore.optimizer`: the job, steps with streaming, and state.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor

from longshore.distributed.ranks import ranks_of
from longshore.errors import UsageError, invalid
from longshore.optimizer.connection import Connection
from longshore.optimizer.guards import Absent
from longshore.optimizer.opening import Opening
from longshore.optimizer.state_dict import Stateful
from longshore.optimizer.states import State, Step
from longshore.optimizer.step import Stepping, Stream
from longshore.transfer import device
from longshore.transfer import filling as _filling
from longshore.transfer import job as _job
from longshore.transfer import params as _params
from longshore.transfer.gradients import Gradients
from longshore.transfer.job import Hyper, StepReport
from longshore.transfer.options import JobOptions, Options
from longshore.transfer.tensors import UnitParameter, is_built
from longshore.transfer.weights import Unplaced

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "NAdam", "Optimizer", "StepReport"]


class Optimizer(Opening, Stepping, Stateful):
    """An optimizer whose master weights and state live on optimizer servers.

    Hooks, param groups, schedulers, closures, accumulation in ``.grad`` and ``GradScaler`` work as in torch. The first step opens the job
    on its servers, so param groups may be added until then. A job that ``servers=`` have already is opened at once, and the parameters get
    its weights.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], options: dict[str, Any]) -> None:
        self._options = Options.of(options, defaults)
        self._check_hyper(defaults)  # torch, too, reports a wrong value before wrong params
        self._job_name = self._options.job or _job.new_job_name("torch")
        self._process = os.getpid()
        self._connection = self._filling = self._table = self._groups = self._units = self._watch = None
        self._first_hypers = []
        self._kept = []
        self._stream = None
        self._gradients = Gradients()
        self._absent = Absent()
        self._applied = device.host_number(0)
        self.last_report = self._loss = self.resume_data = None
        self._is_version_known = self._is_refused = self._is_replaced = False
        self._taken = self._checkpointed = None
        self._now = Step()
        super().__init__(params, defaults)
        self._claim_at_once()
        if self._options.servers is not None:
            self._warn_of_no_name()
            self._join_if_there()
        if self._options.streaming:
            self._stream = Stream(self)
        self._guard_clipping()

    def _new_connection(self) -> Connection:
        tensors = [tensor for _, tensor in _params.named(self.param_groups)]
        if self._units is None and any(isinstance(tensor, UnitParameter) and not is_built(tensor) for tensor in tensors):
            raise UsageError("the model is in units: build its optimizer before shard(), and the model again for another optimizer")
        params, frozen = self._table_of_job()
        ranks = ranks_of(self._options, params)
        connection = Connection(self._options, self._job_name, self.rule, params, self._first_hypers, self._now, frozen, ranks)
        if any(map(is_built, tensors)):
            connection.weights = Unplaced()
            self._filling = self._filling or _filling.of_init(params)
        return connection

    def _patch_step_function(self) -> None:
        """Wraps ``step`` for hooks as torch does, and keeps torch.compile out of it: a step that waits for servers has no graph."""
        is_wrapped = hasattr(type(self).step, "hooked")
        super()._patch_step_function()
        if not is_wrapped:
            type(self).step = torch._disable_dynamo(type(self).step)  # type: ignore[method-assign,assignment]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step. Without streaming, returns when the parameters hold the next step's weights.

        In streaming mode the gradients have left already, and the first use of a parameter waits for its weights. Otherwise gradients in
        ``.grad`` leave now and stay unchanged. Without any gradient nothing happens, as in torch. With several ranks another rank may have
        gradients, and the step is made unless ``missing_gradients="error"``.

        Args:
            closure: computes the loss again, with gradients, and returns it.

        Returns:
            The closure's result.

        Raises:
            MissingGradientError: if some parameters have a gradient and others do not, with ``missing_gradients="error"``.
            GradientError: for a gradient of another type, shape or layout.
            LongshoreError: any other of :mod:`longshore.errors`.
        """
        self._check_not_replaced()
        self._check_unused()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._check_group(group)
        kept = self._lasting_values()
        self._check_kept(kept)
        if not self.has_begun:
            self.check_model()
        if self._stream is not None:
            with self._now.lock:
                made = self._stream.finish()
        else:
            made = self._push()
        if made:
            self._kept = kept
            self._commit()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the current step, as torch's does. In streaming mode some may have left already, for example before an
        interrupt. Servers then drop these too, unless other ranks wait for that step."""
        super().zero_grad(set_to_none)
        if self._now.state is State.GIVEN_UP or (self._now.has_begun and self._can_start_over()):
            self._start_over()

    def flush(self) -> int:
        """Waits until every step is decided and the parameters hold the newest weights. Call it before an evaluation or a save with
        ``delay=1``, and after an interrupted step. The next step computes with these weights. A step that was interrupted after gradients
        had left is abandoned, and so is one of streaming mode that a :class:`MissingGradientError` refused. Another batch can make it.

        Returns:
            The version of the weights.
        """
        if self._now.state is State.GIVEN_UP:
            self._start_over()
        connection = self._connection
        if connection is None:
            self._now.end()  # the next step repeats an opening that was interrupted
            return 0
        self._opened()
        connection.drain()
        connection.read()
        self._report(connection)
        step = self._now
        if step.state is State.PUSHED and step.made != connection.made:
            step.end()
        elif (step.state is State.PUSHED or step.state is State.COLLECTING and step.running) and self._can_start_over():
            super().zero_grad()  # gradients that were made and have not left
            self._start_over()
        elif step.state is State.PUSHED:
            step.state = State.BROKEN
        return self._version


#: Flags of torch that servers' rules do not have, each with its remedy. torch's defaults None and False pass.
_FLAGS = {
    "amsgrad": "servers keep no largest second moment: leave it out",
    "maximize": "servers minimise: negate the loss",
    "capturable": "a step that waits for servers cannot be captured in a graph: leave it out",
    "differentiable": "backward does not reach servers: leave it out",
    "decoupled_weight_decay": "servers add it to the gradient: leave it out, or use longshore.AdamW",
    "initial_accumulator_value": "servers start from 0: leave it out",
}
#: Hyperparameters that must be at least 0, each with its name in torch's errors.
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
    if not hasattr(value, "__float__"):  # `isinstance` with a runtime protocol takes 30 us
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
        # Hyperparameters may be tensors of one element, as in torch.
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
    _moments = ("exp_avg", "exp_avg_sq")

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
    _moments = ("exp_avg", "exp_avg_sq")

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
    _moments = ("exp_avg", "exp_avg_sq")
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
    _moments = ("momentum_buffer",)

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
    _moments = ("sum",)

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
    _moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        **options: Unpack[JobOptions],
    ) -> None:
        super().__init__(params, _settings(locals()), dict(options))


#: The class of each rule of the servers, by the rule's name.
RULES: dict[str, type[Optimizer]] = {kind.rule: kind for kind in _Rule.__subclasses__()}
