"""Initial weights that the servers make by themselves, so that no process holds the model.

>>> params = {"w": longshore.init.Shape((1024, 1024), "bf16")}  # doctest: +SKIP
>>> client = longshore.Client(params, hyper, initial={"w": longshore.init.normal(0.0, 0.02)}, initial_seed=1)  # doctest: +SKIP

The distributions and their numbers are those of ``torch.nn.init``; the numbers drawn are others. They depend on the seed, a
parameter's place in the order of ``params`` and an element's place in the parameter alone: not on servers, tiers or shards.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from longshore.errors import invalid

#: What the Rust half takes of a parameter: kind and numbers, of which parameter it has the drawn weights, and from which element on.
Part = tuple[str, tuple[float, ...], int, int]

_WIRE = {"fp32", "bf16", "fp16"}


@dataclass(frozen=True)
class Init:
    """A parameter's initial weights. The functions of this module return it."""

    kind: str
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Shape:
    """A parameter that has no memory in this process.

    Args:
        shape: any but empty.
        dtype: of its weights as they are pulled: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
    """

    shape: tuple[int, ...]
    dtype: str = "fp32"

    @property
    def wire(self) -> str:
        if self.dtype not in _WIRE:
            raise invalid("dtype", repr(self.dtype), 'one of "fp32", "bf16", "fp16"', "name one of them")
        return self.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def zeros() -> Init:
    return constant(0.0)


def ones() -> Init:
    return constant(1.0)


def constant(value: float) -> Init:
    return Init("constant", (float(value),))


def uniform(low: float = 0.0, high: float = 1.0) -> Init:
    """From ``low`` on, and below ``high``."""
    return Init("uniform", (float(low), float(high)))


def normal(mean: float = 0.0, std: float = 1.0) -> Init:
    return Init("normal", (float(mean), float(std)))


def trunc_normal(mean: float = 0.0, std: float = 1.0, low: float = -2.0, high: float = 2.0) -> Init:
    """Normally distributed, given that the weight is from ``low`` to ``high``."""
    return Init("trunc_normal", (float(mean), float(std), float(low), float(high)))


#: Of a parameter that rank 0 uploads.
UPLOADED = Init("uploaded")


def given(
    initial: Mapping[str, Init], seed: int, names: Collection[str], shapes: Collection[str]
) -> tuple[int, list[Part]] | None:
    """What the Rust half takes; None where every parameter is uploaded. ``shapes`` are the parameters without memory.

    Raises:
        InvalidError: naming a parameter that does not exist, or has neither weights nor an ``initial``.
    """
    for name, init in initial.items():
        if name not in names:
            raise invalid("initial", f"with {name}", "of the names of parameters", "pass names that are in params")
        if not isinstance(init, Init):
            limit = "what a function of longshore.init returns"
            raise invalid(f"initial of {name}", type(init).__name__, limit, "pass longshore.init.normal(0.0, 0.02), for example")
    for name in shapes:
        if initial.get(name, UPLOADED) == UPLOADED:
            raise invalid(name, "a shape without weights", "in initial", "say what its weights are, or pass an array of them")
    if not 0 <= seed < 2**64:
        raise invalid("initial_seed", seed, f"in 0..{2**64}", "choose another number")
    if not initial:
        return None
    inits = [initial.get(name, UPLOADED) for name in names]
    return seed, [(init.kind, init.numbers, number, 0) for number, init in enumerate(inits)]
