"""Trained weights that somebody writes between two steps: servers have others, and the next step would replace them without a word.

torch counts the writes to a tensor. After the package's own writes the counts are noted, and a step begins with a look at whether one has
changed. Only then are weights compared, with what servers have of the version that was read: who puts others in their place for a while
and takes them back, as for an evaluation with averages, has changed nothing.

Writes to ``.data`` are not counted, and loops that clamp or average weights are often written so. Therefore each step also looks at some
elements of one parameter, the next one each time. Who writes in every step is found after a few.
"""

import ctypes
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from longshore import _awaited, _device
from longshore._host import Place, is_plain
from longshore._params import Param, check_unchanged, is_image, is_sharded
from longshore.errors import UsageError, invalid

#: Comparisons in steps that follow each other after which somebody should know what they cost.
_MANY = 10
#: Bytes of one parameter that are looked at in each step, whatever torch has counted.
_LOOKED_AT = 1024
#: Steps in which a parameter of an accelerator is compared. Each waits for the device, so there are few of them.
_ON_A_DEVICE = 16


class Writes:
    """How often torch had written to a job's parameters when they had the job's weights."""

    def __init__(self, params: list[Param]) -> None:
        self._params = params
        self._tensors = [param.tensor for param in params]
        self._noted: list[int] | None = None
        self._comparisons = 0
        #: How many steps have looked at a parameter, and the first bytes that the next one had when it got its weights.
        self._looks = 0
        self._bytes: bytes | None = None

    def note(self, params: list[Param] | None = None) -> None:
        """These have the job's weights now, or all of them."""
        self._keep_bytes(params)
        if params is None or len(params) == len(self._params):
            self._noted = _versions(self._tensors)
        elif self._noted is not None:
            for param, version in zip(params, _versions([param.tensor for param in params]), strict=True):
                self._noted[param.index] = version

    def forget(self) -> None:
        """Nobody watches the parameters any more."""
        self._noted = self._bytes = None

    def is_written(self, param: Param) -> bool:
        """Whether torch has counted a write to this one since it was noted, or it never was."""
        return self._noted is None or self._noted[param.index] != _versions([param.tensor])[0]

    def written(self) -> tuple[list[Param], list[Param]]:
        """Those to which torch has counted a write since they were noted, and others that may have been written past its count."""
        if self._noted is None:
            return [], []
        versions = _versions(self._tensors)
        looked_at = self._look(versions)
        if versions == self._noted:
            self._comparisons = 0
            return [], looked_at
        return [param for param, now, then in zip(self._params, versions, self._noted, strict=True) if now != then], looked_at

    def _next(self) -> Param | None:
        return self._params[self._looks % len(self._params)] if self._params else None

    def _keep_bytes(self, params: list[Param] | None) -> None:
        """Keeps what the next parameter to be looked at begins with, if it is one of these. No operation of torch does so: that would show
        in what the program has torch count or repeat."""
        param = self._next()
        if param is not None and (params is None or any(one.index == param.index for one in params)):
            self._bytes = _first_bytes(param)

    def _look(self, versions: list[int]) -> list[Param]:
        """The next parameter, if it may have been written past torch's count."""
        assert self._noted is not None
        param, kept = self._next(), self._bytes
        self._looks += 1
        self._bytes = None
        if param is None or versions[param.index] != self._noted[param.index] or _awaited.is_awaited(param.tensor):
            return []  # it is compared in any case, or nobody has used it
        if _device.accelerator.has(param.tensor):
            return [param] if self._looks <= _ON_A_DEVICE else []
        now = _first_bytes(param)
        return [param] if None not in (kept, now) and kept != now else []

    @torch.no_grad()
    def refuse(self, written: list[Param], looked_at: list[Param], read: Callable[[Param, Tensor], None], image: torch.dtype, job: str) -> None:
        """Refuses what is not what servers have, as they round it. What is the same again is noted.

        Args:
            written: what is compared, one after the other.
            looked_at: what is compared too, though torch has counted no write to it.
            read: writes the servers' weights of a parameter into memory of its shape, or of its shard's.
            image: the type that servers round weights to.
            job: its name.

        Raises:
            UsageError: naming the parameter, also one of another shape or type.
        """
        # What servers have is read into memory of a tensor's shape.
        check_unchanged([*written, *looked_at], [])
        for param in [*written, *looked_at]:
            mine = _memory(param)
            mine = (_device.accelerator.to_host(mine) if _device.accelerator.has(mine) else mine).contiguous()
            theirs = torch.empty_like(mine)
            if theirs.numel():
                read(param, theirs)
            if not is_image(mine.view(-1), theirs.view(-1), image):
                raise invalid(
                    param.name,
                    f"another in the model than on the servers, which have had job {job} since before it was written",
                    "the servers' when a step begins, which replaces what is in the model",
                    "load weights before the optimizer or engine opens its job, with another job= to start from them; put back what was "
                    "there to the bit, as after an evaluation with averages; go back to earlier weights by checkpoint() and load_state_dict(); "
                    "or pass written_weights='drop' if what is written may be lost",
                    UsageError,
                )
        if not written:
            return
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


def _first_bytes(param: Param) -> bytes | None:
    """What a parameter's memory begins with; None where there is none, where it is not the host's, or not in one piece."""
    with torch._C.DisableTorchFunctionSubclass():
        memory = param.tensor
        if is_sharded(memory) or not is_plain(memory) or not memory.data_ptr():
            return None
        return ctypes.string_at(memory.data_ptr(), min(_LOOKED_AT, memory.nbytes))


def _versions(tensors: list[Tensor]) -> list[int]:
    """What torch has counted. It does not read parameters that are awaited."""
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor._version for tensor in tensors]
