"""Small models and their batches, made from a seed, and the update rules with torch's optimizers."""

import functools
from collections.abc import Callable
from typing import Any

import molecules
import torch
from torch import Tensor, nn
from torch.nn import functional

import longshore


class Mlp(nn.Module):
    """Three layers on random vectors."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        first, second, last = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.layers = nn.Sequential(first, nn.GELU(), nn.LayerNorm(width), second, nn.GELU(), last)

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 16, generator=generator)
        return functional.cross_entropy(self.layers(inputs).float(), inputs[:, :4].argmax(1))


class Conv(nn.Module):
    """Two convolutions with batch norm, one of them in channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before a batch norm has only rounding errors as its gradient, which Adam would scale up.
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(8, 5)

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 3, 8, 8, generator=generator)
        hidden = functional.gelu(self.norm(self.first(inputs)))
        hidden = functional.gelu(self.second(hidden)).mean((2, 3))
        return functional.cross_entropy(self.head(hidden), inputs[:, :, 0, 0].argmax(1))


class Block(nn.Module):
    """A layer of a Llama: RMS norm, rotary attention, gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(turn(query, turns), turn(key, turns), value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        inner = self.mlp_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(inner)) * self.up(inner))


def turn(values: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: rotates pairs of elements by angles that grow with the position."""
    even, odd = values[..., 0::2], values[..., 1::2]
    cos, sin = turns.cos().to(values.dtype), turns.sin().to(values.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Transformer(nn.Module):
    """Many equal blocks of a Llama, with separate embeddings."""

    def __init__(self, depth: int = 8, width: int = 32, words: int = 32, tied: bool = False, casts: bool = True) -> None:
        super().__init__()
        self.words = words
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if casts:
            self.bfloat16()
        self.turns = torch.outer(torch.arange(8), 1.0 / 100 ** (torch.arange(0, width // 4, 2) / (width // 4)))
        #: The function that runs a block. Activation checkpointing replaces it.
        self.call: Any = lambda block, *args: block(*args)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = self.call(block, hidden, self.turns[: tokens.shape[1]])
        return self.head(self.norm(hidden))

    def loss(self, step: int) -> Tensor:
        start = torch.randint(self.words, (2, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start + 3 * torch.arange(9)) % self.words
        return functional.cross_entropy(self(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


class Graph(molecules.SchNet):
    """A graph network whose loss contains forces, so that backward goes through a derivative."""

    def __init__(self) -> None:
        super().__init__(width=16)

    def loss(self, step: int) -> Tensor:
        return super().loss(molecules.molecules(step, count=4))


#: The Llama has tied embeddings.
MODELS: dict[str, Callable[..., nn.Module]] = {
    **{"mlp": Mlp, "conv": Conv, "graph": Graph},
    "llama": functools.partial(Transformer, depth=2, words=64, tied=True, casts=False),
}


_ARGUMENTS = {
    "adamw": {"weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-3},
    "adagrad": {"lr": 1e-2, "lr_decay": 1e-3, "weight_decay": 1e-3},
}
#: For each rule that torch has, the package's optimizer, torch's optimizer, and the arguments of both.
RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    rule: (kind, getattr(torch.optim, kind.__name__), {"lr": 1e-3, "weight_decay": 0.01, **_ARGUMENTS.get(rule, {})})
    for rule, kind in longshore.optim.RULES.items()
    if rule != "lion"
}


def pair(kind: str | Callable[..., Any], **arguments: Any) -> tuple[Any, Any]:
    """Returns two models of equal weights, of a kind in :data:`MODELS` or of another one."""
    kind = MODELS[kind] if isinstance(kind, str) else kind
    torch.manual_seed(0)
    first, second = kind(**arguments), kind(**arguments)
    second.load_state_dict(first.state_dict())
    return first, second


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, passes: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for number in range(passes):
            (model.loss(step * passes + number) / passes).backward()
        optimizer.step()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    train(model, optimizer, range(number, number + 1))


def engine_of(model: nn.Module, **keys: Any) -> longshore.Engine:
    """Returns an engine with AdamW and without clipping. ``keys`` are more of DeepSpeed's configuration."""
    config = {"gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **keys}
    made: longshore.Engine = longshore.initialize(model=model, config=config)[0]
    return made


def train_engine(engine: longshore.Engine, passes: range) -> list[float]:
    """Makes these backward passes, and returns their losses."""
    losses = []
    for number in passes:
        loss = engine.module.loss(number)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Recorded:
    """A job that passes each call's name and arguments to ``note`` before it makes the call."""

    def __init__(self, job: Any, note: Callable[..., object]) -> None:
        self._job, self._note = job, note

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._job, name)
        return functools.partial(self._call, name, value) if callable(value) else value

    def _call(self, name: str, method: Callable[..., Any], *given: Any, **more: Any) -> Any:
        self._note(name, *given)
        return method(*given, **more)


def distance(first: nn.Module, second: nn.Module) -> float:
    """Returns the largest relative distance of two models' weights, over the parameters."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    apart = [((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp_min(1e-12)).item() for a, b in pairs]
    return max(apart)


def same_bits(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
