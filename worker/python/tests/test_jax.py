"""JAX: the client for trees, and the optax transformation compared with optax's own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

import jax.numpy as jnp  # noqa: E402
import zero_offload_jax  # noqa: E402

import longshore  # noqa: E402
import longshore.jax  # noqa: E402
from longshore import errors  # noqa: E402

# Compilations would take most of the time.
jax.config.update("jax_disable_most_optimizations", True)

Tree = Any
STEPS = 40
#: fp32 holds these numbers and their combinations exactly, so rounding of constants makes no difference. With other
#: numbers it would. optax computes bias corrections in fp32: 0.999 is off by 1e-8 there, and the first updates by 7e-6.
#: Torch and the servers compute lr * weight_decay - 1 in fp32: 1 - 1e-7 is off by 2e-8 in each step.
EXACT = {"b1": 0.875, "b2": 1 - 2**-10, "weight_decay": 2**-4}
LR = 2**-10


def init() -> Tree:
    draw = np.random.default_rng(0)

    def layer(rows: int, columns: int) -> Tree:
        bound = 1 / np.sqrt(rows)
        sizes = {"kernel": (rows, columns), "bias": (columns,)}
        return {name: jnp.asarray(draw.uniform(-bound, bound, size), jnp.float32) for name, size in sizes.items()}

    return {"layers": [layer(16, 32), layer(32, 32)], "head": layer(32, 4), "scale": jnp.float32(1.0)}


def loss_of(params: Tree, inputs: Any) -> Any:
    hidden = inputs
    for layer in params["layers"]:
        hidden = jax.nn.gelu(hidden @ layer["kernel"] + layer["bias"])
    logits = params["scale"] * (hidden @ params["head"]["kernel"] + params["head"]["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, inputs[:, :4].argmax(1)).mean()


def batch(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)


gradient = jax.jit(jax.grad(loss_of))


def trained(optimizer: Any, steps: int = STEPS, jit: Callable[[Any], Any] = jax.jit, params: Tree = None) -> tuple[Tree, Any]:
    params = init() if params is None else params
    state = optimizer.init(params)

    @jit
    def step(params: Tree, state: Any, inputs: Any) -> tuple[Tree, Any]:
        gradients = jax.grad(loss_of)(params, inputs)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, batch(number))
    return params, state


def distance(first: Tree, second: Tree) -> float:
    """Returns the largest relative distance of two trees, over the leaves."""
    pairs = zip(jax.tree_util.tree_leaves(first), jax.tree_util.tree_leaves(second), strict=True)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12)) for a, b in wide)


def same_bits(first: Tree, second: Tree) -> bool:
    pairs = zip(jax.tree_util.tree_leaves(first), jax.tree_util.tree_leaves(second), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def test_two_hundred_steps_agree_with_optax() -> None:
    ours, state = trained(longshore.jax.adamw(LR, **EXACT), steps=200)
    theirs, _ = trained(optax.adamw(LR, **EXACT), steps=200)
    assert int(state.count) == 200
    assert distance(ours, theirs) < 1e-6
    # With optax's defaults, results differ by the error of its bias corrections.
    assert distance(trained(longshore.jax.adamw(1e-3), steps=200)[0], trained(optax.adamw(1e-3), steps=200)[0]) < 2e-5


def test_the_client_for_trees_agrees_with_optax_and_keeps_placement() -> None:
    params = init()
    hyper = longshore.Hyper(lr=LR, beta1=EXACT["b1"], beta2=EXACT["b2"], weight_decay=EXACT["weight_decay"])
    params["scale"] = jax.device_put(params["scale"], jax.devices()[0])
    committed = [leaf.committed for leaf in jax.tree_util.tree_leaves(params)]
    with_client = longshore.jax.Client(params, hyper)
    for step in range(STEPS):
        params = with_client.step(gradient(params, batch(step)))
    assert [leaf.committed for leaf in jax.tree_util.tree_leaves(params)] == committed
    assert distance(params, trained(optax.adamw(LR, **EXACT))[0]) < 1e-6
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(params))
    assert jax.tree_util.tree_structure(params) == jax.tree_util.tree_structure(init())
    assert params["scale"].shape == ()
    assert same_bits(params, with_client.pull())


def test_schedule_mask_and_clipping() -> None:
    schedule = optax.linear_schedule(2**-8, 2**-10, STEPS)

    def matrices(params: Tree) -> Tree:
        return jax.tree_util.tree_map(lambda leaf: leaf.ndim > 1, params)

    options = {"weight_decay": 0.1, "mask": matrices}
    mine = longshore.jax.adamw(schedule, **options, max_grad_norm=0.5)
    ours, _ = trained(mine)
    theirs, _ = trained(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, **options)))
    unclipped, _ = trained(optax.adamw(schedule, **options))
    assert distance(ours, theirs) < 2e-5
    assert distance(ours, unclipped) > 1e-2
    assert mine.client.last_report.clip_coefficient <= 1


def test_each_execution_in_a_scan_is_one_step() -> None:
    mine = longshore.jax.adamw(LR, **EXACT)
    params = init()
    state = mine.init(params)

    @jax.jit
    def scanned(params: Tree, state: Any, inputs: Any) -> Any:
        def step(carry: Any, inputs: Any) -> Any:
            params, state = carry
            updates, state = mine.update(jax.grad(loss_of)(params, inputs), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), inputs)[0]

    params, state = scanned(params, state, np.stack([batch(step) for step in range(20)]))
    jax.block_until_ready(params)
    assert mine.client.client.step == int(state.count) == 20
    assert same_bits(params, trained(longshore.jax.adamw(LR, **EXACT), steps=20)[0])


@pytest.mark.parametrize("accumulate_on", ["servers", "worker"])
def test_updates_add_up_to_a_step(accumulate_on: str) -> None:
    inner = longshore.jax.adamw(LR, **EXACT, accumulate=4, accumulate_on=accumulate_on)
    several, state = trained(inner, steps=42)
    assert (inner.client.client.step, int(state.count)) == (10, 42)
    assert distance(several, trained(optax.MultiSteps(optax.adamw(LR, **EXACT), 4), steps=42)[0]) < 1e-6


def test_multi_steps_would_make_a_step_of_each_micro_step_and_is_refused() -> None:
    inner = longshore.jax.adamw(LR, **EXACT)
    with pytest.raises(jax.errors.JaxRuntimeError, match="servers make each step once"):
        trained(optax.MultiSteps(inner, every_k_schedule=4), steps=4)
    assert inner.client.client.step == 1


def test_without_jit_and_init_within_jit() -> None:
    eager, _ = trained(longshore.jax.adamw(LR, **EXACT), steps=5, jit=lambda step: step)
    mine = longshore.jax.adamw(LR, **EXACT)
    assert jax.eval_shape(mine.init, init()).count.shape == ()
    with pytest.raises(errors.UsageError, match="call init"):
        _ = mine.client
    state = jax.jit(mine.init)(init())
    params = init()
    for step in range(5):
        updates, state = jax.jit(mine.update)(gradient(params, batch(step)), state, params)
        params = optax.apply_updates(params, updates)
    assert distance(params, eager) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_arrive_exactly(dtype: Any) -> None:
    """Gradients are fp32. Updates have the gradients' type, and 16 bits do not hold each difference."""
    narrow = jax.tree_util.tree_map(lambda leaf: leaf.astype(dtype), init())
    mine, wide = longshore.jax.adamw(1e-2), optax.stateless(lambda updates, _: optax.tree.cast(updates, jnp.float32))
    params, _ = trained(optax.chain(wide, mine), steps=20, params=narrow)
    assert same_bits(params, mine.client.pull())
    assert params["head"]["kernel"].dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_wrappers_that_choose_between_updates(dtype: Any) -> None:
    """``lax.cond`` takes branches of one type, so updates have the gradients'. A refused gradient makes no step."""
    mine = longshore.jax.adamw(LR)
    wrapped = optax.apply_if_finite(mine, 3)
    params = {"w": jnp.ones(3, dtype)}
    state = wrapped.init(params)
    for gradients in ([1.0, 1.0, 1.0], [1.0, jnp.nan, 1.0], [1.0, 1.0, 1.0]):
        updates, state = wrapped.update({"w": jnp.array(gradients, dtype)}, state, params)
        params = optax.apply_updates(params, updates)
    assert updates["w"].dtype == params["w"].dtype == dtype
    assert mine.client.client.step == 2
    assert distance(params, mine.client.pull()) < 2**-7


def test_a_job_that_is_there_goes_on(servers: str) -> None:
    options = {"servers": servers, "job": "jax", **EXACT}
    first = longshore.jax.adamw(LR, **options)
    params, _ = trained(first, steps=7)
    first.client.close()
    second = longshore.jax.adamw(LR, **options)
    state = second.init(jax.tree_util.tree_map(jnp.zeros_like, params))
    assert int(state.count) == 7
    assert distance(second.client.pull(), params) < 1e-7
    other = longshore.jax.adamw(LR, **options)
    with pytest.raises(errors.LongshoreError, match=r"spec\.params|another job name"):
        other.init({"w": jnp.ones(3)})


def test_a_state_is_used_once() -> None:
    mine = longshore.jax.adamw(LR, **EXACT)
    params = init()
    state = mine.init(params)
    gradients = gradient(params, batch(0))
    mine.update(gradients, state, params)
    with pytest.raises(errors.StateError, match=r"state\.count is 0, but must be 1"):
        mine.update(gradients, state, params)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"state\.count is 0, but must be 1"):
        jax.block_until_ready(jax.jit(mine.update)(gradients, state, params))
    assert isinstance(mine.error, errors.StateError)
    assert mine.client.client.step == 1


def chained(behind: Any, **options: Any) -> Tree:
    """Returns the parameters after two steps with another transformation behind ours."""
    made = optax.chain(longshore.jax.adamw(LR, **EXACT, **options), behind)
    params = {"w": jnp.linspace(-1.0, 1.0, 8)}
    state = made.init(params)
    for _ in range(2):
        updates, state = made.update({"w": jnp.ones(8)}, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_zero_grad_of_the_client_gives_an_interrupted_update_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    results = []
    for is_interrupted in (False, True):
        optimizer, params = longshore.jax.adamw(1e-2, accumulate=2), init()
        state = optimizer.init(params)
        if is_interrupted:
            _, after = optimizer.update(gradient(params, batch(9)), state, params)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(longshore.Client, "commit", interrupted)
                optimizer.update(gradient(params, batch(9)), after, params)
            optimizer.client.zero_grad()
        for number in range(4):
            updates, state = optimizer.update(gradient(params, batch(number)), state, params)
            params = optax.apply_updates(params, updates)
        assert optimizer.client.client.step == 2
        results.append(params)
    assert same_bits(*results)


def test_what_changes_updates_behind_it_is_refused_in_the_next_step() -> None:
    for behind in (optax.scale(0.5), optax.keep_params_nonnegative()):
        with pytest.raises(errors.UsageError, match="params is other than what the last update gave"):
            chained(behind)
    assert same_bits(chained(optax.identity()), chained(optax.zero_nans()))
    chained(optax.scale(0.5), written_weights="drop")


def test_what_does_not_fit_is_refused_by_name() -> None:
    params = init()
    made = longshore.jax.Client(params, longshore.Hyper(lr=LR))
    gradients = gradient(params, batch(0))
    with pytest.raises(errors.GradientError, match=r"gradients is .*like params"):
        made.push({"head": gradients["head"]})
    wrong = {**gradients, "layers": [{**gradients["layers"][0], "kernel": jnp.ones((3, 3))}, gradients["layers"][1]]}
    with pytest.raises(errors.GradientError, match=r"gradient of layers\.0\.kernel is \[3, 3\], but must be \[16, 32\]"):
        made.push(wrong)
    made.step(gradients)
    with pytest.raises(errors.InvalidError, match=r"layers\.0\.bias is int32"):
        longshore.jax.Client({"layers": [{"bias": jnp.ones(3, jnp.int32)}]}, longshore.Hyper(lr=LR))
    with pytest.raises(errors.InvalidError, match="a.b is the name of two leaves"):
        longshore.jax.Client({"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(3)}, longshore.Hyper(lr=LR))
    mine = longshore.jax.adamw(LR)
    with pytest.raises(errors.InvalidError, match="params is None"):
        mine.update(gradients, mine.init(params))
    injected = optax.inject_hyperparams(longshore.jax.adamw)(learning_rate=LR)
    with pytest.raises(errors.InvalidError, match="learning_rate is an array"):
        trained(injected, steps=1)


def test_a_tree_without_leaves_opens_no_job() -> None:
    """``optax.tree.map_params`` calls ``init`` of a placeholder while the job runs."""
    mine = longshore.jax.adamw(LR)
    params = {"w": jnp.ones(3)}
    updates, state = mine.update(params, mine.init(params), params)
    assert optax.tree.map_params(mine, lambda leaf: leaf, state) == state
    mine.update(params, state, optax.apply_updates(params, updates))
    assert mine.client.client.step == 2


def test_a_rate_for_one_update() -> None:
    mine = longshore.jax.adamw(LR, **EXACT)
    params = init()
    state = mine.init(params)
    gradients = gradient(params, batch(0))
    updates, state = jax.jit(mine.update)(gradients, state, params, learning_rate=jnp.float32(0.0))
    assert same_bits(optax.apply_updates(params, updates), params)
    updates, state = mine.update(gradients, state, params, learning_rate=LR)
    assert int(state.count) == 2
    assert not same_bits(optax.apply_updates(params, updates), params)


def test_the_example(servers: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps = 20
    losses = zero_offload_jax.main(servers, steps)
    assert losses["exact"] == pytest.approx(losses["optax"], rel=1e-3)
    assert losses["exact, bf16"] == pytest.approx(losses["optax"], rel=0.1)
    assert losses["delayed, bf16"][: steps // 5] == losses["exact, bf16"][: steps // 5]
    assert losses["delayed, bf16"][-1] < 0.8 * losses["delayed, bf16"][0]
    assert "delayed, bf16" in capsys.readouterr().out
