"""The plain client: NumPy and DLPack in and out, in each way that a job can run."""

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from test_streaming_and_delay import Delayed

import longshore
from longshore import errors

STEPS = 30
Arrays = dict[str, np.ndarray[Any, Any]]


def weights() -> Arrays:
    """Returns weights of two layers, and a scale without axes."""
    draw = np.random.default_rng(7)
    shapes = {"in": (6, 5), "bias": (5,), "out": (5, 1)}
    made = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {**made, "scale": np.array(1.5, np.float32)}


def gradients(params: Arrays, step: int) -> Arrays:
    """Returns gradients of the squared error of scale * tanh(x in + bias) out. Its target is the sum of x."""
    inputs = np.random.default_rng(step).normal(size=(8, 6)).astype(np.float32)
    hidden = np.tanh(inputs @ params["in"] + params["bias"])
    plain = hidden @ params["out"]
    slope = 2 * (params["scale"] * plain - inputs.sum(1, keepdims=True)) / len(inputs)
    back = (params["scale"] * slope) @ params["out"].T * (1 - hidden**2)
    return {
        "in": inputs.T @ back,
        "bias": back.sum(0),
        "out": params["scale"] * (hidden.T @ slope),
        "scale": np.float32((plain * slope).sum()),
    }


def same(first: Arrays, second: Arrays) -> bool:
    return list(first) == list(second) and all(np.array_equal(first[name], second[name]) for name in first)


def train(client: longshore.Client, steps: range = range(1, STEPS + 1)) -> Arrays:
    params = client.pull()
    for step in steps:
        client.push(gradients(params, step))
        assert client.commit() == step
        params = client.pull()
    return params


def plain_loop(delay: int = 0, warmup: int = STEPS) -> Arrays:
    """Returns the result of exact and delayed steps."""
    rules = {name: Delayed(value) for name, value in weights().items()}
    images = {0: weights()}
    for step in range(1, STEPS + 1):
        reads = step - 1 if step <= warmup else max(step - 1 - delay, 0)
        made = gradients(images[reads], step)
        images[step] = {
            name: np.asarray(rule.step(made[name], step, 1e-2, delay and step + 1 > warmup)) for name, rule in rules.items()
        }
    return images[STEPS - delay]


HYPER = longshore.Hyper(lr=1e-2, weight_decay=1e-2)


@pytest.mark.parametrize("transport", ["memfd", "tcp"])
def test_exact_steps_equal_a_plain_loop(transport: str, servers: str) -> None:
    with longshore.Client(weights(), HYPER, servers=servers, job="plain", transport=transport) as client:
        assert same(client.pull(), weights())
        trained = train(client)
        assert same(trained, plain_loop())
        assert same(client.pull(), trained), "weights can be pulled again"
        assert (client.step, client.version) == (STEPS, STEPS)


def test_delayed_steps_equal_a_plain_delayed_loop() -> None:
    client = longshore.Client(weights(), HYPER, delay=1, warmup_steps=5)
    trained = train(client)
    assert same(trained, plain_loop(delay=1, warmup=5))
    assert client.version == STEPS - 1
    assert client.flush() == STEPS
    newest = client.pull()
    assert client.version == STEPS
    assert not same(newest, trained)


def test_groups_and_hyperparameters_by_step() -> None:
    client = longshore.Client(weights(), [HYPER, longshore.Hyper(lr=0.0)], groups=[["bias", "scale"]])
    trained = train(client)
    before = weights()
    assert all(np.array_equal(trained[name], before[name]) is (name in {"bias", "scale"}) for name in before)
    client.push(gradients(trained, 0))
    client.commit(longshore.Hyper(lr=0.0))
    assert same(client.pull(), trained)
    with pytest.raises(errors.InvalidError, match="hyper is 1 of them, but must be 2"):
        client.commit([HYPER])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dlpack_in_and_out(dtype: torch.dtype) -> None:
    """Torch tensors, also in bf16, which NumPy lacks: the client gives the same bits as the optimizer."""
    start = {name: torch.from_numpy(np.array(value)).to(dtype) for name, value in weights().items()}
    client = longshore.Client({name: value.clone() for name, value in start.items()}, HYPER)
    params = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = longshore.AdamW(params.items(), lr=1e-2, weight_decay=1e-2)
    out = {name: torch.empty_like(value) for name, value in start.items()}
    assert client.pull(out=out) is not None
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in params.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            # The gradient's elements lie in another order. A dtype known to NumPy is then copied on the way.
            crosses = parameter.ndim == 2 and dtype is not torch.bfloat16
            client.push({name: parameter.grad.t().contiguous().t() if crosses else torch._neg_view(-parameter.grad)})
        optimizer.step()
        client.commit()
        client.pull(out=out)
    assert all(torch.equal(out[name], params[name]) for name in params)
    wide = client.pull(dtype="fp32")
    assert all(np.array_equal(wide[name], params[name].detach().float().numpy()) for name in params)


def test_two_ranks_share_a_job_and_a_third_client_goes_on(servers: str) -> None:
    options = {"servers": servers, "job": "ranks", "world_size": 2, "deadline": 60.0}
    others = {name: np.full_like(value, 9) for name, value in weights().items()}
    ranks = [longshore.Client(start, HYPER, rank=rank, **options) for rank, start in enumerate((weights(), others))]
    alone = longshore.Client(weights(), HYPER)
    for step in range(10):
        pulled, params = [client.pull() for client in ranks], alone.pull()
        assert same(*pulled)
        for rank, client in enumerate(ranks):
            client.push(gradients(pulled[rank], 2 * step + rank))
        pair = gradients(params, 2 * step), gradients(params, 2 * step + 1)
        alone.push({name: (pair[0][name] + pair[1][name]) / 2 for name in params})
        for client in (*ranks, alone):
            client.commit()
    found, params = ranks[0].pull(), alone.pull()
    for name in params:
        np.testing.assert_allclose(found[name], params[name], rtol=1e-4, atol=1e-5)
    for client in ranks:
        client.close()
    other = longshore.Client(weights(), HYPER, rank=0, **options)
    assert other.step == 10
    assert same(other.pull(), found)


def test_a_checkpoint_and_the_hash_of_all_state(tmp_path: pathlib.Path) -> None:
    server = longshore.Server(checkpoint_dir=tmp_path, memory=64 << 20)
    first = longshore.Client(weights(), HYPER, servers=server, job="kept")
    second = longshore.Client(weights(), HYPER)
    train(first)
    train(second)
    assert first.state_hash() == second.state_hash()
    assert first.state_hash()[0] == STEPS
    assert first.checkpoint("here") == "here"
    assert (tmp_path / "kept" / "here" / "manifest.json").exists()


WITHOUT_FRAMEWORKS = """
import sys
sys.modules.update(dict.fromkeys(("torch", "jax", "ml_dtypes")))  # importing one of them fails
import numpy, longshore
sys.path.insert(0, {tests!r})
client = longshore.Client({{"w": numpy.ones((3, 2), numpy.float32)}}, longshore.Hyper(lr=0.5))
client.push({{"w": numpy.ones((3, 2), numpy.float16)}})
client.commit()
print(client.pull()["w"].tolist(), longshore.StepReport.__name__)
try:
    client.pull(dtype="bf16")
except longshore.errors.InvalidError as error:
    print(error)
"""


def test_it_needs_no_framework() -> None:
    code = WITHOUT_FRAMEWORKS.format(tests=str(pathlib.Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    values, refusal = done.stdout.splitlines()
    assert values == "[[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]] StepReport"
    assert "dtype is bf16" in refusal and "install ml_dtypes" in refusal


def test_importing_the_package_imports_neither_numpy_nor_a_framework() -> None:
    code = "import sys, longshore; longshore.errors, longshore.Server; print({'numpy', 'torch', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class Elsewhere:
    """An array in a device's memory."""

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not from here")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("no implicit copies")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"in": np.ones((6, 5))}, {}, "in is float64, but must be fp32, bf16 or fp16"),
        ({"in": np.ones((0, 5), np.float32)}, {}, "in is empty.*leave it out"),
        ({"in": np.ones((6, 5), ">f4")}, {}, "in is >f4"),
        ({"in": Elsewhere()}, {}, "in is Elsewhere.*copy it to the host first.*no implicit copies"),
        ({"in": torch.ones(6, 5, requires_grad=True)}, {}, "in is Tensor.*detach"),
        ({"in": torch.ones(6, 5, dtype=torch.int32)}, {}, r"in is torch.int32"),
        ({"in": longshore.Shape((2, 3))}, {}, "in is a shape without weights"),
        ({"in": longshore.Shape((2, 3))}, {"initial": {"in": None}}, "initial is dict, but must be a callable"),
        ({"in": longshore.Shape((2, 3))}, {"initial": lambda *_: np.zeros(1, np.float32)}, "of 1 elements, but must be of 6, from element 0 on"),
        ({}, {"groups": [["inn"]]}, "groups is with inn"),
        ({}, {"groups": [["in"], ["in"]]}, "groups is with a name twice"),
    ],
)
def test_what_cannot_be_a_job_is_refused_by_name(change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidError, match=message):
        longshore.Client(weights() | change, HYPER, **options)


def test_parameters_that_are_not_pushed_are_left_out_or_have_zeros() -> None:
    plain = longshore.Client(weights(), HYPER)
    zeros = longshore.Client(weights(), HYPER, missing_gradients="zeros")
    for client in (plain, zeros):
        client.push({"in": gradients(weights(), 0)["in"]})
        client.commit()
    left_out, decayed = plain.pull(), zeros.pull()
    assert np.array_equal(left_out["in"], decayed["in"])
    for name in ("bias", "out", "scale"):
        assert np.array_equal(left_out[name], weights()[name])
        assert np.array_equal(decayed[name], weights()[name] * np.float32(1 - 1e-2 * 1e-2))


def test_what_is_pushed_is_checked_before_any_of_it_leaves() -> None:
    client = longshore.Client(weights(), HYPER, missing_gradients="error")
    made = gradients(client.pull(), 0)
    with pytest.raises(errors.UsageError, match="no gradient was pushed"):
        client.commit()
    for wrong, message in (
        ({"in": made["in"].T}, r"gradient of in is \[5, 6\], but must be \[6, 5\]"),
        ({"inn": made["in"]}, "gradient of inn is of no parameter"),
        ({"scale": made["scale"].astype(np.float64)}, "gradient of scale is float64"),
    ):
        with pytest.raises(errors.LongshoreError, match=message):
            client.push({"bias": made["bias"]} | wrong)
    client.push({"bias": made["bias"]})
    with pytest.raises(errors.GradientError, match="gradient of bias is pushed again.*accumulate="):
        client.push({"in": made["in"], "bias": made["bias"]})
    with pytest.raises(errors.MissingGradientError, match="gradient of in is missing.*missing_gradients='skip' or 'zeros'"):
        client.commit()
    client.push({name: made[name] for name in ("in", "out", "scale")})
    with pytest.raises(errors.GradientError, match="gradient of in is of micro-step 2"):
        client.push(made)
    client.commit()
    again = longshore.Client(weights(), HYPER)
    again.push(made)
    again.commit()
    assert same(client.pull(), again.pull())


def test_where_weights_cannot_go() -> None:
    client = longshore.Client(weights(), HYPER)
    out = weights()
    with pytest.raises(errors.InvalidError, match="out is without in"):
        client.pull(out={"bias": out["bias"]})
    out["in"].flags.writeable = False
    with pytest.raises(errors.InvalidError, match="in is read-only"):
        client.pull(out=out)
    for array, message in (
        (torch.ones(5, 6).t(), "in is with gaps"),
        (torch._neg_view(torch.ones(6, 5)), "in is lazily negated"),
        (np.ones(3, np.float32), r"in is \[3\]"),
    ):
        with pytest.raises(errors.LongshoreError, match=message):
            client.pull(out=weights() | {"in": array})


def test_what_is_not_finite_is_skipped_with_a_warning() -> None:
    client = longshore.Client(weights(), HYPER)
    made = gradients(client.pull(), 0)
    made["out"][3] = np.inf
    client.push(made)
    with pytest.warns(RuntimeWarning, match=r"step 1 was skipped.*out"):
        client.commit()
    assert same(client.pull(), weights())
    assert client.last_report.skipped


def test_a_callable_makes_the_weights_of_shapes() -> None:
    wanted, asked = weights(), set()

    def initial(name: str, start: int, count: int) -> Any:
        asked.add(name)
        return wanted[name].ravel()[start : start + count]

    params = {name: longshore.Shape(array.shape) if array.ndim else array for name, array in wanted.items()}
    with longshore.Client(params, longshore.Hyper(lr=1e-3), initial=initial) as client:
        assert same(client.pull(), wanted)
    assert asked == {"in", "bias", "out"}
