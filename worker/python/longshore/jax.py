"""JAX: pytrees of parameters whose optimizer state lives on optimizer servers.

:class:`Client` is the direct way: a jitted function computes gradients, and ``step`` sends them and returns the new parameters.
:func:`adamw` is an optax transformation, which also works inside ``jax.jit``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from longshore import client
from longshore.errors import GradientError, InvalidError, StateError, UsageError, invalid
from longshore.transfer.job import Hyper, StepReport
from longshore.transfer.options import JobOptions

__all__ = ["Client", "Transformation", "adamw"]

#: Number of leaves, and of elements in each, that an update compares with the servers' to notice foreign changes.
_LEAVES, _ELEMENTS = 8, 64
#: Largest difference, in roundings, between a compared element and the servers' one. Adding an update rounds once.
_ROUNDINGS = 4

Tree = Any
"""A pytree of arrays."""


def _names(tree: Tree) -> list[str]:
    """Returns the name of each leaf, such as ``layers.0.kernel``."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in paths]


class Client:
    """:class:`longshore.Client` for a pytree: one rank of a job, with trees in place of mappings.

    >>> optimizer = longshore.jax.Client(params, longshore.Hyper(lr=1e-3))  # doctest: +SKIP
    >>> for batch in batches:  # doctest: +SKIP
    ...     loss, gradients = value_and_grad(params, batch)
    ...     params = optimizer.step(gradients)

    The client has side effects, so its calls stand between calls of jitted functions, not in them. Parameters keep their types and their
    placement, also sharded over the devices of this process.

    Args:
        params: a pytree of arrays of fp32, bf16 or fp16. Leaves are named by their paths.
        hyper: hyperparameters of all leaves, or one set for each group.
        decays: a pytree like ``params`` of booleans: True puts a leaf into group 0, False into group 1, like leaves that ``optax``'s
            ``mask`` excludes from weight decay. ``hyper`` then has two sets, or weight decay is 0 for group 1.
        **options: as for :class:`longshore.Client`, with ``rule``.

    Raises:
        InvalidError: naming the leaf or argument, its limit and a remedy.
        LongshoreError: any other of :mod:`longshore.errors`.
    """

    def __init__(
        self,
        params: Tree,
        hyper: Hyper | tuple[Hyper, Hyper],
        *,
        decays: Tree | None = None,
        rule: str = "adamw",
        **options: Unpack[JobOptions],
    ) -> None:
        self._tree: Any
        leaves, self._tree = jax.tree_util.tree_flatten(params)
        self._names = _names(params)
        if len(set(self._names)) != len(leaves):
            twice = next(name for number, name in enumerate(self._names) if name in self._names[:number])
            raise invalid(twice, "the name of two leaves", "of one", "take the dots out of the keys of dictionaries")
        # An uncommitted leaf stays so: a committed one in its place would have jitted functions compiled again.
        self._placed = [leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves]
        flags, tree = jax.tree_util.tree_flatten(decays) if decays is not None else ([True] * len(leaves), self._tree)
        if tree != self._tree:
            raise invalid("decays", str(tree), f"like params, {self._tree}", "give a boolean for each leaf")
        apart = [name for name, flag in zip(self._names, flags, strict=True) if not flag]
        self._is_grouped = bool(apart)
        self._inner = client.Client(
            self._by_name(leaves), self._each(hyper), rule=rule, groups=[apart] if apart else [], **options
        )

    def _each(self, hyper: Hyper | tuple[Hyper, Hyper]) -> Hyper | tuple[Hyper, ...]:
        if not self._is_grouped or not isinstance(hyper, Hyper):
            return hyper
        return hyper, replace(hyper, weight_decay=0.0)

    def _by_name(self, leaves: list[Any]) -> dict[str, Any]:
        return dict(zip(self._names, leaves, strict=True))

    @property
    def client(self) -> client.Client:
        """The :class:`longshore.Client` below, for calls that need no trees."""
        return self._inner

    @property
    def last_report(self) -> StepReport | None:
        """Report of the newest decided step; None before the first."""
        return self._inner.last_report

    def push(self, gradients: Tree, scale: float = 1.0) -> None:
        """Sends the gradients of one micro-step, each as soon as its device has copied it to the host.

        Raises:
            GradientError: for a tree of another structure, or naming a leaf of another shape. Nothing was sent of such a tree.
        """
        leaves, tree = jax.tree_util.tree_flatten(gradients)
        if tree != self._tree:
            raise invalid("gradients", str(tree), f"like params, {self._tree}", "differentiate by the same tree", GradientError)
        shapes = self._inner.shapes
        for name, leaf in zip(self._names, leaves, strict=True):
            if tuple(np.shape(leaf)) != shapes[name]:
                limit = f"{list(shapes[name])}, as when the job was opened"
                raise invalid(f"gradient of {name}", list(np.shape(leaf)), limit, "give the parameter's own", GradientError)
        for leaf in leaves:
            if hasattr(leaf, "copy_to_host_async"):
                leaf.copy_to_host_async()
        for name, leaf in self._by_name(leaves).items():
            self._inner.push({name: np.asarray(leaf)}, scale)

    def commit(self, hyper: Hyper | tuple[Hyper, Hyper] | None = None) -> int:
        """Ends the step, as :meth:`longshore.Client.commit` does."""
        return self._inner.commit(None if hyper is None else self._each(hyper))

    def pull(self) -> Tree:
        """Waits for the next step's parameters, as :meth:`longshore.Client.pull` does."""
        arrays = self._inner.pull()
        leaves = [
            jnp.asarray(arrays[name]) if placed is None else jax.device_put(arrays[name], placed)
            for name, placed in zip(self._names, self._placed, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self._tree, leaves)

    def step(self, gradients: Tree, hyper: Hyper | tuple[Hyper, Hyper] | None = None) -> Tree:
        """Pushes, commits and pulls: a whole step of one gradient.

        Returns:
            The next step's parameters.
        """
        self.push(gradients)
        self.commit(hyper)
        return self.pull()

    def zero_grad(self) -> None:
        """Drops the gradients pushed since the last commit, as :meth:`longshore.Client.zero_grad` does."""
        self._inner.zero_grad()

    def flush(self) -> Tree:
        """Waits until every step is decided.

        Returns:
            The newest parameters, also with ``delay=1``. The next step computes with these.
        """
        self._inner.flush()
        return self.pull()

    def checkpoint(self, name: str) -> str:
        """Makes the servers write a checkpoint, as :meth:`longshore.Client.checkpoint` does."""
        return self._inner.checkpoint(name)

    def close(self) -> None:
        """Gives the rank up, as :meth:`longshore.Client.close` does."""
        self._inner.close()


class State(NamedTuple):
    """An optax state: only a count. The rest is on the servers.

    Attributes:
        count: calls of ``update`` since the job began, int32 ``[]``; ``accumulate`` calls make a step.
    """

    count: Any


class Transformation(optax.GradientTransformationExtraArgs):
    """Result of :func:`adamw`: ``init`` and ``update`` of optax, with the job's client and error."""

    _remote: "_Remote"

    @property
    def client(self) -> Client:
        """The job's client, once ``init`` has run."""
        return self._remote.opened()

    @property
    def error(self) -> Exception | None:
        """Error of the last ``init`` or ``update``. A jitted function raises JAX's own exception, whose message contains it."""
        return self._remote.error


class _Remote:
    """The job of one transformation, and the host functions that JAX calls for it."""

    def __init__(self, hyper: Hyper, decays: Any, options: JobOptions) -> None:
        self._hyper = hyper
        self._decays = decays
        self._options = options
        self._client: Client | None = None
        #: Number of calls of ``update`` that make a step.
        self.accumulate = options.get("accumulate", 1)
        #: Some elements of the parameters that the last step gave; None before the first step.
        self._given: list[np.ndarray[Any, Any]] | None = None
        self.error: Exception | None = None

    def opened(self) -> Client:
        if self._client is None:
            raise UsageError("the transformation has no job yet: call init with the parameters first")
        return self._client

    def call(self, act: Callable[..., Any], like: Tree, *arguments: Any) -> Any:
        """Calls the host function: at once, or at run time of the function being traced."""

        def kept(*arguments: Any) -> Any:
            self.error = None
            try:
                return act(*arguments)
            except Exception as error:
                self.error = error
                raise

        # Within a trace all arguments may be concrete, as those over which a branch of lax.cond closes. A new result
        # such as the sum below always shows the trace.
        if any(isinstance(leaf, jax.core.Tracer) for leaf in [*jax.tree_util.tree_leaves(arguments), jnp.add(0, 0)]):
            return io_callback(kept, like, *arguments, ordered=True)
        return kept(*arguments)

    def open(self, params: Tree) -> np.ndarray[Any, Any]:
        if self._client is not None:
            self._client.close()
            self._client = None
        decays = self._decays(params) if callable(self._decays) else self._decays
        self._client = Client(params, self._hyper, decays=decays, **self._options)
        self._given = None
        return np.asarray(self._client.client.step * self.accumulate, np.int32)

    def step(self, like: Tree, gradients: Tree, count: Any, seen: list[Any], lr: Any) -> Tree:
        found = self.opened()
        done = found.client.step * self.accumulate + found.client._micro_steps
        if int(count) != done:
            raise invalid(
                "state.count",
                int(count),
                f"{done}, the updates of job {found.client.job}",
                "servers make each step once: pass the state that the last update returned, to a transformation whose job it is, and accumulate=n in "
                "place of optax.MultiSteps",
                StateError,
            )
        self._check(seen)
        found.push(gradients, 1 / self.accumulate)
        if found.client._micro_steps < self.accumulate:
            # ``update`` ignores these values, and returns a difference of 0 until a step is made.
            return jax.tree_util.tree_map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
        found.commit(replace(self._hyper, lr=float(lr)))
        pulled = list(found.client.pull().values())
        self._given = [np.array(some) for some in _some(pulled)]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(gradients), pulled)

    def _check(self, seen: list[Any]) -> None:
        """Refuses parameters that differ from the last update's: servers continue from their own, and the change would be lost."""
        if self._given is None or self._options.get("written_weights") == "drop":
            return
        for given, mine in zip(self._given, map(np.asarray, seen), strict=True):
            # The caller has added an update to old parameters, which rounds once. The limit is relative to the larger
            # value.
            limit = _ROUNDINGS * float(jnp.finfo(given.dtype).eps)
            apart = np.abs(given.astype(np.float64) - mine.astype(np.float64))
            if np.any(apart > limit * max(np.max(np.abs(given), initial=0.0), np.max(np.abs(mine), initial=0.0))):
                raise invalid(
                    "params",
                    "other than what the last update gave",
                    "those that optax.apply_updates made of it, since servers go on from their own",
                    "put what changes updates before this transformation in optax.chain, not behind it; leave constraints on parameters out; or "
                    "pass written_weights='drop' if what is written may be lost",
                    UsageError,
                )


def _some(leaves: list[Any]) -> list[Any]:
    """Returns neighbouring elements of some leaves: slices, so that no device has to gather a leaf."""
    chosen = leaves[:: max(1, len(leaves) // _LEAVES)]
    return [leaf[(0,) * (leaf.ndim - 1)][:_ELEMENTS] if leaf.ndim and leaf.size else leaf.reshape(-1) for leaf in chosen]


def adamw(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    **options: Unpack[JobOptions],
) -> Transformation:
    """Returns ``optax.adamw`` whose state lives on optimizer servers.

    ``init`` opens the job and ``update`` makes a step of it. Traced calls have side effects, so they reach the host by an ordered
    ``io_callback``. The compiler may drop, repeat or move a ``pure_callback``. So each works inside ``jax.jit``, ``lax.scan`` and
    ``lax.cond``, once for each execution, and not under ``vmap``. Each call waits for the servers; use :class:`Client` to overlap a step
    with other work of the host.

    ``update`` returns new minus old parameters in the gradient's type, as optax does. ``optax.apply_updates`` gives the servers' parameters to
    one rounding, which does not accumulate, since servers update their own. For parameters of 16 bits with fp32 gradients it gives them
    exactly. A later link of an ``optax.chain`` that changes updates makes the next step raise: put it before this transformation.

    The state is a count. A count other than the job's is refused, so no state is used twice. Therefore ``accumulate=n`` replaces
    ``optax.MultiSteps``, which updates in each micro-step and drops most updates. A step uses the mean of n gradients, and the other n - 1
    updates are 0. ``optax.inject_hyperparams`` would make a job for each step: pass a schedule, or ``update(..., learning_rate=...)``.

    Args:
        learning_rate: a number, or a schedule of the count.
        b1, b2, eps, weight_decay: as in optax.
        mask: the leaves that decay: a tree of booleans, or a function of the parameters that returns one.
        **options: options of the job; see :class:`longshore.transfer.options.Options`. Clip with ``max_grad_norm``.

    Raises:
        InvalidError: for an array as ``learning_rate``.
    """
    if isinstance(learning_rate, jax.Array):
        remedy = "pass a schedule, or update(..., learning_rate=...) in place of optax.inject_hyperparams"
        raise invalid("learning_rate", "an array", "a number or a schedule", remedy)
    hyper = Hyper(
        lr=0.0 if callable(learning_rate) else float(learning_rate), beta1=b1, beta2=b2, eps=eps, weight_decay=weight_decay
    )
    remote = _Remote(hyper, mask, options)

    def init(params: Tree) -> State:
        # optax.tree.map_params calls init with a tree without leaves while the job runs. Such a call opens no job.
        if not jax.tree_util.tree_leaves(params):
            return State(jnp.zeros((), jnp.int32))
        return State(jnp.asarray(remote.call(remote.open, jax.ShapeDtypeStruct((), jnp.int32), params)))

    def update(
        updates: Tree, state: State, params: Tree | None = None, *, learning_rate: Any = learning_rate, **_: Any
    ) -> tuple[Tree, State]:
        if params is None:
            raise InvalidError("params is None, but must be given: call update(gradients, state, params)", field="params")
        like = jax.tree_util.tree_map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)
        seen = _some([jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves(params)])
        lr = learning_rate(state.count // remote.accumulate) if callable(learning_rate) else learning_rate
        if isinstance(lr, jax.Array):
            new = remote.call(partial(remote.step, like), like, updates, state.count, seen, lr)
        else:
            # A Python number does not pass as an argument, where JAX would round it to fp32.
            new = remote.call(lambda updates, count, seen: remote.step(like, updates, count, seen, lr), like, updates, state.count, seen)
        count = state.count + 1
        moves = count % remote.accumulate == 0

        def difference(new: Any, old: Any, gradient: Any) -> Any:
            return jnp.where(moves, new.astype(jnp.float32) - old.astype(jnp.float32), 0.0).astype(jnp.result_type(gradient))

        return jax.tree_util.tree_map(difference, new, params, updates), State(count)

    made = Transformation(init, update)
    made._remote = remote
    return made
