"""An accelerator in host memory that does all of torch's computation at once, for tests of several ranks with gloo."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, distributed

from longshore.transfer import device


class OnHost(device.Accelerator):
    """Computation is done when it is called, on any stream."""

    def run(self, stream: Any, act: Callable[..., object], tensors: Sequence[Tensor | None]) -> None:
        act(*tensors)

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        pass

    def reduce_scatter(self, part: Tensor, slots: Tensor) -> Any:
        # gloo's own reduce_scatter does not tell when it is done.
        work = distributed.all_reduce(slots, async_op=True)
        work.wait()
        part.copy_(slots[distributed.get_rank()])
        return work
