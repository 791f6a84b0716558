"""Trained weights that somebody writes between two steps: servers have others, and the next step would replace them without a word.

torch counts the writes to a tensor. After the package's own writes the counts are noted, and a step begins with a look at whether one has
changed. Only then are weights compared, with what servers have of the version that was read: who puts others in their place for a while
and takes them back, as for an evaluation with averages, has changed nothing.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from longshore._host import Place
from longshore._params import Param, is_image, is_sharded
from longshore.errors import UsageError, invalid

#: Comparisons in steps that follow each other after which somebody should know what they cost.
_MANY = 10


class Writes:
    """How often torch had written to a job's parameters when they had the job's weights."""

    def __init__(self, params: list[Param]) -> None:
        self._params = params
        self._tensors = [param.tensor for param in params]
        self._noted: list[int] | None = None
        self._comparisons = 0

    def note(self, params: list[Param] | None = None) -> None:
        """These have the job's weights now, or all of them."""
        if params is None or len(params) == len(self._params):
            self._noted = _versions(self._tensors)
        elif self._noted is not None:
            for param, version in zip(params, _versions([param.tensor for param in params]), strict=True):
                self._noted[param.index] = version

    def forget(self) -> None:
        """Nobody watches the parameters any more."""
        self._noted = None

    def is_written(self, param: Param) -> bool:
        """Whether torch has counted a write to this one since it was noted, or it never was."""
        return self._noted is None or self._noted[param.index] != _versions([param.tensor])[0]

    def written(self) -> list[Param]:
        """Those to which torch has counted a write since they were noted."""
        if self._noted is None:
            return []
        versions = _versions(self._tensors)
        if versions == self._noted:
            self._comparisons = 0
            return []
        return [param for param, now, then in zip(self._params, versions, self._noted, strict=True) if now != then]

    @torch.no_grad()
    def refuse(self, written: list[Param], read: Callable[[Param, Tensor], None], image: torch.dtype, job: str) -> None:
        """Refuses what is not what servers have, as they round it. What is the same again is noted.

        Args:
            written: what is compared, one after the other.
            read: writes the servers' weights of a parameter into memory of its shape, or of its shard's.
            image: the type that servers round weights to.
            job: its name.

        Raises:
            UsageError: naming the parameter.
        """
        for param in written:
            mine = _memory(param).to("cpu").contiguous()
            theirs = torch.empty_like(mine)
            if theirs.numel():
                read(param, theirs)
            if not is_image(mine.view(-1), theirs.view(-1), image):
                raise invalid(
                    param.name,
                    f"another in the model than on the servers, which have had job {job} since before it was written",
                    "the servers' when a step begins, which replaces what is in the model",
                    "load weights before the optimizer or engine opens its job, with another job= to start from them; put back what was "
                    "there, as after an evaluation with averages; or pass written_weights='drop' if what is written may be lost",
                    UsageError,
                )
        self.note(written)
        self._comparisons += 1
        if self._comparisons == _MANY:
            warnings.warn(
                f"{written[0].name} was written to before each of {_MANY} steps, and each time had what the servers have: comparing costs a "
                "transfer of its weights. Write to it less often, or pass written_weights='drop', with which nothing is compared",
                UserWarning,
                stacklevel=4,
            )


def places(param: Param, memory: Tensor) -> list[Place]:
    """Where a parameter's weights are read to that is one of the job's own."""
    return [(param.index, memory.data_ptr(), param.elements, param.wire)]


def _memory(param: Param) -> Tensor:
    """The parameter's elements, or those of this rank's shard."""
    memory = param.tensor.detach()
    return memory.to_local() if is_sharded(memory) else memory  # type: ignore[attr-defined,no-any-return]


def _versions(tensors: list[Tensor]) -> list[int]:
    """What torch has counted. It does not read parameters that are awaited."""
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor._version for tensor in tensors]
