"""Parameters that are out of use: of a model that was changed under its optimizer, or that no step has given a gradient.

A layer that is replaced after the optimizer was built leaves its old parameters without gradients, and its new ones without updates. Nothing
fails by itself: the loss falls as far as the rest of the model takes it.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from longshore import _params
from longshore.errors import UsageError, invalid

if TYPE_CHECKING:
    from longshore._connection import Connection
    from longshore._options import Options
    from longshore._params import Param

#: After so many steps a parameter that never had a gradient is named. Who is used in one batch of twenty, as an expert, is without one for
#: so long in fewer than one case of a hundred; and a run of thousands of steps has lost little.
FIRST_STEPS = 100


class Watch:
    """Where a model has its optimizer's parameters. It refers weakly to the model itself."""

    def __init__(self, models: Iterable[nn.Module], params: Iterable[tuple[str, Tensor]]) -> None:
        self._models = [weakref.ref(model) for model in models]
        # FSDP2 puts a module's whole parameters in the place of its sharded ones, for as long as it computes.
        self._params = [(name, tensor) for name, tensor in params if not _params.is_sharded(tensor)]
        #: The model's parameters by id, as they were when the model was found to be in order last.
        self._known: dict[int, weakref.ref[Tensor]] = {}
        #: Dictionaries of modules, a key in each, and what is to be there: all that lies between the model and a parameter.
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._held: list[object] = []
        self._check_names()
        self._note()

    def check(self) -> None:
        """Refuses a model in which another parameter has come to where one of the optimizer's was. A parameter that moved within the model,
        or that was taken out and replaced by none, is let be.

        Raises:
            UsageError: naming the parameter.
        """
        if all(map(is_, map(dict.get, self._holders, self._keys), self._held)):
            return
        here = list(self._parameters())
        gone = self._gone(here)
        # A frozen one counts where it is in the place of one of the optimizer's: it may train later.
        new = {name: tensor for name, tensor in here if (tensor.requires_grad or name in gone) and not self._is_known(tensor)}
        if gone and new:
            name = next((name for name in gone if name in new), gone[0])
            other = name if name in new else next(iter(new))
            raise _replaced(name, other, new[other])
        self._note()

    def _check_names(self) -> None:
        """Refuses what was replaced before anybody watched, which is seen by the names alone."""
        here = list(self._parameters())
        ours = {id(tensor) for _, tensor in self._params}
        others = {name: tensor for name, tensor in here if id(tensor) not in ours}
        gone = self._gone(here)
        for name in gone:
            if name in others:
                if len(gone) == len(self._params):
                    remedy = "build the optimizer from model.named_parameters() of the model that it trains"
                    raise invalid(name, "a parameter of the optimizer, and of no module of the model", "both", remedy, UsageError)
                raise _replaced(name, name, others[name])

    def _gone(self, here: list[tuple[str, Tensor]]) -> list[str]:
        ids = {id(tensor) for _, tensor in here}
        return [_plain(name) for name, tensor in self._params if id(tensor) not in ids]

    def _is_known(self, tensor: Tensor) -> bool:
        found = self._known.get(id(tensor))
        return found is not None and found() is tensor

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for model in filter(None, (found() for found in self._models)):
            for name, tensor in model.named_parameters(remove_duplicate=False):
                yield _plain(name), tensor

    def _note(self) -> None:
        self._known = {id(tensor): weakref.ref(tensor) for _, tensor in self._parameters()}
        ours = {id(tensor) for _, tensor in self._params}
        self._holders, self._keys, self._held = [], [], []
        seen: dict[int, bool] = {}
        for model in filter(None, (found() for found in self._models)):
            self._has_any(model, ours, seen)

    def _has_any(self, module: nn.Module, ours: set[int], seen: dict[int, bool]) -> bool:
        """Notes a module's way to each parameter of the optimizer, and whether it has any."""
        if id(module) in seen:
            return seen[id(module)]
        seen[id(module)] = False  # for a module that is within itself
        held: list[tuple[dict[str, Any], str, object]] = [
            (module._parameters, name, tensor) for name, tensor in module._parameters.items() if id(tensor) in ours
        ]
        for name, child in module._modules.items():
            if child is not None and self._has_any(child, ours, seen):
                held.append((module._modules, name, child))
        for holder, key, value in held:
            self._holders.append(holder)
            self._keys.append(key)
            self._held.append(value)
        seen[id(module)] = bool(held)
        return seen[id(module)]


def _plain(name: str) -> str:
    """A parameter's name without what DistributedDataParallel and torch.compile put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _replaced(name: str, other: str, tensor: Tensor) -> Exception:
    shown = f"{_params.DTYPES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
    return invalid(
        name,
        f"out of the model, which has another parameter in its place now: {other}, {shown}",
        "the model's for as long as its optimizer trains it, since the other one would get no update",
        "change the model first and build the optimizer, engine or Trainer after that, with another job= for the changed model; or put the old "
        "parameter back",
        UsageError,
    )


class Absent:
    """The parameters that have had no gradient in any of the first steps."""

    def __init__(self) -> None:
        self._left: set[int] | None = None
        self._steps = 0

    def note(self, missing: Sequence["Param"]) -> None:
        """These have none in a backward pass. Nobody expects one of those that are frozen."""
        if self._steps < FIRST_STEPS and self._left != set():
            here = {param.index for param in missing if param.tensor.requires_grad}
            self._left = here if self._left is None else self._left & here

    def end_step(self) -> set[int]:
        """Those that have had none, at the end of the last of the first steps; nothing before and after."""
        self._steps += 1
        return (self._left or set()) if self._steps == FIRST_STEPS else set()


class Watching:
    """The part of an optimizer that notices parameters out of use."""

    _options: "Options"
    _connection: "Connection | None"
    param_groups: list[dict[str, Any]]
    #: Where the model has the parameters; None where nobody has said what the model is.
    _watch: Watch | None
    _absent: Absent

    def watch(self, *models: nn.Module) -> None:
        """From now on steps and saves are refused once a parameter of the optimizer was replaced in its model by another one. Adapters of
        frameworks call it.

        Raises:
            UsageError: naming the parameter, also where that has happened already.
        """
        connection = self._connection
        if connection is not None:
            params = [(param.name, param.tensor) for param in [*connection.params, *connection.frozen()]]
        else:
            keeps = self._options.frozen != "leave"
            params = [(name, tensor) for name, tensor in _params.named(self.param_groups) if tensor.requires_grad or keeps]
        self._watch = Watch(models, params) if models else None

    def check_model(self) -> None:
        """Refuses a model in which a parameter was replaced, if it is known.

        Raises:
            UsageError: naming the parameter.
        """
        if self._watch is None:
            return
        connection = self._connection
        with contextlib.nullcontext() if connection is None or connection.ranks is None else connection.ranks.telling():
            self._watch.check()

    def _warn_of_unused(self, connection: "Connection") -> None:
        """Ends a step, and names what has had no gradient in the first ones, unless somebody has said what that means."""
        unused = self._absent.end_step()
        rank, world_size = self._options.place()
        if not unused or rank != 0 or self._watch is not None or self._options.missing_gradients is not None:
            return
        steps = FIRST_STEPS
        if world_size > 1:
            # Another rank may have had some. Servers count the steps that they have left a parameter out of.
            left_out = connection.left_out()
            unused = {index for index in unused if left_out.get(index, 0) > FIRST_STEPS // 2}
            steps = min([FIRST_STEPS, *(left_out[index] for index in unused)])
        names = [param.name for param in connection.params if param.index in unused]
        if not names:
            return
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"{shown} got no gradient in {'all' if steps == FIRST_STEPS else steps} of the first {FIRST_STEPS} steps, and do not train. If the model "
            "was changed after its optimizer was built (a layer replaced, its embedding resized), the new parameters do not train either: build the "
            "optimizer after that. Otherwise freeze these with requires_grad_(False), or pass missing_gradients='skip' if some later step will use "
            "them",
            UserWarning,
            stacklevel=5,
        )
