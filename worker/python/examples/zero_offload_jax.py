"""ZeRO-Offload in JAX: the device has 16-bit weights and gradients, and everything else of Adam is on optimizer servers.

    python zero_offload_jax.py [SERVERS]

A small transformer learns to count by threes in four ways: with optax, with exact steps, with 16 bits on the device, and with delayed
steps. Transfers and updates of delayed steps run while the next gradient is computed (ZeRO-Offload's one-step delayed parameter update).
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import longshore
import longshore.jax

WORDS, LENGTH, WIDTH, HEADS, DEPTH = 64, 16, 32, 4, 2
HYPER = longshore.Hyper(lr=3e-3, weight_decay=1e-2)
CLIP = 1.0
Tree = Any


def init(seed: int = 0) -> Tree:
    """Returns the weights of a transformer, in fp32."""
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return jnp.asarray(draw.normal(size=(rows, columns)) / np.sqrt(rows), jnp.float32)

    layers = [
        {
            "attention_norm": jnp.ones(WIDTH),
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "mlp_norm": jnp.ones(WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }
        for _ in range(DEPTH)
    ]
    return {"embed": matrix(WORDS, WIDTH), "place": matrix(LENGTH, WIDTH), "layers": layers, "head": matrix(WIDTH, WORDS)}


def norm(values: Any, scale: Any) -> Any:
    return values * jax.lax.rsqrt(jnp.mean(values**2, -1, keepdims=True) + 1e-5) * scale


def loss_of(params: Tree, tokens: Any) -> Any:
    """Returns the cross entropy of the next token; int32 ``[batch, LENGTH + 1]``."""
    hidden = params["embed"][tokens[:, :-1]] + params["place"]
    future = jnp.triu(jnp.full((LENGTH, LENGTH), -1e9, hidden.dtype), 1)
    for layer in params["layers"]:
        inner = norm(hidden, layer["attention_norm"]) @ layer["qkv"]
        query, key, value = jnp.moveaxis(inner.reshape(*inner.shape[:2], 3, HEADS, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH // HEADS).astype(np.float32)
        weights = jax.nn.softmax((scores + future).astype(jnp.float32)).astype(hidden.dtype)
        hidden += jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(hidden.shape) @ layer["out"]
        hidden += jax.nn.gelu(norm(hidden, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]
    logits = (hidden @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


forward_and_backward = jax.jit(jax.value_and_grad(loss_of))


def batch(step: int) -> Any:
    start = np.random.default_rng(step).integers(WORDS, size=(16, 1))
    return jnp.asarray((start + 3 * np.arange(LENGTH + 1)) % WORDS, jnp.int32)


def with_optax(steps: int) -> list[float]:
    """Returns the losses of the baseline: everything in fp32 on the device."""
    params = init()
    adamw = optax.adamw(HYPER.lr, weight_decay=HYPER.weight_decay)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), adamw)
    state = optimizer.init(params)

    @jax.jit
    def update(params: Tree, state: Tree, gradients: Tree) -> tuple[Tree, Tree]:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    losses = []
    for step in range(steps):
        loss, gradients = forward_and_backward(params, batch(step))
        params, state = update(params, state, gradients)
        losses.append(float(loss))
    return losses


def with_servers(steps: int, servers: str | None = None, dtype: Any = jnp.float32, **options: Any) -> list[float]:
    """Returns the losses with ZeRO-Offload: gradients go to the servers, weights of the device's type come back."""
    params = jax.tree_util.tree_map(lambda leaf: leaf.astype(dtype), init())
    optimizer = longshore.jax.Client(params, HYPER, servers=servers, max_grad_norm=CLIP, **options)
    losses = []
    for step in range(steps):
        loss, gradients = forward_and_backward(params, batch(step))
        params = optimizer.step(gradients)
        losses.append(float(loss))
    # The last two steps of a delayed run may still be under way.
    optimizer.flush()
    optimizer.close()
    return losses


def main(servers: str | None = None, steps: int = 200) -> dict[str, list[float]]:
    """Trains in each way, and returns the losses by step."""
    ways: dict[str, Callable[[], list[float]]] = {
        "optax": lambda: with_optax(steps),
        "exact": lambda: with_servers(steps, servers),
        "exact, bf16": lambda: with_servers(steps, servers, jnp.bfloat16),
        "delayed, bf16": lambda: with_servers(steps, servers, jnp.bfloat16, delay=1, warmup_steps=steps // 5),
    }
    losses = {name: way() for name, way in ways.items()}
    print("loss at step " + "".join(f"{name:>15}" for name in losses))
    for step in sorted({*range(0, steps, max(steps // 8, 1)), steps - 1}):
        print(f"{step:12} " + "".join(f"{losses[name][step]:15.5f}" for name in losses))
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
