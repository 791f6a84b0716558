"""Whole steps of Longshore and of other optimizers on equal bytes: the ways that ``peers.py`` times by turns."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longshore import AdamW, shard

#: Longshore's ways, with their transport to the server.
OURS: dict[str, dict[str, Any]] = {
    "longshore, in this process": {},
    "longshore, shared memory": {"transport": "memfd"},
    "longshore, TCP": {"transport": "tcp"},
}
#: The way that others are compared with.
BASE = "longshore, shared memory"
_START_DEADLINE_S = 60
LR, CLIP = 1e-4, 1.0
_HOST = torch.device("cpu")


class WithCasts:
    """An optimizer of fp32 masters, with the casts that 16-bit weights and gradients need.

    Args:
        device: device of the masters. Between masters on the host and parameters on an accelerator, 16-bit values pass through page-locked
            memory.
    """

    def __init__(
        self, params: list[tuple[str, nn.Parameter]], make: Callable[[list[Tensor]], Any], device: torch.device = _HOST
    ) -> None:
        self._params = [parameter for _, parameter in params]
        self._masters = [parameter.detach().to(device, torch.float32, copy=True) for parameter in self._params]
        self._gradients = [torch.empty_like(master) for master in self._masters]
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        self._staged = [
            torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
            for parameter in self._params
            if parameter.device.type != device.type
        ]
        self._optimizer = make(self._masters)

    @torch.no_grad()
    def step(self) -> None:
        gradients = [parameter.grad for parameter in self._params if parameter.grad is not None]
        if self._staged:
            torch._foreach_copy_(self._staged, gradients, non_blocking=True)
            torch.accelerator.synchronize()
        torch._foreach_copy_(self._gradients, self._staged or gradients)
        nn.utils.clip_grad_norm_(self._masters, CLIP, foreach=True)
        self._optimizer.step()
        if self._staged:
            torch._foreach_copy_(self._staged, self._masters)
        torch._foreach_copy_(self._params, self._staged or self._masters, non_blocking=True)


def torch_default(masters: list[Tensor]) -> Any:
    """Returns torch's optimizer with its default choice of an implementation."""
    return torch.optim.AdamW(masters, lr=LR)


def torch_fused(masters: list[Tensor]) -> Any:
    return torch.optim.AdamW(masters, lr=LR, fused=True)


def deepspeed_adam(masters: list[Tensor]) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(masters, lr=LR, weight_decay=1e-2, adamw_mode=True)


def torchao_offload(model: nn.Module) -> Any:
    """Returns torchao's optimizer. Its weights and state have the model's type, here 16 bits, and it cannot clip."""
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, lr=LR)


def pinned(device: torch.device) -> dict[str, Any]:
    """Returns DeepSpeed's setting of an offload to the host, page-locked if a device copies from there."""
    return {"device": "cpu", "pin_memory": device.type != "cpu"}


def engine_of(model: nn.Module, batch: int, zero: dict[str, Any]) -> Any:
    """Returns DeepSpeed's own engine on its accelerator, or on the CPU without one."""
    import deepspeed

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 1e-2}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def by_engine(engine: Any) -> Callable[[Tensor], None]:
    def finish(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return finish


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, start: Tensor, gradients: list[Tensor], *params: Tensor) -> Tensor:
        context.gradients = gradients
        return start.clone()

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *context.gradients


class _Given(nn.Module):
    """Parameters with existing gradients: backward computes nothing, and hands them over."""

    def __init__(self, params: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self.params = nn.ParameterList([parameter for _, parameter in params])
        self._gradients = [parameter.grad for parameter in self.params]
        for parameter in self.params:
            parameter.grad = None

    def forward(self, start: Tensor) -> Tensor:
        loss: Tensor = _HandOver.apply(start, self._gradients, *self.params)  # type: ignore[no-untyped-call]
        return loss


class GivenToEngine:
    """DeepSpeed's engine from gradients to weights: its hooks take gradients in backward."""

    def __init__(self, params: list[tuple[str, nn.Parameter]], device: torch.device) -> None:
        zero = {"stage": 2, "offload_optimizer": pinned(device), "overlap_comm": False}
        self._engine = engine_of(_Given(params), 1, zero)
        self._start = torch.zeros((), device=device, requires_grad=True)

    def step(self) -> None:
        self._engine.backward(self._engine(self._start))
        self._engine.step()


@dataclass
class Ways:
    """Steps that can be timed, and the reasons for the missing ones."""

    steps: dict[str, Callable[[], Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    #: Longshore's optimizers, which must close before their server ends.
    ours: list[AdamW] = field(default_factory=list)

    def keep(self, optimizer: AdamW) -> AdamW:
        self.ours.append(optimizer)
        return optimizer

    def close(self) -> None:
        for optimizer in self.ours:
            optimizer.close()

    def loss(self, name: str) -> float | None:
        """Returns a training way's newest loss: equally trained ways have about the same."""
        return getattr(getattr(self.steps[name], "__self__", None), "loss", None)

    def add(self, name: str, wanted: str, make: Callable[[], Callable[[], Any]]) -> None:
        """Adds a way whose name has one of the wanted words. A way that is not installed or does not build is noted as missing."""
        if not any(word in name.lower() for word in wanted.lower().split(",")):
            return
        try:
            self.steps[name] = make()
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as why:
            if "longshore" in name:
                raise
            self.missing[name] = str(why).strip().splitlines()[0][:160] if str(why).strip() else type(why).__name__


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """Starts a server with these flags in a process of its own, and yields its address."""
    code = "import sys; from longshore.__main__ import serve; sys.exit(serve())"
    command = [sys.executable, "-c", code, "--listen", "127.0.0.1:0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    # Killing a server that does not start ends the wait for its first line.
    deadline = threading.Timer(_START_DEADLINE_S, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        deadline.cancel()
        if not line:
            raise OSError(f"the server did not start within {_START_DEADLINE_S} s, or ended at once")
        yield line.split()[-1]
    finally:
        deadline.cancel()
        process.kill()
        process.wait()


def ours(params: list[tuple[str, nn.Parameter]], name: str, job: str, address: str, **options: Any) -> AdamW:
    reach = OURS[name]
    place = {"servers": address, "job": f"{job}-{reach['transport']}-{options.get('delay', 0)}"} if reach else {}
    # All ways share one set of 16-bit weights, and each writes its own into it.
    return AdamW(params, lr=LR, max_grad_norm=CLIP, written_weights="drop", **place, **reach, **options)


# Optimizer steps


def optimizer_steps(elements: int, wanted: str, address: str, device: torch.device = _HOST) -> Ways:
    """Returns whole optimizer steps: 16-bit gradients in, clipping, 16-bit weights out. All read the same gradients and write the same
    memory, so that each way allocates only what it needs."""
    tensors = -(-elements // (4 * 1024 * 1024))
    generator = torch.Generator().manual_seed(0)

    def values(scale: float) -> Tensor:
        return (torch.randn(elements // tensors, generator=generator) * scale).bfloat16().to(device)

    weights = [values(0.02) for _ in range(tensors)]
    gradients = [values(0.01) for _ in range(tensors)]

    def params() -> list[tuple[str, nn.Parameter]]:
        made = [(f"layer{index}", nn.Parameter(weight)) for index, weight in enumerate(weights)]
        for (_, parameter), gradient in zip(made, gradients, strict=True):
            parameter.grad = gradient
        return made

    ways = Ways()
    for name in OURS:
        ways.add(name, wanted, lambda name=name: ways.keep(ours(params(), name, "step", address)).step)
    ways.add("torch AdamW, with casts", wanted, lambda: WithCasts(params(), torch_default).step)
    ways.add("torch fused, with casts", wanted, lambda: WithCasts(params(), torch_fused).step)
    ways.add("DeepSpeed CPUAdam, with casts", wanted, lambda: WithCasts(params(), deepspeed_adam).step)
    ways.add("DeepSpeed engine, ZeRO-2 offload", wanted, lambda: GivenToEngine(params(), device).step)
    return ways


# Training steps


class Gpt(nn.Module):
    """A small GPT that returns the loss of its input tokens."""

    def __init__(self, width: int, depth: int, words: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        layer = {"nhead": width // 64, "dim_feedforward": 4 * width, "dropout": 0.0, "activation": "gelu"}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, batch_first=True, norm_first=True, **layer) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)
        self.register_buffer("future", torch.full((length, length), float("-inf")).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens[:, :-1]) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.future.to(hidden.dtype), is_causal=True)
        logits = self.head(self.norm(hidden)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def model_of(elements: int, length: int, device: torch.device) -> Gpt:
    """Returns a model of about ``elements`` parameters, at least 400 thousand, four fifths of them in six layers."""
    torch.manual_seed(0)
    depth = 6
    width = 64 * max(1, int((0.8 * elements / (12 * depth)) ** 0.5 / 64))
    words = max((elements - 12 * depth * width * width) // width, 256)
    with device:
        return Gpt(width, depth, words, length).bfloat16()


class Training:
    """Forward, backward and step of one way, on the same batches for all ways."""

    def __init__(self, model: Gpt, batch: int, length: int, finish: Callable[[Tensor], None]) -> None:
        self._model = model
        self._finish = finish
        self._device = model.words.weight.device
        self._generator = torch.Generator().manual_seed(0)
        self._shape = (batch, length + 1)
        self._words = model.words.num_embeddings
        self.loss = float("nan")

    def step(self) -> None:
        tokens = torch.randint(self._words, self._shape, generator=self._generator)
        loss = self._model(tokens.to(self._device))
        self._finish(loss)
        self.loss = loss.item()


def training_steps(elements: int, batch: int, length: int, wanted: str, address: str, device: torch.device = _HOST) -> Ways:
    """Returns whole training steps of a small GPT in bf16, with clipping."""
    ways = Ways()

    def made() -> Gpt:
        return model_of(elements, length, device)

    def with_ours(name: str, **options: Any) -> Callable[[], Any]:
        model = made()
        optimizer = ways.keep(ours(list(model.named_parameters()), name, "training", address, streaming=True, **options))

        def finish(loss: Tensor) -> None:
            loss.backward()
            optimizer.step()

        return Training(model, batch, length, finish).step

    def with_others(make: Callable[[Gpt], Any]) -> Callable[[], Any]:
        model = made()
        optimizer = make(model)

        def finish(loss: Tensor) -> None:
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None

        return Training(model, batch, length, finish).step

    def with_casts(make: Callable[[list[Tensor]], Any], where: torch.device = _HOST) -> Callable[[], Any]:
        return with_others(lambda model: WithCasts(list(model.named_parameters()), make, where))

    for name in OURS:
        ways.add(name, wanted, lambda name=name: with_ours(name))
    ways.add("torch fused, with casts", wanted, lambda: with_casts(torch_fused))
    if device.type != "cpu":
        ways.add(f"{BASE}, delay=1", wanted, lambda: with_ours(BASE, delay=1, warmup_steps=0))
        ways.add("forward and backward alone", wanted, lambda: with_others(lambda model: None))
        ways.add("copies out and in alone", wanted, lambda: CopiesAlone(made()).step)
        ways.add("torch fused, nothing offloaded", wanted, lambda: with_casts(torch_fused, device))
        ways.add("torchao CPUOffloadOptimizer", wanted, lambda: with_others(torchao_offload))
    ways.add("DeepSpeed CPUAdam, with casts", wanted, lambda: with_casts(deepspeed_adam))
    ways.add("DeepSpeed engine, ZeRO-2 offload", wanted, lambda: deepspeed_engine(made(), batch, length, device))
    return ways


class CopiesAlone:
    """Copies a model's bytes from its device to page-locked host memory and back, as gradients leave and weights come."""

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())
        self._staged = [torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True) for parameter in self._params]

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(self._staged, self._params, non_blocking=True)
        torch._foreach_copy_(self._params, self._staged, non_blocking=True)
        torch.accelerator.synchronize()


def deepspeed_engine(model: Gpt, batch: int, length: int, device: torch.device) -> Callable[[], Any]:
    """Returns a step of DeepSpeed's own engine with the optimizer offloaded."""
    engine = engine_of(model, batch, {"stage": 2, "offload_optimizer": pinned(device), "overlap_comm": False})
    training = Training(model, batch, length, by_engine(engine))
    training._model = engine
    return training.step


# Training steps at stage 3


class Layers(nn.Sequential):
    """Linear layers of one width, each with its activation. The loss is the distance of the output from the input."""

    def __init__(self, count: int, width: int) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))
        self.bfloat16()

    def forward(self, batch: Tensor) -> Tensor:
        return functional.mse_loss(super().forward(batch), batch)


class Regression:
    """Forward, backward and step of one way over layers, on the same batches for all ways."""

    def __init__(self, model: Any, shape: tuple[int, int], finish: Callable[[Tensor], None], device: torch.device = _HOST) -> None:
        self._model, self._shape, self._finish, self._device = model, shape, finish, device
        self._generator = torch.Generator().manual_seed(0)
        self.loss = float("nan")

    def step(self) -> None:
        loss = self._model(torch.randn(self._shape, generator=self._generator).bfloat16().to(self._device))
        self._finish(loss)
        self.loss = loss.item()


def stage_3_steps(layers: int, width: int, batch: int, wanted: str, address: str, device: torch.device = _HOST) -> Ways:
    """Returns whole training steps of linear layers in bf16, with clipping. The device holds a few layers at a time."""
    ways, shape = Ways(), (batch, width)
    #: Bytes of a layer's weights and gradients. The budget holds four.
    layer = 4 * (width + 1) * width

    def with_ours(name: str, stage: int) -> Callable[[], Any]:
        model = Layers(layers, width)
        model = model if stage == 3 else model.to(device)
        optimizer = ways.keep(ours(list(model.named_parameters()), name, f"stage-{stage}", address, streaming=True))
        if stage == 3:
            shard(model, optimizer, budget=4 * layer, device=device)

        def finish(loss: Tensor) -> None:
            loss.backward()
            optimizer.step()

        return Regression(model, shape, finish, device).step

    def with_deepspeed(zero: dict[str, Any]) -> Callable[[], Any]:
        engine = engine_of(Layers(layers, width), batch, zero)
        return Regression(engine, shape, by_engine(engine), device).step

    # Only shared memory lets stage 3 copy weights straight from the server's memory, so other transports are left out.
    ways.add(BASE, wanted, lambda: with_ours(BASE, 3))
    ways.add("longshore, stage 2", wanted, lambda: with_ours(BASE, 2))
    offload = pinned(device)
    alike = {"offload_optimizer": offload, "overlap_comm": False}
    ways.add("DeepSpeed engine, ZeRO-2 offload", wanted, lambda: with_deepspeed({"stage": 2, **alike}))
    ways.add("DeepSpeed engine, ZeRO-3 offload", wanted, lambda: with_deepspeed({"stage": 3, "offload_param": offload, **alike}))
    return ways
