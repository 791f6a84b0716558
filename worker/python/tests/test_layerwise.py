"""In streaming mode ``step`` returns before the weights are there, and each use of a parameter gets its newest weights."""

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Recorded, pair, same_bits, train
from torch import Tensor, nn

import longshore
from longshore import errors
from longshore.transfer import tensors as _tensors
from longshore.transfer import weights


@torch.inference_mode()
def inferred(model: nn.Module) -> list[Tensor]:
    return [(parameter + 0).clone() for parameter in model.parameters()]


def on_another_device(model: nn.Module) -> list[Tensor]:
    """Reads the weights while new tensors go to another device by default."""
    with torch.device("meta"):
        return [parameter.detach().clone() for parameter in model.parameters()]


def streaming(model: nn.Module, steps: int = 2, **options: Any) -> longshore.AdamW:
    """Returns an optimizer after some steps. Its model has not been used since the last step."""
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, streaming=True, **options)
    train(model, optimizer, range(steps))
    return optimizer


def twins(name: str = "mlp", steps: int = 2, **arguments: int) -> tuple[nn.Module, nn.Module]:
    """Returns a model after some steps in safe mode, and one before them."""
    safe, ours = pair(name, **arguments)
    train(safe, longshore.AdamW(safe.named_parameters(), lr=1e-2), range(steps))
    return safe, ours


def awaited(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, _tensors._Awaited)]


def test_a_layer_is_read_before_it_runs_and_after_the_layer_before_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair("mlp")
    monkeypatch.setattr(weights, "GROUP_BYTES", 0)
    optimizer = streaming(model)
    connection = optimizer._connection
    assert connection is not None
    seen: list[str] = []

    def note(name: str, *given: Any) -> None:
        if name == "read_weights":
            seen.extend(connection.params[place[0]].name for place in given[0])

    connection.weights._job = Recorded(connection.job, note)
    for name, module in model.layers.named_children():
        module.register_forward_hook(lambda *_, name=name: seen.append(f"ran {name}"))
    assert awaited(model) == [name for name, _ in model.named_parameters()]
    loss = model.loss(2)
    assert seen == [
        *("layers.0.weight", "layers.0.bias", "ran 0", "ran 1", "layers.2.weight", "layers.2.bias", "ran 2"),
        *("layers.3.weight", "layers.3.bias", "ran 3", "ran 4", "layers.5.weight", "layers.5.bias", "ran 5"),
    ]
    assert not awaited(model)
    loss.backward()
    optimizer.step()
    assert type(model.layers[0].weight) is _tensors.AwaitedParameter


def saved(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return parameters_of(model, torch.load(file))


def parameters_of(model: nn.Module, state: dict[str, Tensor]) -> list[Tensor]:
    return [state[name] for name, _ in model.named_parameters()]


def of_memory(model: nn.Module) -> list[Tensor]:
    """Reads the weights by their addresses, as a C extension does."""
    found = []
    for parameter in model.parameters():
        memory = (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())
        found.append(torch.frombuffer(memory, dtype=torch.float32).clone().view(parameter.shape))
    return found


def of_a_vector(model: nn.Module) -> list[Tensor]:
    parts = nn.utils.parameters_to_vector(model.parameters()).split([parameter.numel() for parameter in model.parameters()])
    return [part.view(parameter.shape) for part, parameter in zip(parts, model.parameters(), strict=True)]


USES: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "state_dict": lambda model: parameters_of(model, model.state_dict()),
    "state_dict, kept": lambda model: [value + 0 for value in parameters_of(model, model.state_dict(keep_vars=True))],
    "torch.save": saved,
    "data": lambda model: [parameter.data.clone() for parameter in model.parameters()],
    "numpy": lambda model: [torch.from_numpy(parameter.detach().numpy().copy()) for parameter in model.parameters()],
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "pickle": lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
    "to": lambda model: [parameter.to(torch.float64).float() for parameter in model.parameters()],
    "a list": lambda model: list(torch._foreach_mul(list(model.parameters()), 1.0)),
    "a flat vector": of_a_vector,
    "an average": lambda model: list(torch.optim.swa_utils.AveragedModel(model).module.parameters()),
    "an address": of_memory,
    "inference": inferred,
    "another default device": on_another_device,
}


#: Uses that need contiguous elements. A weight of the conv net has another order, so such uses are left out there.
END_TO_END = {"a flat vector", "an address"}


@pytest.mark.parametrize(("name", "use"), [*(("mlp", use) for use in USES), *(("conv", use) for use in USES if use not in END_TO_END)])
def test_what_reads_weights_outside_of_a_forward_gets_the_newest(name: str, use: str) -> None:
    safe, ours = twins(name)
    streamed = streaming(ours)
    assert awaited(ours)
    found = USES[use](ours)
    assert streamed.version == 2
    assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(found, safe.parameters(), strict=True))


def test_parameters_are_looked_at_without_waiting() -> None:
    model, _ = pair("mlp")
    optimizer = streaming(model)
    before = awaited(model)
    assert before
    for parameter in model.parameters():
        assert parameter.shape == parameter.size() and parameter.numel() and parameter.dtype is torch.float32
        assert parameter.device.type == "cpu" and parameter.requires_grad and parameter.is_leaf and parameter.grad is None
        assert isinstance(parameter, nn.Parameter) and hash(parameter) == id(parameter)
    model.zero_grad()
    assert sum(parameter.numel() for parameter in model.parameters())
    optimizer.zero_grad()
    assert awaited(model) == before


class Attention(nn.Module):
    """The output layer never runs: torch reads its weight directly. Another weight is used twice, first by its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)

    def loss(self, step: int) -> Tensor:
        values = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
        mixed = nn.functional.linear(values, self.embed.weight.t())
        hidden, _ = self.attention(mixed, mixed, mixed)
        return (self.recurrent(self.embed(hidden))[0] - values).square().mean()


def test_weights_that_another_module_uses() -> None:
    torch.manual_seed(0)
    safe = Attention()
    streamed = copy.deepcopy(safe)
    for model, options in ((safe, {}), (streamed, {"streaming": True})):
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2, **options)
        for step in range(10):
            if step % 2:
                named = dict(model.named_parameters())
                torch.func.functional_call(model.embed, {"weight": named["embed.weight"]}, torch.ones(8)).detach()
            train(model, optimizer, range(step, step + 1))
    assert same_bits(safe, streamed)


class PastTorch(torch.autograd.Function):
    """Reads a weight past torch, through memory obtained earlier, as an extension may."""

    @staticmethod
    def forward(ctx: Any, memory: list[Tensor], weight: Tensor) -> Tensor:
        ctx.memory = memory
        return memory[0].sum().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.expand_as(ctx.memory[0]).clone()


def test_a_gradient_of_older_weights_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4))
    memory = [weight.data]
    optimizer = longshore.SGD([("weight", weight)], lr=1.0, streaming=True)
    PastTorch.apply(memory, weight).backward()
    optimizer.step()
    with pytest.raises(errors.UsageError, match=r"weight\.grad is computed with the weights of the step before.*layerwise=False"):
        PastTorch.apply(memory, weight).backward()
    weight.grad = None
    whole = nn.Parameter(torch.ones(4))
    memory = [whole.data]
    optimizer = longshore.SGD([("weight", whole)], lr=1.0, streaming=True, layerwise=False)
    for _ in range(3):
        PastTorch.apply(memory, whole).backward()
        optimizer.step()
    assert memory[0].tolist() == [-2.0] * 4


@pytest.mark.parametrize("end", ["close", "del", "flush"])
def test_a_model_that_outlives_its_optimizer_has_the_newest_weights(end: str) -> None:
    safe, ours = twins()
    optimizer = streaming(ours)
    if end == "close":
        optimizer.close()
    elif end == "flush":
        assert optimizer.flush() == 2
    del optimizer
    assert not awaited(ours)
    assert same_bits(safe, ours)


def test_compiled_code_gets_the_newest_weights() -> None:
    safe, ours = twins(steps=6)
    optimizer = streaming(ours, steps=2)
    assert awaited(ours)
    ours.layers.compile(backend="eager")
    train(ours, optimizer, range(2, 6))
    assert not awaited(ours), "compiled code reads parameters past torch's functions"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert same_bits(safe, ours)


def test_a_read_that_ctrl_c_ends_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C some parameters of a group have their weights, and the others are still awaited."""
    models = []
    for is_interrupted in (False, True):
        model, _ = pair("mlp")
        optimizer = streaming(model)
        if is_interrupted:
            end = _tensors.end

            def interrupted(tensors: Any) -> None:
                end(tensors[:2])
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(_tensors, "end", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    model.loss(2)
            assert len(awaited(model)) == len(list(model.parameters())) - 2
        train(model, optimizer, range(2, 4))
        assert optimizer.flush() == 4
        models.append(model)
    assert same_bits(*models)
