"""All of a job's state as tensors, read from a checkpoint that its servers write for it."""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from longshore._params import Param
from longshore.errors import StateError, invalid

#: By rule: torch's names of the arrays that servers keep beside the master weights.
_NAMES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
}
_ARRAYS = ("first", "second")


class Parts:
    """The files of a checkpoint, mapped."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, tuple[mmap.mmap, int, int, str]] = {}
        files = sorted(folder.glob("server-*.safetensors"))
        if not files:
            raise invalid(
                "checkpoint_dir",
                folder,
                "the servers' checkpoint folder, as this process sees it",
                "pass the folder that longshored was given with --checkpoint-dir, shared with this host",
                StateError,
            )
        for file in files:
            with file.open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            length = int.from_bytes(mapped[:8], "little")
            for name, entry in json.loads(mapped[8 : 8 + length]).items():
                if name != "__metadata__":
                    start, end = entry["data_offsets"]
                    self._tensors[name] = (mapped, 8 + length + start, end - start, entry["dtype"])

    def read(self, shard: int, array: str, start: int, elements: int) -> Tensor:
        """Elements of a shard's array, which is fp32."""
        mapped, offset, _, dtype = self._tensors[f"shard.{shard:06}.{array}"]
        if dtype != "F32":
            limit = "fp32 (state='fp32', master='fp32')"
            raise invalid(f"state of {array}", dtype, limit, "keep the handle, and checkpoints of the servers", StateError)
        return torch.frombuffer(bytearray(mapped[offset + 4 * start : offset + 4 * (start + elements)]), dtype=torch.float32)


def of_params(
    folder: Path, rule: str, params: list[Param], starts: list[int], shard_elements: int
) -> Iterator[tuple[Param, dict[str, Tensor]]]:
    """The state of each parameter, in torch's names, and its fp32 ``master`` weights; one parameter at a time."""
    parts = Parts(folder)
    arrays = {"master": "master", **dict(zip(_NAMES[rule], _ARRAYS, strict=False))}
    for param, start in zip(params, starts, strict=True):
        state = {}
        for name, array in arrays.items():
            pieces = [
                parts.read(shard, array, within, elements)
                for shard, within, elements in _slices(start, param.elements, shard_elements)
            ]
            state[name] = torch.cat(pieces).view(param.shape)
        yield param, state


def _slices(start: int, elements: int, shard_elements: int) -> Iterator[tuple[int, int, int]]:
    """Shard, first element in it, and number of elements."""
    end = start + elements
    while start < end:
        shard, within = divmod(start, shard_elements)
        taken = min(end - start, shard_elements - within)
        yield shard, within, taken
        start += taken
