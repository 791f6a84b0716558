"""The flat space: places of parameters, blocks, shards and chunks, and the wire format of elements."""

import math
import zlib
from dataclasses import dataclass

import numpy as np

BLOCK = 65536
ALIGN = 64
CHUNK_BYTES = 1 << 20


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Returns the upper halves, rounded to nearest even. No value is NaN; values beyond the range become inf."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def encode(values: np.ndarray, dtype: str) -> bytes:
    return (to_bf16(values).astype("<u2") if dtype == "bf16" else values.astype("<f4")).tobytes()


def decode(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "f32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the values after rounding to the wire's dtype."""
    return decode(encode(values, dtype), dtype)


def chunks(data: bytes):
    """Yields (chunk, payload, CRC-32) for each MiB of a shard's data."""
    for chunk, start in enumerate(range(0, len(data), CHUNK_BYTES)):
        payload = data[start : start + CHUNK_BYTES]
        yield chunk, payload, zlib.crc32(payload)


@dataclass
class Layout:
    """Parameters end to end, each at the next multiple of 64 elements. The flat space is cut into shards, which servers own."""

    parameters: list  # slices of the flat space
    elements: int
    shard_elements: int
    servers: int

    @staticmethod
    def of(shapes, shard_elements: int, servers: int) -> "Layout":
        parameters, start = [], 0
        for shape in shapes:
            end = start + math.prod(shape)
            parameters.append(slice(start, end))
            start = round_up(end, ALIGN)
        return Layout(parameters, round_up(start, BLOCK), shard_elements, servers)

    @property
    def shards(self):
        """Returns each shard's part of the flat space."""
        starts = range(0, self.elements, self.shard_elements)
        return [slice(start, min(start + self.shard_elements, self.elements)) for start in starts]

    @property
    def owners(self):
        """Returns the owner of each shard: servers take turns."""
        return [shard % self.servers for shard in range(len(self.shards))]

    def owned(self, server: int):
        """Returns (shard, its part of the flat space) for one server."""
        return [(shard, part) for shard, part in enumerate(self.shards) if self.owners[shard] == server]

    def flat(self, values_of):
        """Returns a flat space with `values_of` each parameter's number of elements, and zeros as padding."""
        flat = np.zeros(self.elements, np.float32)
        for part in self.parameters:
            flat[part] = values_of(part.stop - part.start)
        return flat
