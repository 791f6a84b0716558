"""Streaming equals safe mode bit for bit, and a delayed run equals a plain delayed loop bit for bit. Small gradients leave together."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import MODELS, Recorded, pair, same_bits, train
from torch import nn

import longshore
from longshore import errors
from longshore.optimizer.step import ENOUGH

STEPS = 30


def run(model: nn.Module, micro_steps: int = 1, **options: Any) -> longshore.AdamW:
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for step in range(STEPS):
        for micro_step in range(micro_steps):
            (model.loss(step * micro_steps + micro_step) / micro_steps).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return optimizer


@pytest.mark.parametrize("name", MODELS)
def test_streaming_equals_safe(name: str) -> None:
    safe, streamed = pair(name)
    run(safe, max_grad_norm=0.5)
    optimizer = run(streamed, max_grad_norm=0.5, streaming=True)
    assert same_bits(safe, streamed)
    assert all(parameter.grad is None for parameter in streamed.parameters())
    assert optimizer.version == STEPS


@pytest.mark.parametrize("options", [{}, {"delay": 1, "warmup_steps": 3}], ids=["exact", "delayed"])
def test_a_closure_in_streaming_mode_is_that_of_safe_mode(options: dict[str, Any]) -> None:
    """With Lightning the step calls the closure, which computes the loss, zeroes the last step's gradients, and calls backward."""
    safe, streamed = pair("mlp")
    losses: list[list[float]] = [[], []]
    for model, streaming, found in zip((safe, streamed), (False, True), losses, strict=True):
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=0.5, streaming=streaming, **options)
        for step in range(STEPS):

            def closure(step: int = step, model: nn.Module = model, optimizer: longshore.AdamW = optimizer) -> torch.Tensor:
                loss = model.loss(step)
                optimizer.zero_grad()
                loss.backward()
                return loss

            found.append(optimizer.step(closure).item())
        assert optimizer.flush() == STEPS
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert same_bits(safe, streamed)


@pytest.mark.parametrize("accumulate_on", ["servers", "worker"])
def test_streaming_adds_up_backward_passes_as_torch_does(accumulate_on: str) -> None:
    safe, streamed = pair("mlp")
    run(safe, micro_steps=4)
    run(streamed, micro_steps=4, streaming=True, accumulate=4, accumulate_on=accumulate_on)
    # Torch adds to the existing gradient, and a worker divides by 4 at the end. All of them sum the same four numbers
    # in one order.
    if accumulate_on == "servers":
        assert same_bits(safe, streamed)
    for ours, theirs in zip(streamed.parameters(), safe.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_what_is_unfrozen_before_the_first_step_trains() -> None:
    """The parameter could not be watched when the optimizer was built."""
    safe, streamed = pair("mlp")
    for model, streaming in ((safe, False), (streamed, True)):
        model.layers[3].requires_grad_(False)
        model.layers[5].weight.requires_grad_(False)
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=streaming)
        model.requires_grad_(True)
        train(model, optimizer, range(3))
    assert same_bits(safe, streamed)


def test_gradients_that_somebody_puts_there_leave_in_the_step() -> None:
    """The caller sets all gradients, or some of them while backward makes the others."""
    safe, streamed = pair("mlp")
    for model, streaming in ((safe, False), (streamed, True)):
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=streaming)
        for step in range(4):
            first, *others = model.parameters()
            made = torch.autograd.grad(model.loss(step), [first, *others] if step % 2 else [first])
            if step % 2 == 0:
                model.loss(step).backward(inputs=others)
            for parameter, gradient in zip([first, *others], made, strict=False):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.version == 4
    assert same_bits(safe, streamed)


@pytest.mark.parametrize("others_have_gradients", [False, True])
def test_a_gradient_beside_one_that_has_left_is_of_another_pass(others_have_gradients: bool) -> None:
    (once, _), (twice, _), (expected, _) = models = [[nn.Parameter(torch.ones(4)) for _ in range(2)] for _ in range(3)]
    ours = [longshore.SGD(weights, lr=1.0, streaming=True, accumulate=passes) for passes, weights in enumerate(models[:2], 1)]
    for weights in models:
        sum(weight.sum() for weight in weights[: 1 + others_have_gradients]).backward()
    for weight in (once, twice):
        weight.grad = torch.full((4,), 2.0)
    with pytest.raises(errors.GradientError, match=r"param0\.grad is of backward pass 2 of this step"):
        ours[0].step()
    ours[0].zero_grad()
    assert once.grad is None and once.equal(torch.ones(4))
    expected.grad += 2.0
    torch.optim.SGD(models[2], lr=1.0).step()
    ours[1].step()
    assert all(map(torch.equal, models[1], models[2]))


def test_a_grad_scaler_and_streaming_are_refused() -> None:
    model, _ = pair("mlp")
    optimizer = longshore.AdamW(model.named_parameters(), streaming=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.loss(0)).backward()
    with pytest.raises(errors.UsageError, match="bf16, or streaming=False"):
        scaler.step(optimizer)


class Delayed:
    """docs/protocol.md in NumPy: AdamW in single fp32 operations, and images that look ahead for delayed steps."""

    def __init__(self, values: np.ndarray, decay: float = 1e-2, eps: float = 1e-8) -> None:
        self.master, self.mean, self.square = values.copy(), np.zeros_like(values), np.zeros_like(values)
        self.decay, self.eps, self.beta1, self.beta2 = decay, eps, 0.9, 0.999

    def step(self, gradient: np.ndarray, number: int, lr: float, ahead: bool) -> np.ndarray:
        """Makes a step. Returns its version's image."""
        single = np.float32
        root = 1 - power(self.beta2, number)
        bias = 1 - power(self.beta1, number)
        self.master = self.master * single(1 - lr * self.decay)
        self.mean = self.mean + (gradient - self.mean) * single(1 - self.beta1)
        self.square = self.square * single(self.beta2) + (single(1 - self.beta2) * gradient) * gradient
        denominator = np.sqrt(self.square) * single(1 / np.sqrt(root)) + single(self.eps)
        self.master = self.master - single(lr / bias) * (self.mean / denominator)
        if not ahead:
            return self.master.copy()
        known = single(lr * self.beta1 / bias) * self.mean + single(lr * 2 * (1 - self.beta1)) * gradient
        return self.master - (known / denominator + single(lr * self.beta1 * self.decay) * self.master)


def power(base: float, exponent: int) -> float:
    """Returns a power by repeated squaring, from the lowest bit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def delayed_loop(model: nn.Module, warmup: int, drained: set[int], rate: Callable[[int], float]) -> None:
    """After warm-up, each step computes with the weights of the step before last."""

    def reads(step: int) -> int:
        return step - 1 if step <= warmup or step - 1 in drained else max(step - 2, 0)

    def write(images: list[np.ndarray]) -> None:
        with torch.no_grad():
            for parameter, image in zip(model.parameters(), images, strict=True):
                parameter.copy_(torch.from_numpy(image))

    rules = [Delayed(parameter.detach().numpy()) for parameter in model.parameters()]
    images = {0: [rule.master.copy() for rule in rules]}
    for step in range(1, STEPS + 1):
        # flush() writes the master weights into the model, and the next step computes with them.
        write([rule.master for rule in rules] if step - 1 in drained else images[reads(step)])
        model.zero_grad()
        model.loss(step).backward()
        # A later flush() is not known yet at this decision, so the image looks ahead all the same.
        ahead = step + 1 > warmup
        gradients = [parameter.grad.numpy() for parameter in model.parameters()]
        images[step] = [
            rule.step(gradient, step, rate(step), ahead) for rule, gradient in zip(rules, gradients, strict=True)
        ]
    write(images[reads(STEPS + 1)])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("drained", [set(), {13, 20}])
def test_delay_equals_a_plain_delayed_loop(name: str, streaming: bool, drained: set[int]) -> None:
    def rate(step: int) -> float:
        return 1e-2 * 0.95 ** (step - 1)

    ours, plain = pair(name)
    optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-2, delay=1, warmup_steps=5, streaming=streaming)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        ours.loss(step).backward()
        optimizer.step()
        if step in drained:
            assert optimizer.flush() == step
    delayed_loop(plain, 5, drained, rate)
    assert same_bits(ours, plain)
    assert optimizer.version == STEPS - 1
    assert optimizer.flush() == STEPS


def test_a_delayed_run_goes_on_where_it_was_flushed(servers: str) -> None:
    """The step after a flush computes with the newest weights, also in another process."""
    options = {"lr": 1e-2, "delay": 1, "warmup_steps": 2}
    ours, undisturbed = pair("mlp")
    alone = longshore.AdamW(undisturbed.named_parameters(), **options)
    train(undisturbed, alone, range(6))
    assert alone.flush() == 6
    train(undisturbed, alone, range(6, 12))
    first = longshore.AdamW(ours.named_parameters(), servers=servers, job="flushed", **options)
    train(ours, first, range(6))
    assert first.flush() == 6
    saved = first.state_dict()
    first.close()
    second = longshore.AdamW(ours.named_parameters(), servers=servers, job="flushed", **options)
    second.load_state_dict(saved)
    assert second.version == 6
    train(ours, second, range(6, 12))
    assert same_bits(ours, undisturbed)


def test_reading_the_loss_scale_changes_nothing() -> None:
    """A step that had begun would keep flush() from the newest weights of a delayed job."""
    models = pair("mlp")
    for model, reads in zip(models, (False, True), strict=True):
        scale = longshore.LossScale(initial=8.0, dynamic=False)
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, delay=1, warmup_steps=1, loss_scale=scale)
        if reads:
            assert optimizer.loss_scale == 8.0 and optimizer._connection is None
        for number in range(4):
            optimizer.zero_grad()
            (model.loss(number) * 8.0).backward()
            optimizer.step()
            if reads:
                assert optimizer.loss_scale == 8.0
        assert optimizer.flush() == 4
    assert same_bits(*models)


class Listening:
    """Records an optimizer's pushes, and lets them fail on request."""

    def __init__(self, optimizer: longshore.AdamW) -> None:
        optimizer.open()
        assert optimizer._connection is not None
        optimizer._connection.job = Recorded(optimizer._connection.job, self._note)  # type: ignore[assignment]
        self.calls: list[Any] = []
        self.fails = False

    def _note(self, name: str, *given: Any) -> None:
        if name == "push":
            self.calls.append([index for index, *_ in given[0]])
            if self.fails:
                raise KeyboardInterrupt
        elif name == "end_micro_step":
            self.calls.append("end")


def vectors(*lengths: int) -> list[tuple[str, nn.Parameter]]:
    """Returns parameters of these lengths. Their gradients come in reverse order."""
    return [(f"p{place}", nn.Parameter(torch.linspace(-1, 1, length))) for place, length in enumerate(lengths)]


def backward(params: list[tuple[str, nn.Parameter]]) -> None:
    loss = torch.zeros(())
    for _, param in params:
        loss = (loss + param.square().sum()).tanh()
    loss.backward()


def test_small_gradients_leave_in_one_push_in_their_order() -> None:
    params = vectors(8, 8, ENOUGH, 8, ENOUGH // 2, ENOUGH // 2)
    optimizer = longshore.AdamW(params, streaming=True, accumulate=2)
    job = Listening(optimizer)
    for _ in range(2):
        backward(params)
        assert all(param.grad is None for _, param in params)
    assert job.calls == [[5, 4], [3, 2], [1, 0], "end"] * 2


def test_those_of_a_pass_that_leaves_parameters_out_leave_at_its_end() -> None:
    params = vectors(8, 8, 8)
    optimizer = longshore.AdamW(params, streaming=True, missing_gradients="zeros")
    job = Listening(optimizer)
    backward(params[1:])
    assert job.calls == [[2, 1]]
    optimizer.step()
    assert job.calls == [[2, 1], "end"]
    with pytest.raises(errors.GradientError, match="backward pass 2"):
        backward(params)
        backward(params)


def test_a_push_that_failed_is_made_again() -> None:
    found = []
    for fails in (False, True):
        params = vectors(8, 8)
        optimizer = longshore.AdamW(params, streaming=True)
        job = Listening(optimizer)
        if fails:
            job.fails = True
            with pytest.raises(KeyboardInterrupt):
                backward(params)
            job.fails = False
        else:
            backward(params)
        optimizer.step()
        assert optimizer.flush() == 1
        found.append([param.detach().clone() for _, param in params])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
