"""``longshore.Init``: builds a model whose weights are never all in memory, for :func:`longshore.shard`."""

import contextlib
import functools
import os
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from longshore import _recorded, _units
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

    With ``on_servers=True`` the weights are nowhere until servers make them: functions of ``torch.nn.init`` are noted, and the
    optimizer's job is filled with what they say, drawn by the servers from ``seed``. See :mod:`longshore.init`.

    Args:
        budget: bytes of weights in memory at a time.
        folder: where the file is; by default that of temporary files. It is deleted when the last of the weights is.
        dtype: the type of what is built, as ``torch.set_default_dtype`` says it.
        on_servers: servers make the weights. What they cannot make is refused by name.
        seed: what these depend on, with a parameter's place in the optimizer and an element's place in it.
        enabled: False does nothing.
    """

    def __init__(
        self,
        *,
        budget: int | str = "1GiB",
        folder: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        on_servers: bool = False,
        seed: int = 0,
        enabled: bool = True,
    ) -> None:
        room = _units.budget(budget)
        self._dtype, self._is_enabled = dtype, enabled
        self._recording = _recorded.Recording(seed) if on_servers else None
        self._home = Residency([], _Store(folder), room)
        self._home.is_building = True
        self._before: torch.dtype | None = None
        self._within = contextlib.ExitStack()
        self._handle: Any = None

    @property
    def peak_weight_bytes(self) -> int:
        """The most weights that were ever in memory."""
        return self._recording.peak if self._recording is not None else self._home.peak

    def __enter__(self) -> "Init":
        if self._is_enabled:
            self._handle = register_module_parameter_registration_hook(self._registered)
            if self._recording is not None:
                self._within.enter_context(self._recording.truncating())
            if self._dtype is not None:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._within.close()
        if self._handle is not None:
            self._handle.remove()
            self._home.release()
        if self._before is not None:
            torch.set_default_dtype(self._before)
        if self._recording is not None and kind is None:
            self._recording.check()

    def _registered(self, module: nn.Module, name: str, tensor: nn.Parameter | None) -> None:
        # What a module has already, as a tied weight, has come here before.
        if type(tensor) is not nn.Parameter or tensor.numel() == 0 or tensor.device.type != "cpu":
            return
        if self._recording is not None:
            if tensor.is_floating_point():
                self._recording.take(f"{type(module).__name__}.{name}", tensor)
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
    made = _recorded.made if any(_recorded.is_recorded(param.tensor) for param in params) else None
    return Filling(None, lambda _, param: param.tensor, lambda _: None, made)


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
