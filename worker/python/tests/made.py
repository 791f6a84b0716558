"""What servers make of a seed and a distribution, computed again from docs/protocol.md."""

import math
from statistics import NormalDist

import numpy as np

_M = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_STANDARD = NormalDist()


def _philox(seed: int, counter: list[np.ndarray]) -> list[np.ndarray]:
    """Philox 4x32-10 of arrays of counters."""
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        products = _M[0] * counter[0], _M[1] * counter[2]
        counter = [
            (products[1] >> _32) ^ counter[1] ^ keys[0],
            products[1] & _LOW,
            (products[0] >> _32) ^ counter[3] ^ keys[1],
            products[0] & _LOW,
        ]
        keys = [(key + weyl) & _LOW for key, weyl in zip(keys, _W, strict=True)]
    return counter


def uniforms(seed: int, param: int, elements: int) -> np.ndarray:
    """The number between 0 and 1 of each element of a parameter."""
    pairs = np.arange((elements + 1) // 2, dtype=np.uint64)
    fixed = np.full_like(pairs, param), np.zeros_like(pairs)
    words = _philox(seed, [pairs & _LOW, pairs >> _32, *fixed])
    numbers = np.stack([words[0] | words[1] << _32, words[2] | words[3] << _32], axis=1).reshape(-1)[:elements]
    return ((numbers >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def constant(value: float, seed: int, param: int, elements: int) -> np.ndarray:
    return np.full(elements, value, np.float32)


def uniform(low: float, high: float, seed: int, param: int, elements: int) -> np.ndarray:
    weights = (low + (high - low) * uniforms(seed, param, elements)).astype(np.float32)
    return np.clip(weights, np.float32(low), np.nextafter(np.float32(high), np.float32(-math.inf)))


def normal(mean: float, std: float, seed: int, param: int, elements: int) -> np.ndarray:
    quantiles = np.array([_STANDARD.inv_cdf(u) for u in uniforms(seed, param, elements).tolist()])
    return (mean + std * quantiles).astype(np.float32)


def trunc_normal(mean: float, std: float, low: float, high: float, seed: int, param: int, elements: int) -> np.ndarray:
    first, last = _STANDARD.cdf((low - mean) / std), _STANDARD.cdf((high - mean) / std)
    shares = (first + (last - first) * uniforms(seed, param, elements)).tolist()
    weights = np.array([mean + std * _STANDARD.inv_cdf(share) for share in shares]).astype(np.float32)
    return np.clip(weights, np.float32(low), np.float32(high))
