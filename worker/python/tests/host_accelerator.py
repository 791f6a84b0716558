"""An accelerator whose memory is the host's, and which does all that torch computes at once: for tests of several ranks with gloo."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, distributed

from longshore.transfer import device


class OnHost(device.Accelerator):
    """What torch computes is done when it is called for, whichever stream that is given to."""

    def run(self, stream: Any, act: Callable[..., object], tensors: Sequence[Tensor | None]) -> None:
        act(*tensors)

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        pass

    def reduce_scatter(self, part: Tensor, slots: Tensor) -> Any:
        # Nobody can say when gloo's own is done.
        work = distributed.all_reduce(slots, async_op=True)
        work.wait()
        part.copy_(slots[distributed.get_rank()])
        return work
