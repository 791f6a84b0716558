"""A delayed run whose worker makes the step that its weights lack equals a plain loop that does so, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from models import pair, same_bits
from test_streaming_and_delay import Delayed, power
from torch import nn

import longshore
from longshore import errors

STEPS = 30
WARMUP = 5


class Local(Delayed):
    """docs/protocol.md in NumPy: images that lack the newest gradient alone, and the rates that it is subtracted with."""

    def look(self, number: int, lr: float) -> tuple[np.ndarray, np.ndarray]:
        """The image after a step, and the rate of each element."""
        single = np.float32
        bias = 1 - power(self.beta1, number + 1)
        root = 1 - power(self.beta2, number)
        denominator = np.sqrt(self.square) * single(1 / np.sqrt(root)) + single(self.eps)
        known = single(lr * self.beta1 / bias) * self.mean / denominator + single(lr * self.decay) * self.master
        padded = np.full(-(-denominator.size // 64) * 64, single(self.eps), single)
        padded[: denominator.size] = denominator.ravel()
        squares = (padded * padded).reshape(-1, 4, 16)
        sums = np.zeros((len(squares), 16), single)
        for part in range(4):
            sums = sums + squares[:, part]
        for apart in (8, 4, 2, 1):
            sums = sums[:, :apart] + sums[:, apart : 2 * apart]
        rates = single(lr * (1 - self.beta1) / bias) / np.sqrt(sums[:, 0] * single(1 / 64))
        return self.master - known, np.repeat(rates, 64)[: denominator.size].reshape(denominator.shape)


def plain_loop(model: nn.Module, drained: set[int], lr: float, gamma: float) -> None:
    def reads(step: int) -> int:
        return step - 1 if step <= WARMUP or step - 1 in drained else max(step - 2, 0)

    def weights(step: int) -> list[np.ndarray]:
        if step - 1 in drained:
            return [rule.master for rule in rules]
        version = reads(step)
        if version == step - 1 or rates.get(version) is None:
            return images[version]
        missing = [gradient * np.float32(gamma) for gradient in gradients[step - 1]]
        limit = np.float32(gamma * lr * (1 - rules[0].beta1) / np.sqrt(1 - rules[0].beta2))
        pairs = zip(images[version], rates[version], missing, strict=True)
        return [image - np.clip(rate * gradient, -limit, limit) for image, rate, gradient in pairs]

    def write(values: list[np.ndarray]) -> None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(torch.from_numpy(value))

    rules = [Local(parameter.detach().numpy()) for parameter in model.parameters()]
    images = {0: [rule.master.copy() for rule in rules]}
    rates: dict[int, Any] = {}
    gradients: dict[int, list[np.ndarray]] = {}
    for step in range(1, STEPS + 1):
        write(weights(step))
        model.zero_grad()
        model.loss(step).backward()
        gradients[step] = [parameter.grad.numpy().copy() for parameter in model.parameters()]
        for rule, gradient in zip(rules, gradients[step], strict=True):
            rule.step(gradient, step, lr, ahead=False)
        if step + 1 > WARMUP:
            looks = [rule.look(step, lr) for rule in rules]
            images[step], rates[step] = [image for image, _ in looks], [rate for _, rate in looks]
        else:
            images[step] = [rule.master.copy() for rule in rules]
    write(weights(STEPS + 1))


@pytest.mark.parametrize("correction", ["worker-local", "worker-local=1.5"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("drained", [set(), {13, 20}])
def test_worker_local_equals_a_plain_loop(streaming: bool, drained: set[int], correction: str) -> None:
    ours, plain = pair("mlp")
    optimizer = longshore.AdamW(
        ours.named_parameters(), lr=1e-2, delay=1, warmup_steps=WARMUP, streaming=streaming, correction=correction
    )
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        ours.loss(step).backward()
        optimizer.step()
        if step in drained:
            assert optimizer.flush() == step
    plain_loop(plain, drained, 1e-2, 1.5 if "=" in correction else 1.0)
    assert same_bits(ours, plain)
    assert optimizer.version == STEPS - 1
    assert optimizer.flush() == STEPS


def test_a_row_that_is_rarely_used_moves_by_steps_of_adam() -> None:
    """As of a rare token: its second moments have decayed when its next gradient comes, of which the rates know nothing."""
    model = torch.nn.Embedding(8, 64)
    optimizer = longshore.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95), delay=1, warmup_steps=2, correction="worker-local"
    )
    before = model.weight.detach().clone()
    for step in range(1, 301):
        rows = torch.tensor([0, 7] if step in (1, 298) else [0])
        optimizer.zero_grad()
        (model(rows) ** 2).sum().backward()
        optimizer.step()
        moved = (model.weight - before).abs().max().item()
        assert moved <= 5e-2, f"step {step} moved a weight by {moved}"
        before = model.weight.detach().clone()
    assert (before[7] != 0).any()


def test_an_evaluation_before_a_flush_changes_nothing() -> None:
    ours, undisturbed = pair("mlp")
    for model, looks in ((ours, True), (undisturbed, False)):
        optimizer = longshore.AdamW(
            model.named_parameters(), lr=1e-2, delay=1, warmup_steps=2, streaming=True, correction="worker-local"
        )
        for step in range(12):
            model.loss(step).backward()
            optimizer.step()
            if looks:
                with torch.no_grad():
                    model.loss(100 + step)
            if step == 7:
                assert optimizer.flush() == 8
    assert same_bits(ours, undisturbed)


def test_what_is_written_again_is_not_compared() -> None:
    """Weights that were amended are no version's of the servers, also where the host has the sum of several passes."""
    ours, undisturbed = pair("mlp")
    options: dict[str, Any] = {"delay": 1, "warmup_steps": 1, "correction": "worker-local", "accumulate": 2, "accumulate_on": "worker"}
    for model, writes in ((ours, True), (undisturbed, False)):
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, **options)
        for step in range(6):
            if writes:
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
            for micro_step in range(2):
                model.loss(2 * step + micro_step).backward()
            optimizer.step()
    assert same_bits(ours, undisturbed)


def test_it_goes_on_in_another_process(servers: str) -> None:
    ours, undisturbed = pair("mlp")
    options: dict[str, Any] = {"delay": 1, "warmup_steps": 2, "streaming": True, "correction": "worker-local"}
    optimizer = longshore.AdamW(undisturbed.named_parameters(), lr=1e-2, **options)
    for step in range(12):
        undisturbed.loss(step).backward()
        optimizer.step()
    again = longshore.AdamW(ours.named_parameters(), lr=1e-2, servers=servers, job="again", **options)
    for step in range(6):
        ours.loss(step).backward()
        again.step()
    again.close()
    again = longshore.AdamW(ours.named_parameters(), lr=1e-2, servers=servers, job="again", **options)
    for step in range(6, 12):
        ours.loss(step).backward()
        again.step()
    assert same_bits(ours, undisturbed)


@pytest.mark.filterwarnings("ignore:step")
def test_a_step_that_is_skipped_after_a_flush_leaves_the_image(servers: str) -> None:
    """The next step computes with the image of the version that was flushed to, as a process that joins does."""
    ours, undisturbed = pair("mlp")
    options: dict[str, Any] = {"delay": 1, "warmup_steps": 2, "servers": servers, "correction": "worker-local"}
    for model, ends in ((undisturbed, [12]), (ours, [7, 12])):
        made = 0
        for end in ends:
            optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, job=f"flushed-{len(ends)}", **options)
            for step in range(made, end):
                (model.loss(step) * (float("inf") if step == 6 else 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 5:
                    assert optimizer.flush() == 6
            made = end
            optimizer.close()
    assert same_bits(ours, undisturbed)


def test_what_it_does_not_go_with_is_refused_before_a_job_is_opened() -> None:
    for options, field in (
        ({"delay": 1, "accumulate": 2, "streaming": True}, "micro_steps"),
        ({"delay": 1, "state": "bf16"}, "state"),
    ):
        model, _ = pair("mlp")
        optimizer = longshore.AdamW(model.named_parameters(), correction="worker-local", **options)
        with pytest.raises(errors.InvalidError, match=field):
            model.loss(0).backward()
            optimizer.step()
