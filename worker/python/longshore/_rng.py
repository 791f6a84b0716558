"""The states of this process's random generators, as plain containers and tensors: those that the Trainer keeps."""

import random
import sys
from typing import Any

import torch


def take() -> dict[str, Any]:
    """The states of Python's, NumPy's (where it was imported), the host's and the accelerator's generators."""
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.random.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    kind = _accelerator()
    if kind is not None:
        states[kind] = torch.get_device_module(kind).get_rng_state()
    return states


def put(states: dict[str, Any]) -> None:
    """Sets the generators to what :func:`take` returned."""
    random.setstate(states["python"])
    torch.random.set_rng_state(states["cpu"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(of_numpy(states["numpy"]))
    kind = _accelerator()
    if kind is not None and kind in states:
        torch.get_device_module(kind).set_rng_state(states[kind])


def of_numpy(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """NumPy's own form of its state."""
    name, keys, *rest = state
    return (name, keys.numpy().astype("uint32"), *rest)


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device.type if device is not None else None
