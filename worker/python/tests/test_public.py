"""Public names and arguments equal those in public.txt. ``TEST_REGENERATE=1 pytest tests/test_public.py`` rewrites that file."""

import importlib.util
import inspect
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import longshore
from longshore.optim import Optimizer
from longshore.transfer.options import Options

KEPT = pathlib.Path(__file__).with_name("public.txt")
#: Modules named in documents and in users' configurations, each with the package that it needs.
MODULES = {
    "longshore": "torch",
    "longshore.accelerate": "accelerate",
    "longshore.checkpoint": "torch",
    "longshore.client": "numpy",
    "longshore.engine": "torch",
    "longshore.errors": "torch",
    "longshore.huggingface": "transformers",
    "longshore.jax": "jax",
    "longshore.lightning": "lightning",
    "longshore.optim": "torch",
    "longshore.progress": "torch",
    "longshore.schedules": "torch",
}


def names_of(module: Any) -> list[str]:
    """Returns the names in ``__all__``, or else the classes and functions that the package defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = {name: value for name, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value)}
    return sorted(name for name, value in own.items() if not name.startswith("_") and value.__module__ == module.__name__)


def arguments(value: Any) -> str:
    """Returns names, kinds and defaults, without types."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def members(kind: type) -> Iterator[str]:
    """Yields the public methods and attributes that the package's own classes give a class."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("longshore")]
    for name in sorted({name for base in own for name in vars(base) if not name.startswith("_")}):
        value = getattr(kind, name)
        yield f"    {name}{arguments(value) if callable(value) else ''}"


def described(path: str, known: dict[object, str]) -> list[str]:
    """Describes the names of a module. ``known`` has the first name of each value: a further name refers to it."""
    module, found = importlib.import_module(path), []
    for name in names_of(module):
        value, shown = getattr(module, name), f"{path}.{name}"
        if known.setdefault(value, shown) != shown:
            found.append(f"{shown} = {known[value]}")
            continue
        found.append(f"{shown}{arguments(value) if callable(value) else ''}")
        # All optimizers have the methods of their base class.
        if inspect.isclass(value) and (value is Optimizer or not issubclass(value, Optimizer)):
            found += members(value)
    return found


def sections(text: str) -> dict[str, list[str]]:
    """Returns the lines of each module."""
    return {part.split("\n", 1)[0]: part.splitlines()[1:] for part in text.split("# ") if part}


def test_public_names_and_arguments_stay() -> None:
    known: dict[object, str] = {}
    there = {path: described(path, known) for path, needs in MODULES.items() if importlib.util.find_spec(needs)}
    # Each optimizer has these options.
    there["options"] = [arguments(Options)]
    if os.environ.get("TEST_REGENERATE"):
        kept = {**sections(KEPT.read_text() if KEPT.exists() else ""), **there}
        KEPT.write_text("".join(f"# {path}\n" + "".join(f"{line}\n" for line in kept[path]) for path in sorted(kept)))
    kept = sections(KEPT.read_text())
    assert kept.keys() == {*MODULES, "options"}
    for path, lines in there.items():
        assert lines == kept[path], f"{path} differs from {KEPT.name}"


def test_each_rule_has_a_public_class() -> None:
    names = {kind.__name__ for kind in longshore.optim.RULES.values()}
    assert names <= {*longshore.__all__} & {*longshore.optim.__all__}
