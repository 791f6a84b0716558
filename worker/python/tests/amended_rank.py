"""What one rank of test_amended_ranks.py does: it is started as torchrun starts a process."""

from collections.abc import Sequence
from typing import Any

import rank_program
import torch
from host_accelerator import OnHost
from rank import loss, mean_gradients, prepare, whole
from torch import Tensor, distributed

import longshore
from longshore import _amend, _device

STEPS = 8


class Pretended(OnHost):
    """Takes all memory but page-locked memory for a device's, and does everything at once."""

    def __init__(self) -> None:
        self.host: dict[int, Tensor] = {}

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self.host

    def current_stream(self, device: torch.device) -> Any:
        return self

    new_stream = record = current_stream

    def let_wait(self, stream: Any, event: Any) -> None:
        pass

    def wait(self, event: Any) -> None:
        pass

    def locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        self.host[made.untyped_storage().data_ptr()] = made
        return made

    def to_host(self, tensor: Tensor) -> Tensor:
        made = self.locked(tensor.shape, tensor.dtype)
        return made.copy_(tensor)


def train(way: str, options: dict[str, Any]) -> dict[str, Any]:
    """The weights that each step computes with, and its gradient. Where there are several ends, a new optimizer goes on at each."""
    amend, amended = _amend.amend, []

    def noted(*given: Any, **named: Any) -> None:
        amended.append(named["step"] is not None)
        amend(*given, **named)

    _amend.amend = noted
    _device.accelerator = Pretended() if options.pop("on_device") else _device.Accelerator()
    model, own = prepare(way)
    found: dict[str, Any] = {"weights": [], "gradients": []}
    for end in options.pop("ends", [STEPS]):
        optimizer = longshore.AdamW(model.named_parameters(), lr=1e-3, **own, **options)
        optimizer.open()
        while len(found["weights"]) < end:
            found["weights"].append([whole(parameter.detach()).clone() for parameter in model.parameters()])
            loss(model, len(found["weights"]), distributed.get_rank()).backward()
            if not options.get("streaming"):
                found["gradients"].append(mean_gradients(model, way))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    _amend.amend = amend
    found["amended"] = sum(amended)
    return found


if __name__ == "__main__":
    rank_program.main(train)
