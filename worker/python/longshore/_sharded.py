"""Ranks whose parameters are DTensors: FSDP2, HSDP, tensor parallelism. What a rank holds of a parameter is a piece, and so is what several
ranks hold alike: one of them sends it, and all of them read it."""

import contextlib
import dataclasses
import math
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from longshore import _agree, _params, _sharding, _waits
from longshore._frozen import Kept
from longshore._host import Place
from longshore._params import Param
from longshore._partition import Piece, layout, piece_param
from longshore._ranks import CheckMissing, Ranks, on_all
from longshore._weights import Weights
from longshore.errors import GradientError, UsageError, invalid

#: How many elements of a gradient are compared between the ranks that have it; and how far apart they may be, of the largest one of them,
#: or of the largest one of all gradients, since one that is zero in theory is rounding alone.
_SAMPLES = 64
_APART = 0.05
_NOISE = 1e-5


class Sharded(Ranks):
    """Parameters are DTensors, and so are their gradients. A plain parameter among them is held whole by all ranks, as where others are
    tensor-parallel."""

    def __init__(self, params: list[Param]) -> None:
        world_size = _agree.place()[1]
        pieces = _sharding.cuts(params, world_size)
        super().__init__(params, layout(params, world_size, lambda param: pieces[param.index]))
        #: By parameter what this rank holds of it.
        self._here = {piece.param.index: piece for piece in self.layout.pieces() if self.rank in piece.holders}
        #: Whether ranks hold the same as others.
        self.has_replicas = any(piece.replicas for piece in self.layout.pieces())
        self._locals: list[Param] = []
        self._weights: list[Weights] = []
        #: By parameter some elements of the first gradient of what others hold too; None once they were compared.
        self._samples: dict[str, list[float]] | None = {} if self.has_replicas else None

    def telling(self) -> contextlib.AbstractContextManager[None]:
        return _waits.telling() if self.has_replicas else super().telling()

    def first_weights(self) -> tuple[list[Place], list[Tensor]]:
        return _sharding.to_first_rank(self.layout.pieces(), self.rank)

    def keep(self, frozen: list[Param]) -> Kept:
        return _sharding.KeptShards(frozen, self.layout.count(), self.rank, self.world_size)

    def read(self, job: Any) -> None:
        locals_ = [
            dataclasses.replace(piece_param(piece, local, piece.param.dtype), shape=local.shape)
            for piece in self._here.values()
            for local in [_sharding.local(piece.param.tensor)]
        ]
        if [param.tensor.data_ptr() for param in locals_] != [param.tensor.data_ptr() for param in self._locals]:
            # FSDP2 makes other shards where the model is moved or loaded.
            self._locals = locals_
            sent = {piece.index for piece in self._mine.values()}
            own = [param for param in locals_ if param.index in sent]
            replicas = [param for param in locals_ if param.index not in sent]
            # The own ones come meanwhile, and while any of them is unread the others can be read again.
            fetched: Any = _Fetched(job)
            self._weights = [Weights(replicas, fetched)] if replicas else []
            self._weights.append(Weights(own, job))
        for weights in self._weights:
            weights.read()

    def places_of(self, param: Param, memory: Tensor) -> list[Place]:
        return [self._here[param.index].place(memory)]

    def forget_weights(self) -> None:
        self._locals, self._weights = [], []

    def push(self, job: Any, scale: float, check_missing: CheckMissing) -> bool:
        with self.telling():
            return super().push(job, scale, on_all(check_missing))

    def end_micro_step(self, job: Any, check_missing: CheckMissing) -> bool:
        return super().end_micro_step(job, on_all(check_missing))

    def _send(self, job: Any, param: Param, gradient: Tensor, scale: float) -> None:
        _params.check_gradient(param, gradient)
        local, piece = _local_gradient(param, gradient), self._here.get(param.index)
        if piece is None:
            return
        if local.numel() != piece.elements:
            raise UsageError(f"{param.name} has another shard than when the optimizer was built: build it after fully_shard")
        if self._samples is not None and piece.replicas:
            self._samples[param.name] = _sample(local)
        if piece.rank == self.rank:
            sent = dataclasses.replace(piece_param(piece, local, param.dtype), shape=local.shape)
            self._outgoing.send(job, sent, local, scale)

    def _end(self, job: Any) -> None:
        if self._samples is not None:
            _compare([piece for piece in self.layout.pieces() if piece.replicas], _agree.together(lambda: self._samples))
            self._samples = None
        super()._end(job)


class _Fetched:
    """A job's weights that it does not read by itself, since this rank sends no gradient of them: for :class:`Weights`."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def unread_weights(self) -> int | None:
        version: int | None = self._job.unread_weights()
        return version

    def read_weights(self, places: list[Place]) -> int | None:
        version = self.unread_weights()
        if version is not None:
            self._job.fetch(version, [(place, 0) for place in places]).read()
        return version


def _local_gradient(param: Param, gradient: Any) -> Tensor:
    """This rank's part of a gradient, placed as its parameter is: tensor parallelism leaves sums over ranks to whoever takes them."""
    if not isinstance(param.tensor, DTensor):
        return _sharding.local(gradient)
    if not isinstance(gradient, DTensor) or gradient.device_mesh != param.tensor.device_mesh:
        raise invalid(
            f"{param.name}.grad",
            "not sharded as its parameter is",
            "a DTensor on its parameter's mesh",
            "let backward make it, in the model that was given to fully_shard or parallelize_module",
            GradientError,
        )
    if gradient.placements != param.tensor.placements:
        gradient = gradient.redistribute(placements=param.tensor.placements)
    return _sharding.local(gradient)


def _sample(gradient: Tensor) -> list[float]:
    flat = gradient.reshape(-1)
    sample: list[float] = flat[:: max(len(flat) // _SAMPLES, 1)][:_SAMPLES].double().tolist()
    return sample


def _compare(pieces: list[Piece], everyones: list[Any]) -> None:
    """Refuses a first gradient that ranks have otherwise though they hold the same of its parameter: nobody has reduced it.

    Args:
        everyones: by rank, what :func:`_sample` gave by parameter.
    """
    noise = _NOISE * _largest([value for sample in everyones[0].values() for value in sample])
    for piece in pieces:
        first, *others = piece.holders
        ours = everyones[first].get(piece.param.name, [])
        for rank in others:
            theirs = everyones[rank].get(piece.param.name, [])
            if len(ours) != len(theirs) or _are_apart(ours, theirs, noise):
                error = invalid(
                    f"{piece.param.name}.grad",
                    f"another on rank {rank} than on rank {first}",
                    "the same on all ranks that hold the same of the parameter",
                    "reduce it over them: call fully_shard on the whole model, so that it takes every parameter, on a mesh of all ranks that "
                    "have data of their own; where the mesh has a dimension for tensor parallelism, give its ranks the same data",
                    GradientError,
                )
                raise _waits.known(error)


def _are_apart(ours: list[float], theirs: list[float], noise: float) -> bool:
    """Whether these are not the same but for rounding. What overflowed says nothing."""
    pairs = [pair for pair in zip(ours, theirs, strict=True) if all(map(math.isfinite, pair))]
    allowed = max(_APART * _largest([value for pair in pairs for value in pair]), noise)
    return any(abs(one - other) > allowed for one, other in pairs)


def _largest(values: list[float]) -> float:
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)
