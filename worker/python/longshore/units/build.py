"""Models larger than memory while they are built: ``longshore.Init``, ``longshore.tiled`` and ``longshore.GatheredParameters``.

``Init`` runs a model's constructor without ever holding all weights. A tiled layer has slices of a weight that alone exceeds the budget.
Gathered parameters are whole and plain for code that needs them so. All of it runs on the training thread.
"""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from longshore.errors import UsageError, invalid
from longshore.transfer import tensors
from longshore.transfer.tensors import UnitParameter, is_built
from longshore.units import model as _model
from longshore.units.fetching import Fetcher
from longshore.units.model import Member, Unit
from longshore.units.residency import Residency


class GatheredParameters:
    """Context in which parameters are plain and resident together, as in ``deepspeed.zero.GatheredParameters``.

    Their units must fit into the budget together. Trained weights belong to the servers and cannot be written here; frozen weights can.

    Args:
        params: one parameter, or several. Parameters outside of units stay unchanged.
        modifier_rank: ignored: every rank may write to its frozen weights, and none to trained ones.
        enabled: False does nothing.
    """

    def __init__(self, params: Tensor | Iterable[Tensor], modifier_rank: int | None = None, *_: Any, enabled: bool = True) -> None:
        given = [params] if isinstance(params, Tensor) else list(params)
        self._params = given if enabled else []
        self._held = contextlib.ExitStack()

    def __enter__(self) -> None:
        units: dict[Unit, Any] = {}
        for tensor in self._params:
            if isinstance(tensor, UnitParameter):
                units[tensor._longshore_member.unit] = tensor._longshore_home  # type: ignore[attr-defined]
        with contextlib.ExitStack() as held:
            for home in {id(home): home for home in units.values()}.values():
                # Autograd saves references to weights within the context: backward may need them after they are
                # released.
                held.enter_context(home.saving())
            for unit, home in units.items():
                home.pin(unit, alone=True)
                held.callback(home.unpin, unit)
            self._held = held.pop_all()

    def __exit__(self, *_: Any) -> None:
        self._held.close()


class Init:
    """Context in which modules are built as usual, with the same random numbers. Parameters beyond the budget go to a file.

    Initialisation may touch any of them again. The optimizer's job is filled parameter by parameter. ``shard`` must be called before the
    model is trained.

    Args:
        budget: bytes of weights in memory at a time.
        folder: folder of the file; by default that of temporary files. The file is deleted with the last of the weights.
        dtype: the modules' type, as in ``torch.set_default_dtype``.
        enabled: False does nothing.
    """

    def __init__(
        self,
        *,
        budget: int | str = "1GiB",
        folder: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        **retired: object,
    ) -> None:
        for name in retired:
            raise TypeError(f"longshore.Init takes no {name!r}: leave it out, since modules are built by torch's own initialisation")
        room = _model.budget(budget)
        self._dtype, self._is_enabled = dtype, enabled
        # The file has the weights before any server has them.
        fetcher = Fetcher(None, 0, [], lambda _: False, memory=functools.partial(_in_file, folder))
        self._home = Residency([], fetcher, room)
        self._home.is_building = True
        self._before: torch.dtype | None = None
        self._handle: Any = None
        self._new: Any = None

    @property
    def peak_weight_bytes(self) -> int:
        """Most bytes of weights in memory so far."""
        return self._home.peak

    def __enter__(self) -> "Init":
        if self._is_enabled:
            self._handle = register_module_parameter_registration_hook(self._registered)
            self._new = nn.Parameter.__new__
            nn.Parameter.__new__ = staticmethod(functools.partial(_new, self._new))  # type: ignore[method-assign,assignment]
            if self._dtype is not None:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()
            nn.Parameter.__new__ = self._new  # type: ignore[method-assign]
            self._home.release()
        if self._before is not None:
            torch.set_default_dtype(self._before)

    def _registered(self, module: nn.Module, name: str, tensor: nn.Parameter | None) -> None:
        # Empty parameters, and those on another device, are left alone. A tied weight was adopted with its first
        # module, and has another type since.
        if type(tensor) is not nn.Parameter or tensor.numel() == 0 or tensor.device.type != "cpu":
            return
        _adopt(self._home, module, name, tensor)


def _new(inner: Any, cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``nn.Parameter.__new__`` within Init. A weight norm makes a new parameter of a built weight, which needs
    memory of its own."""
    return inner(cls, tensors.parameter_of(data), *args, **kwargs)


def _adopt(home: Residency, module: nn.Module, name: str, tensor: nn.Parameter) -> None:
    nbytes = tensor.numel() * tensor.element_size()
    member = Member(f"{type(module).__name__}.{name}", tensor, [(module, name)], None, nbytes=nbytes)
    member.unit = Unit(member.name, [member])
    _model.own_memory(member)
    home.adopt(member.unit)


def _in_file(folder: str | os.PathLike[str] | None, tensor: Tensor) -> Tensor:
    """Returns file-backed memory for a tensor."""
    with tempfile.NamedTemporaryFile(prefix="longshore-init-", dir=folder) as file:
        # The file's name is removed at once. The file itself lives as long as its mapping.
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape)


class TiledLinear(nn.Module):
    """An ``nn.Linear`` computed slice by slice of its outputs. Its state dict equals the whole layer's.

    Attributes:
        tiles: the slices, each an ``nn.Linear``.
    """

    def __init__(self, whole: nn.Linear, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.tiles = nn.ModuleList()
        for start in range(0, whole.out_features, rows):
            count = min(rows, whole.out_features - start)
            tile = nn.Linear(whole.in_features, count, bias=whole.bias is not None, device="meta", dtype=whole.weight.dtype)
            for name, parameter in whole._parameters.items():
                if parameter is not None:
                    slice_ = nn.Parameter(parameter.detach()[start : start + count].clone(), parameter.requires_grad)
                    setattr(tile, name, slice_)
                    if is_built(parameter) and not isinstance(slice_, UnitParameter):  # within Init the hook has adopted it
                        _adopt(parameter._longshore_home, tile, name, slice_)  # type: ignore[attr-defined]
            self.tiles.append(tile)
        self.train(whole.training)
        self.register_state_dict_post_hook(_join)
        self.register_load_state_dict_pre_hook(_cut)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([tile(inputs) for tile in self.tiles], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _join(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Joins the tiles' tensors in a state dict under the whole layer's names."""
    assert isinstance(module, TiledLinear)
    for name in ("weight", "bias"):
        slices = [state.pop(f"{prefix}tiles.{number}.{name}", None) for number in range(len(module.tiles))]
        if slices[0] is not None:
            state[prefix + name] = torch.cat(slices)


def _cut(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, TiledLinear)
    for name in ("weight", "bias"):
        whole = state.pop(prefix + name, None)
        if whole is None:
            continue
        sizes = [tile.out_features for tile in module.tiles]
        if whole.shape[0] != module.out_features:
            raise invalid(
                prefix + name, list(whole.shape), f"of {module.out_features} rows", "load what was saved from such a model", UsageError
            )
        for number, slice_ in enumerate(whole.split(sizes)):
            state[f"{prefix}tiles.{number}.{name}"] = slice_


def tiled(model: nn.Module, most: int) -> nn.Module:
    """Replaces linear layers with larger weights by slices of at most ``most`` bytes. Call it before the optimizer is built.

    Backward adds its sums over outputs tile by tile. So results equal the whole layer's up to the order of sums.

    Args:
        model: a model, or a linear layer.
        most: bytes of a slice's weight.

    Returns:
        The model, or the layer's replacement.

    Raises:
        UsageError: for a weight that is tied, or in a unit already.
        InvalidError: if one row is larger than ``most``.
    """
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module.weight.numel() * module.weight.element_size() <= most:
            continue
        names = shared[id(module.weight)]
        if len(names) > 1:
            raise invalid(names[0], f"tied to {names[1]}", "of one module", "untie it, or raise the budget", UsageError)
        if isinstance(module.weight, UnitParameter) and not is_built(module.weight):
            raise UsageError(f"{names[0]} is in a unit already: call tiled() before shard()")
        rows = most // (module.in_features * module.weight.element_size())
        if rows < 1:
            row = module.in_features * module.weight.element_size()
            raise invalid("most", most, f"at least {row}, one row of {names[0]}", "raise it")
        replaced = TiledLinear(module, rows)
        if not name:
            return replaced
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replaced)
    return model
