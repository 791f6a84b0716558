"""A GPU with delayed copies or computation: code that does not wait for them comes too soon."""

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from units import Deep

from longshore.optimizer import step as streaming
from longshore.transfer import device as _device
from longshore.transfer import weights

# torch.use_deterministic_algorithms needs this setting. Sums then have a fixed order, and new memory of torch holds
# NaN.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this host has no GPU that torch.cuda can use")
DEVICE = torch.device("cuda", 0)
#: Fractions of copies and of computations that are delayed: none, all, or drawn by a seed.
LATE = {"nothing": (0.0, 0.0), "copies": (1.0, 0.0), "computing": (0.0, 1.0), "some of both": (0.5, 0.5)}
#: Clock cycles of a wait: about half a millisecond.
_CYCLES = 1_000_000


class Gpu(_device.Accelerator):
    """The GPU of torch.cuda.

    Args:
        late: A key of :data:`LATE`.
    """

    def __init__(self, late: str = "nothing", seed: int = 0) -> None:
        self._copies, self._computing = LATE[late]
        self._random = random.Random(seed)
        #: Numbers of registrations: pieces of memory registered now, registrations for writing, and registrations for
        #: reading alone.
        self.registered = self.to_be_written = self.to_be_read = 0
        #: Bytes of page-locked memory that torch made.
        self.locked_bytes = 0

    def pause(self, share: float) -> None:
        """Delays the current stream, in this share of calls."""
        if self._random.random() < share:
            torch.cuda._sleep(_CYCLES)

    def run(self, stream: Any, act: Callable[..., object], tensors: Sequence[Tensor | None]) -> None:
        def late(*given: Tensor | None) -> None:
            self.pause(self._copies)
            act(*given)

        super().run(stream, late, tensors)

    def compute(self, tensor: Tensor) -> Tensor:
        """Returns the same tensor, delayed in forward and in backward."""
        made: Tensor = _Later.apply(tensor, lambda: self.pause(self._computing))  # type: ignore[no-untyped-call]
        return made

    def register(self, address: int, nbytes: int, device: torch.device, *, read_only: bool = False) -> None:
        super().register(address, nbytes, device, read_only=read_only)
        self.registered += 1
        self.to_be_read += read_only
        self.to_be_written += not read_only

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory = super().locked(shape, dtype)
        self.locked_bytes += memory.nbytes
        return memory

    def unregister(self, address: int, device: torch.device) -> None:
        super().unregister(address, device)
        self.registered -= 1


class InOrder(Gpu):
    """Begins nothing before all earlier work is done. Reference for the late GPUs."""

    def run(self, stream: Any, act: Callable[..., object], tensors: Sequence[Tensor | None]) -> None:
        torch.cuda.synchronize()
        super().run(stream, act, tensors)
        torch.cuda.synchronize()

    def compute(self, tensor: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return tensor


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, pause: Callable[[], None]) -> Tensor:
        ctx.pause = pause
        pause()
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.pause()
        return gradient.clone(), None


class OnGpu(Deep):
    """Equal layers whose computation is as late as the GPU's setting."""

    def __init__(self, depth: int = 8, width: int = 256, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(depth, width, dtype)
        self.width = width
        self.gpu: Gpu | None = None
        #: The function that runs a layer. Activation checkpointing replaces it.
        self.call: Any = lambda layer, hidden: layer(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            done = hidden + nn.functional.gelu(self.call(layer, hidden))
            hidden = done if self.gpu is None else self.gpu.compute(done)
        return hidden

    def inputs(self, step: int) -> Tensor:
        made = torch.randn(4, self.width, generator=torch.Generator().manual_seed(step))
        # Inputs need a gradient, or reentrant checkpoints would not compute the first layer's gradients.
        return made.to(DEVICE, self.dtype).requires_grad_()


@contextlib.contextmanager
def on(gpu: Gpu, group_bytes: int = 0) -> Iterator[None]:
    """In the block the package uses this GPU, and torch is deterministic. Weights come in groups of this size, by default each alone, and
    gradients leave by two layers of :class:`OnGpu`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device, "accelerator", gpu)
        patch.setattr(weights, "DEVICE_GROUP_BYTES", group_bytes)
        patch.setattr(streaming, "ENOUGH_ON_DEVICE", streaming.ENOUGH)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.cuda.synchronize()
            torch.use_deterministic_algorithms(False)
            gc.collect()
