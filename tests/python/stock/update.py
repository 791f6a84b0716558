"""The servers' expected results in NumPy: sum, statistics, decision, update and state hash."""

import math
import struct

import numpy as np
from blake3 import blake3

from .layout import BLOCK, Layout, rounded


def summed(contributions) -> np.ndarray:
    """Returns the sum of the gradients in fp32, in order of micro-step, then rank."""
    total = np.full_like(contributions[0][0], -0.0)  # -0 keeps every value that is added to it
    for ranks in contributions:
        for gradient in ranks:
            total = total + gradient
    return total


def statistics(gradient):
    """Returns (sum of squares, first non-finite element or None) for each block."""
    for block in gradient.reshape(-1, BLOCK):
        broken = np.flatnonzero(~np.isfinite(block))
        yield float(np.sum(block.astype(np.float64) ** 2)), int(broken[0]) if broken.size else None


def power(base: float, exponent: int) -> float:
    """Returns a power by repeated squaring, from the lowest bit of the exponent."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def adamw(hyper, applied: int, weights, first, second, gradient):
    """Returns new weights and moments, in fp32. Scalars are formed in f64 and rounded once."""
    f32 = np.float32
    bias1 = 1.0 - power(hyper["beta1"], applied)
    weights = weights * f32(1.0 - hyper["lr"] * hyper["weight_decay"])
    first = first + (gradient - first) * f32(1.0 - hyper["beta1"])
    second = second * f32(hyper["beta2"]) + (f32(1.0 - hyper["beta2"]) * gradient) * gradient
    return weights - f32(hyper["lr"] / bias1) * (first / denominator(hyper, applied, second)), first, second


def denominator(hyper, applied: int, second):
    bias2 = 1.0 - power(hyper["beta2"], applied)
    return np.sqrt(second) * np.float32(1.0 / math.sqrt(bias2)) + np.float32(hyper["eps"])


def ahead_of(hyper, lr: float, applied: int, weights, first, second, gradient):
    """Returns the look-ahead: new weights minus image. Weights and moments are the new ones."""
    f32 = np.float32
    bias1 = 1.0 - power(hyper["beta1"], applied)
    known = f32(lr * hyper["beta1"] / bias1) * first + f32(lr * 2.0 * (1.0 - hyper["beta1"])) * gradient
    return known / denominator(hyper, applied, second) + f32(lr * hyper["beta1"] * hyper["weight_decay"]) * weights


class Reference:
    """The expected state of the whole job on the servers."""

    def __init__(self, layout: Layout, groups, dtype: str, weights):
        self.layout, self.groups, self.dtype = layout, groups, dtype
        self.version = self.applied = 0
        self.weights, self.first, self.second = weights, np.zeros_like(weights), np.zeros_like(weights)
        self.images = {0: rounded(weights, dtype)}

    def step(self, commit, gradient):
        """Makes the commit's version, from the sum of the gradients."""
        self.version += 1
        if commit.skip:  # the same weights under another number
            self.images[self.version] = self.images[self.version - 1]
            return
        self.applied += 1
        gradient = gradient * np.float32(commit.clip_coefficient / commit.gradient_scale)
        self._update(commit, gradient)
        image = self.weights
        if commit.HasField("look_ahead"):
            image = self.weights - self._ahead(commit, gradient)
        self.images[self.version] = rounded(image, self.dtype)

    def _parts(self, commit):
        """Yields (group, its hyperparameters, elements) for each parameter."""
        for group, part in zip(self.groups, self.layout.parameters):
            hyper = {field.name: value for field, value in commit.groups[group].ListFields()}
            yield group, {"weight_decay": 0.0} | hyper, part

    def _ahead(self, commit, gradient):
        ahead = np.zeros_like(self.weights)
        for group, hyper, part in self._parts(commit):
            state = [values[part] for values in (self.weights, self.first, self.second)]
            ahead[part] = ahead_of(hyper, commit.look_ahead.lr[group], self.applied, *state, gradient[part])
        return ahead

    def _update(self, commit, gradient):
        state = [self.weights.copy(), self.first.copy(), self.second.copy()]
        for _, hyper, part in self._parts(commit):
            old = [values[part] for values in state]
            for values, new in zip(state, adamw(hyper, self.applied, *old, gradient[part])):
                values[part] = new
        self.weights, self.first, self.second = state

    def saved(self):
        """Returns a copy for `restore`."""
        return self.version, self.applied, self.weights, self.first, self.second, dict(self.images)

    def restore(self, saved):
        self.version, self.applied, self.weights, self.first, self.second, self.images = saved
        self.images = dict(self.images)

    def block_hashes(self):
        """Returns the BLAKE3 of each block's weights and moments."""
        state = [values.astype("<f4").reshape(-1, BLOCK) for values in (self.weights, self.first, self.second)]
        return [blake3(b"".join(part.tobytes() for part in block)).digest() for block in zip(*state)]

    def state_hash(self) -> str:
        return state_hash(self.version, self.applied, self.block_hashes())


def state_hash(version: int, applied: int, block_hashes) -> str:
    start = b"longshore state v1" + struct.pack("<QQ", version, applied)
    return blake3(start + b"".join(block_hashes)).hexdigest()[:32]


def assert_same_bits(found: np.ndarray, expected: np.ndarray, what: str):
    differs = np.flatnonzero(found.view(np.uint32) != expected.view(np.uint32))
    if differs.size:
        at = differs[0]
        raise AssertionError(f"{what}: {differs.size} differ, the first at {at}: {found[at]}, must be {expected[at]}")
