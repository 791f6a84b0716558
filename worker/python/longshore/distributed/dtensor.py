"""Ranks whose parameters are DTensors: FSDP2, HSDP, tensor parallelism.

A rank's part of a parameter follows from its placements and is cut into pieces. Several ranks may hold the same piece: one of them sends
it, and all of them read it.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from longshore.distributed import collectives
from longshore.distributed.ranks import Ranks
from longshore.errors import GradientError, UsageError, invalid
from longshore.transfer import params as _params
from longshore.transfer.filling import FrozenParams
from longshore.transfer.params import Box, Param, Piece, Place
from longshore.transfer.partitions import layout, piece_param
from longshore.transfer.tensors import on_host
from longshore.transfer.weights import Weights


def local_shard(tensor: Any) -> Tensor:
    """Returns this rank's part of a parameter as memory. Writes to it change the parameter."""
    with torch.no_grad():
        held = tensor.detach()
        shard: Tensor = held.to_local() if isinstance(held, DTensor) else held
    return shard


def fill(param: Param, whole: Tensor) -> None:
    """Writes this rank's part of a whole tensor into the parameter."""
    box = box_of(param)
    if _elements(box):
        local_shard(param.tensor).copy_(whole[tuple(slice(first, end) for first, end in box)])


def box_of(param: Param) -> Box:
    """Returns the place of this rank's part in a parameter. The part may be empty.

    Raises:
        InvalidError: naming the parameter and the remedy, for a placement that servers do not support.
    """
    tensor: Any = param.tensor
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in param.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise invalid(
            param.name,
            f"on a mesh without rank {distributed.get_rank()}",
            "on a mesh that has each rank of the job",
            "place it on a mesh of all ranks, with Replicate where several have the same; pipeline stages need a job and a process group each",
        )
    runs = [[range(size)] for size in param.shape]
    for place, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            remedy = "redistribute the parameter before the optimizer is built"
            raise invalid(param.name, f"placed as {list(placements)}", "placed by Shard and Replicate", remedy)
        # For a strided placement a later dimension of the mesh has made ``split_factor`` parts, and each of them is
        # cut.
        parts = int(getattr(placement, "split_factor", 1))
        of_each = [_cut(_cut(runs[placement.dim], parts, part), mesh.size(place), coordinate[place]) for part in range(parts)]
        runs[placement.dim] = [run for of_part in of_each for run in of_part]
    box = tuple((of_dim[0].start, of_dim[-1].stop) if of_dim else (0, 0) for of_dim in runs)
    held = local_shard(tensor)
    lengths = [sum(map(len, of_dim)) for of_dim in runs]
    is_box = list(held.shape) == lengths == [end - first for first, end in box]
    if held.numel() != math.prod(lengths) or (held.numel() and not is_box):
        raise invalid(
            param.name,
            f"placed as {list(placements)}, of {list(param.shape)} with {list(held.shape)} on rank {distributed.get_rank()}",
            "cut so that each rank holds neighbours",
            "shard dimensions whose size the ranks divide",
        )
    return box


def _cut(runs: list[range], parts: int, part: int) -> list[range]:
    """Returns part number ``part`` of the indices in ``runs``, cut as ``torch.chunk`` cuts all of them end to end."""
    room = math.ceil(sum(map(len, runs)) / parts)
    skipped, cut = part * room, []
    for run in runs:
        taken = run[skipped : skipped + room]
        skipped = max(skipped - len(run), 0)
        room -= len(taken)
        if taken:
            cut.append(taken)
    return cut


def _elements(box: Box) -> int:
    return math.prod(end - first for first, end in box)


def cuts(params: list[Param], world_size: int) -> dict[int, list[Piece]]:
    """Returns each parameter's pieces: the distinct parts that ranks hold. Each piece is sent by the holder that has
    the fewest elements to send so far. So each rank of a replicated model sends some.

    Raises:
        InvalidError: naming the parameter and the remedy, on all ranks, for a parameter that cannot be trained so.
    """
    if not params:
        return {}
    everyones: list[dict[str, Box]] = collectives.together(lambda: {param.name: box_of(param) for param in params})
    loads = [0] * world_size
    found: dict[int, list[Piece]] = {}
    for param in params:
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(everyones):
            if param.name not in boxes:
                remedy = "give all ranks the same model; pipeline stages need a job and a process group each"
                raise invalid(param.name, f"not on rank {rank}", "on all ranks", remedy)
            if _elements(boxes[param.name]):
                holders.setdefault(boxes[param.name], []).append(rank)
        if sum(map(_elements, holders)) != param.elements:
            remedy = "place it alike on all ranks"
            raise invalid(param.name, "in parts that are not the parameter together", f"{param.elements} elements in all", remedy)
        firsts = [sorted({box[dim][0] for box in holders}) for dim in range(len(param.shape))]
        found[param.index] = []
        for box, ranks in sorted(holders.items()):
            rank = min(ranks, key=lambda rank: (loads[rank], rank))
            loads[rank] += _elements(box)
            name = _name(param, [starts.index(first) for starts, (first, _) in zip(firsts, box, strict=True)])
            found[param.index].append(_piece(name, param, box, rank, ranks))
    return found


def _name(param: Param, at: list[int]) -> str:
    """Returns the parameter's name, with a part number and count for each dimension up to the last cut one: ``w#0/2``."""
    parts = [0] * len(at)
    if isinstance(param.tensor, DTensor):
        for place, placement in enumerate(param.tensor.placements):
            if isinstance(placement, Shard | _StridedShard):
                parts[placement.dim] = max(parts[placement.dim], 1) * param.tensor.device_mesh.size(place)
    last = max((dim for dim, of in enumerate(parts) if of), default=-1)
    return param.name + "".join(f"#{at[dim]}/{max(parts[dim], 1)}" for dim in range(last + 1))


def _piece(name: str, param: Param, box: Box, rank: int, holders: list[int]) -> Piece:
    shape = tuple(end - first for first, end in box)
    wide = next((dim for dim, length in enumerate(shape) if length > 1), len(shape))
    is_run = shape[wide + 1 :] == tuple(param.shape[wide + 1 :])
    start = 0
    for (first, _), size in zip(box, param.shape, strict=True):
        start = start * size + first
    replicas = tuple(holders) if len(holders) > 1 else ()
    return Piece(0, name, param, rank, shape, start, _elements(box), 0, None if is_run else box, replicas)


def to_first_rank(pieces: Iterable[Piece], rank: int) -> tuple[list[Place], list[Tensor]]:
    """Sends each piece from its first holder to rank 0, one after the other. On rank 0 returns all of them, with the tensors that hold
    their memory."""
    places: list[Place] = []
    held: list[Tensor] = []
    for piece in pieces:
        shard, source = local_shard(piece.param.tensor), piece.holders[0]
        if rank == 0:
            memory = shard
            if source != 0:
                memory = torch.empty(piece.shape, dtype=piece.param.dtype, device=shard.device)
                _wait_for(functools.partial(distributed.recv, memory, source), piece, memory.device)
            memory = on_host(memory)
            held.append(memory)
            places.append((piece.index, memory.data_ptr(), piece.elements, piece.wire))
        elif source == rank:
            _wait_for(functools.partial(distributed.send, shard.contiguous().resolve_neg(), 0), piece, shard.device)
    return places, held


def _wait_for(act: Callable[[], object], piece: Piece, device: torch.device) -> None:
    """Moves a piece to rank 0. A device's stream waits for it; on hosts Ctrl-C and other ranks' failures end the wait."""
    if device.type == "cpu":
        collectives.wait(collectives.Apart(act), f"the first weights of {piece.param.name}, which rank {piece.holders[0]} sends to rank 0")
    else:
        act()


class FrozenShards(FrozenParams):
    """Frozen parameters of which each rank has a part, and possibly some that each rank has whole."""

    def __init__(self, params: list[Param], first: int, rank: int, world_size: int) -> None:
        sharded: list[Param] = []
        whole: list[Param] = []
        for param in params:
            (sharded if isinstance(param.tensor, DTensor) else whole).append(param)
        self._rank = rank
        pieces = [piece for of_param in cuts(sharded, world_size).values() for piece in of_param]
        self._pieces = [dataclasses.replace(piece, index=first + place) for place, piece in enumerate(pieces)]
        super().__init__(whole, first + len(self._pieces), rank == 0)

    def described(self) -> Sequence[Param | Piece]:
        return [*self._pieces, *super().described()]

    def values(self) -> tuple[list[Place], list[Tensor]]:
        places, held = to_first_rank(self._pieces, self._rank)
        whole, held_whole = super().values()
        return [*places, *whole], [*held, *held_whole]

    def own(self) -> list[Param]:
        mine = (piece for piece in self._pieces if self._rank in piece.holders)
        shards = [(piece, local_shard(piece.param.tensor)) for piece in mine]
        return [
            dataclasses.replace(piece.param, index=piece.index, tensor=shard, shape=shard.shape, elements=piece.elements)
            for piece, shard in shards
        ]


#: Number of elements of a gradient that the holders of a piece compare.
_SAMPLES = 64
#: Difference that is allowed between two holders, relative to the largest compared element of the gradient.
_APART = 0.05
#: Difference that is allowed relative to the largest compared element of all gradients. A gradient that is zero in
#: theory is only rounding noise, of which two holders have different values.
_NOISE = 1e-5


class Sharded(Ranks):
    """Ranks whose parameters and gradients are DTensors. A plain parameter among them is held whole by all ranks, for example beside
    tensor-parallel ones."""

    def __init__(self, params: list[Param]) -> None:
        world_size = collectives.place()[1]
        pieces = cuts(params, world_size)
        super().__init__(params, layout(params, world_size, lambda param: pieces[param.index]))
        #: This rank's piece of each parameter, by the parameter's index.
        self._here = {piece.param.index: piece for piece in self.layout.pieces() if self.rank in piece.holders}
        #: True if several ranks hold the same piece.
        self.has_replicas = any(piece.replicas for piece in self.layout.pieces())
        self._locals: list[Param] = []
        self._weights: list[Weights] = []
        #: Sampled elements of the first gradient of each shared piece, by the parameter's name. None once ranks have
        #: compared them, or if no piece is shared.
        self._samples: dict[str, list[float]] | None = {} if self.has_replicas else None

    def telling(self) -> contextlib.AbstractContextManager[None]:
        return collectives.telling() if self.has_replicas else super().telling()

    def first_weights(self) -> tuple[list[Place], list[Tensor]]:
        return to_first_rank(self.layout.pieces(), self.rank)

    def keep(self, frozen: list[Param]) -> FrozenParams:
        return FrozenShards(frozen, self.layout.count(), self.rank, self.world_size)

    def read(self, job: Any) -> None:
        locals_ = [
            dataclasses.replace(piece_param(piece, local, piece.param.dtype), shape=local.shape)
            for piece in self._here.values()
            for local in [local_shard(piece.param.tensor)]
        ]
        if [param.tensor.data_ptr() for param in locals_] != [param.tensor.data_ptr() for param in self._locals]:
            # FSDP2 has made new shards, as it does when the model is moved or loaded.
            self._locals = locals_
            sent = {piece.index for piece in self._mine.values()}
            own = [param for param in locals_ if param.index in sent]
            replicas = [param for param in locals_ if param.index not in sent]
            # Replicas are read first, while the rank's own pieces arrive. Once the own pieces are read, no version
            # counts as unread, and replicas would not be fetched.
            fetched: Any = _Fetched(job, replicas)
            self._weights = [Weights(replicas, fetched)] if replicas else []
            self._weights.append(Weights(own, job))
        for weights in self._weights:
            weights.read()

    def places_of(self, param: Param, memory: Tensor) -> list[Place]:
        return [self._here[param.index].place(memory)]

    def forget_weights(self) -> None:
        self._locals, self._weights = [], []

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
            _compare([piece for piece in self.layout.pieces() if piece.replicas], collectives.together(lambda: self._samples))
            self._samples = None
        super()._end(job)


class _Fetched:
    """Stands for the job in :class:`Weights` of pieces whose gradient another rank sends. Such pieces are fetched,
    since a read brings only the pieces that this rank sends."""

    def __init__(self, job: Any, params: list[Param]) -> None:
        self._job, self._params = job, params

    def unread_params(self) -> list[int]:
        return [] if self._job.unread_weights() is None else [param.index for param in self._params]

    def read_weights(self, places: list[Place]) -> int | None:
        version: int | None = self._job.unread_weights()
        if version is not None:
            self._job.fetch(version, [(place, 0) for place in places]).read()
        return version


def _local_gradient(param: Param, gradient: Any) -> Tensor:
    """Returns this rank's part of a gradient in its parameter's placement. Tensor parallelism leaves partial sums,
    which this call adds over ranks."""
    if not isinstance(param.tensor, DTensor):
        return local_shard(gradient)
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
    return local_shard(gradient)


def _sample(gradient: Tensor) -> list[float]:
    flat = gradient.reshape(-1)
    sample: list[float] = flat[:: max(len(flat) // _SAMPLES, 1)][:_SAMPLES].double().tolist()
    return sample


def _compare(pieces: list[Piece], everyones: list[Any]) -> None:
    """Refuses a first gradient that differs between holders of the same piece: it was not reduced.

    Args:
        everyones: by rank, the samples of :func:`_sample` by parameter.
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
                raise collectives.known(error)


def _are_apart(ours: list[float], theirs: list[float], noise: float) -> bool:
    """Returns whether the samples differ by more than rounding. Pairs with an overflow are ignored."""
    pairs = [pair for pair in zip(ours, theirs, strict=True) if all(map(math.isfinite, pair))]
    allowed = max(_APART * _largest([value for pair in pairs for value in pair]), noise)
    return any(abs(one - other) > allowed for one, other in pairs)


def _largest(values: list[float]) -> float:
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)
