"""A linear layer in slices of its weight, for one that alone is larger than the budget."""

from typing import Any

import torch
from torch import Tensor, nn

from longshore import _init
from longshore._unit_tensors import UnitParameter, is_built
from longshore.errors import UsageError, invalid


class TiledLinear(nn.Module):
    """Does what an ``nn.Linear`` does, slice by slice of its outputs. Its state dict is that of the whole layer.

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
                    setattr(tile, name, _rows(parameter, start, count))
                    if is_built(parameter):
                        _init.replace(parameter, tile, name, getattr(tile, name))
            self.tiles.append(tile)
        self.train(whole.training)
        self.register_state_dict_post_hook(_join)
        self.register_load_state_dict_pre_hook(_cut)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([tile(inputs) for tile in self.tiles], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _rows(parameter: nn.Parameter, start: int, count: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[start : start + count].clone(), parameter.requires_grad)


def _join(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Names in a state dict are those of the whole layer, wherever its tiles' tensors lie."""
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
    """Replaces linear layers whose weight is larger by ones in slices of at most so many bytes. Call it before the optimizer is built.

    Sums over outputs, as backward has them, are added up tile by tile: results agree with the whole layer's up to the order of
    sums.

    Args:
        model: a model, or a linear layer.
        most: bytes of a slice's weight.

    Returns:
        The model, or what replaces the layer.

    Raises:
        UsageError: for a weight that is tied, or in units already.
        InvalidError: where one row is larger.
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
