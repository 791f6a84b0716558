"""``longshore.Init``: builds a model whose weights are never all in memory, for :func:`longshore.shard`."""

import functools
import os
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from longshore import _units
from longshore._fetching import Fetcher
from longshore._filling import Filling
from longshore._host import Place
from longshore._params import Param
from longshore._residency import Residency
from longshore._unit_tensors import UnitParameter, is_built
from longshore._units import Member, Unit
from longshore.errors import UsageError


class Init:
    """Within it modules are built as ever, with the same random numbers, and their parameters beyond the budget go to a file.

    Initialisation may come back to any of them. The optimizer's job is filled parameter by parameter. ``shard`` must be called
    before the model is trained.

    Args:
        budget: bytes of weights in memory at a time.
        folder: where the file is; by default that of temporary files. It is deleted when the last of the weights is.
        dtype: the type of what is built, as ``torch.set_default_dtype`` says it.
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
        room = _units.budget(budget)
        self._dtype, self._is_enabled = dtype, enabled
        self._home = Residency([], _Store(folder), room)
        self._home.is_building = True
        self._before: torch.dtype | None = None
        self._handle: Any = None

    @property
    def peak_weight_bytes(self) -> int:
        """The most weights that were ever in memory."""
        return self._home.peak

    def __enter__(self) -> "Init":
        if self._is_enabled:
            self._handle = register_module_parameter_registration_hook(self._registered)
            if self._dtype is not None:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._home.release()
        if self._before is not None:
            torch.set_default_dtype(self._before)

    def _registered(self, module: nn.Module, name: str, tensor: nn.Parameter | None) -> None:
        # What a module has already, as a tied weight, has come here before.
        if type(tensor) is not nn.Parameter or tensor.numel() == 0 or tensor.device.type != "cpu":
            return
        _adopt(self._home, module, name, tensor)


def _adopt(home: Residency, module: nn.Module, name: str, tensor: nn.Parameter) -> None:
    nbytes = tensor.numel() * tensor.element_size()
    member = Member(f"{type(module).__name__}.{name}", tensor, [(module, name)], None, nbytes=nbytes)
    member.unit = Unit(member.name, [member])
    _units.own_memory(member)
    home.adopt(member.unit)


def replace(built: Tensor, module: nn.Module, name: str, tensor: nn.Parameter) -> None:
    """Has a module's new parameter, which is a part of one that :class:`Init` has built, go where that one is. Within Init it has."""
    if not isinstance(tensor, UnitParameter):
        _adopt(built._longshore_home, module, name, tensor)  # type: ignore[attr-defined]


class _Store(Fetcher):
    """Weights that no server has yet, in a file."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        super().__init__(None, 0, [], lambda _: False, memory=functools.partial(_in_file, folder))


def _in_file(folder: str | os.PathLike[str] | None, tensor: Tensor) -> Tensor:
    """Memory for such a tensor that is a file's."""
    with tempfile.NamedTemporaryFile(prefix="longshore-init-", dir=folder) as file:
        # It goes when the mapping does.
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape)


def filling(params: list[Param]) -> Filling | None:
    """What a new job is filled with, parameter by parameter; None where none of these was built by :class:`Init`."""
    if not any(is_built(param.tensor) for param in params):
        return None
    return Filling(None, lambda _, param: param.tensor, lambda _: None)


class Unplaced:
    """The weights of a job whose model :class:`Init` has built, until ``shard``: they are in no tensor."""

    def values(self) -> tuple[list[Place], list[Tensor]]:
        return [], []

    def is_awaited(self, param: Param) -> bool:
        self.expect()
        return True

    def expect(self) -> None:
        raise UsageError("the model was built within longshore.Init: call longshore.shard(model, optimizer, budget) before it trains")

    def read(self) -> None:
        """Does nothing: units are fetched when they are used."""

    def read_frozen(self) -> set[int]:
        """Reads none."""
        return set()

    meet = settle = give_up = abandon = forget = finish_copies = release = read
