"""Weights that the servers make: what a client pulls is what it named, and no array of them was ever given."""

import numpy as np
import pytest

import longshore
from longshore import errors, init

SHAPES = {"w": (300, 1000), "scale": (7,), "table": (50, 3), "head": (1000, 70)}
INITIAL = {
    "w": init.normal(0.5, 0.02),
    "scale": init.ones(),
    "head": init.trunc_normal(0.0, 1.0, -2.0, 2.0),
}
TABLE = np.arange(150, dtype=np.float32).reshape(50, 3)


def params() -> dict[str, np.ndarray | init.Shape]:
    return {name: TABLE if name == "table" else init.Shape(shape) for name, shape in SHAPES.items()}


def opened(**changed) -> longshore.Client:
    given = {"initial": INITIAL, "initial_seed": 3, **changed}
    return longshore.Client(params(), longshore.Hyper(lr=1e-3), **given)


def test_weights_are_those_named_and_train():
    client = opened()
    weights = client.pull()
    assert {name: array.shape for name, array in weights.items()} == SHAPES
    assert abs(weights["w"].mean() - 0.5) < 5 * 0.02 / 300_000**0.5
    assert abs(weights["w"].std() - 0.02) < 5 * 0.02 / 600_000**0.5
    assert np.abs(weights["head"]).max() <= 2.0
    assert abs(weights["head"].std() - 0.8796) < 0.01
    assert (weights["scale"] == 1).all()
    assert (weights["table"] == TABLE).all()
    before = {name: array.copy() for name, array in weights.items()}
    client.push({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
    client.commit()
    after = client.pull()
    assert all((after[name] != before[name]).all() for name in SHAPES)


def test_the_seed_alone_decides_whatever_the_shards():
    first = opened(shard_elements=65536).pull()
    same = opened(shard_elements=131072, job="other").pull()
    other = opened(initial_seed=4).pull()
    assert all((first[name] == same[name]).all() for name in SHAPES)
    assert (first["w"] != other["w"]).any()


def test_16_bit_weights_are_the_rounded_ones():
    given = {"w": init.Shape((64, 64), "bf16")}
    client = longshore.Client(given, longshore.Hyper(lr=1e-3), initial={"w": init.uniform(-1.0, 1.0)})
    exact = longshore.Client({"w": init.Shape((64, 64))}, longshore.Hyper(lr=1e-3), initial={"w": init.uniform(-1.0, 1.0)})
    rounded = np.asarray(client.pull()["w"]).astype(np.float32)
    assert np.abs(rounded - exact.pull()["w"]).max() <= 2**-9


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"initial": {**INITIAL, "v": init.ones()}}, ["initial", "with v", "names of parameters"]),
        ({"initial": {"w": init.ones()}}, ["scale", "a shape without weights"]),
        ({"initial": {**INITIAL, "w": "normal"}}, ["initial of w", "str", "longshore.init"]),
        ({"initial_seed": -1}, ["initial_seed", "-1"]),
        ({"initial": {**INITIAL, "w": init.normal(0.0, -1.0)}}, ["runs[0].std", "-1 (of parameter w)", "at least 0"]),
        ({"initial": {**INITIAL, "w": init.uniform(1.0, 1.0)}}, ["runs[0].high", "parameter w", "above low"]),
        ({"initial": {**INITIAL, "scale": init.constant(float("nan"))}}, ["constant", "NaN (of parameter scale)", "finite"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(changed, words):
    with pytest.raises(errors.InvalidError) as refused:
        opened(**changed)
    for word in words:
        assert word in str(refused.value)
