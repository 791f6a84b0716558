"""Tensors as host memory: addresses for the Rust half, and copies for tensors that have none.

A tensor of the CPU whose elements lie end to end is used where it is. Others, such as those of an accelerator, are
copied by way of page-locked memory, in the order of the device's current stream.
"""

import torch
from torch import Tensor

from longshore._params import Param, check_gradient

#: Parameter, address, elements, type: what the Rust half takes.
Place = tuple[int, int, int, str]


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's own memory can be used."""
    return tensor.is_cpu and tensor.is_contiguous()


def _staging(param: Param, like: Tensor) -> Tensor:
    """Host memory for a tensor that has none of use."""
    locked = like.device.type != "cpu"
    return torch.empty(param.shape, dtype=like.dtype, device="cpu", pin_memory=locked)


class Gradients:
    """Gradients of one step as host memory. Who takes one keeps it in ``.grad`` until it was read."""

    def __init__(self) -> None:
        self._staged: dict[int, Tensor] = {}
        #: What a device is still copying from, and the devices.
        self._held: list[Tensor] = []
        self._copying: set[torch.device] = set()

    def take(self, param: Param, gradient: Tensor) -> Place:
        """Checks a gradient, and starts copying it if it has to be. Call :meth:`wait` before its memory is read."""
        check_gradient(param, gradient)
        if not is_plain(gradient):
            gradient = self._copy(param, gradient)
        return (param.index, gradient.data_ptr(), param.elements, param.wire)

    def _copy(self, param: Param, gradient: Tensor) -> Tensor:
        staged = self._staged.get(param.index)
        if staged is None or staged.dtype is not gradient.dtype:
            staged = self._staged[param.index] = _staging(param, gradient)
        if gradient.device.type == "cpu":
            return staged.copy_(gradient)
        staged.copy_(gradient, non_blocking=True)
        self._held.append(gradient)
        self._copying.add(gradient.device)
        return staged

    def wait(self) -> None:
        """Waits for copies that go on behind a device's stream."""
        if not self._copying:
            return
        for device in self._copying:
            torch.accelerator.current_stream(device).synchronize()
        self._copying.clear()

    def release(self) -> None:
        self._held.clear()


class Weights:
    """The parameters of a job as host memory that weights are written to."""

    def __init__(self, params: list[Param]) -> None:
        self._params = params
        self._staged: dict[int, Tensor] = {}
        #: Copies to a device that may still read the staging memory.
        self._reading: list[torch.Event] = []

    def values(self) -> tuple[list[Place], list[Tensor]]:
        """The weights as they are now, and what holds their memory."""
        held, places = [], []
        for param in self._params:
            memory = param.tensor.detach()
            if not is_plain(memory):
                memory = memory.to("cpu").contiguous()
            held.append(memory)
            places.append((param.index, memory.data_ptr(), param.elements, param.wire))
        return places, held

    def targets(self) -> list[Place]:
        """Where new weights go. Call :meth:`written` after they are there."""
        for event in self._reading:
            event.synchronize()
        self._reading.clear()
        return [
            (param.index, self._target(param).data_ptr(), param.elements, param.wire)
            if param.index in self._staged or not is_plain(param.tensor)
            else (param.index, param.tensor.data_ptr(), param.elements, param.wire)
            for param in self._params
        ]

    def _target(self, param: Param) -> Tensor:
        """Host memory for a parameter that has none of use."""
        staged = self._staged.get(param.index)
        if staged is None:
            staged = self._staged[param.index] = _staging(param, param.tensor)
        return staged

    def written(self) -> None:
        """Copies what was staged, and tells autograd that the parameters have changed."""
        devices = set()
        with torch.no_grad():
            for index, staged in self._staged.items():
                tensor = self._params[index].tensor
                tensor.copy_(staged, non_blocking=True)
                if tensor.device.type != "cpu":
                    devices.add(tensor.device)
        for device in devices:
            self._reading.append(torch.accelerator.current_stream(device).record_event())
        torch.autograd.graph.increment_version(
            [param.tensor for param in self._params if param.index not in self._staged]
        )
