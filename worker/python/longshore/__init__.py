"""Longshore for Python: optimizers whose state lives on optimizer servers.

>>> optimizer = longshore.AdamW(model.named_parameters(), lr=3e-4)  # doctest: +SKIP

Without ``servers=`` a server runs inside this process. PyTorch is imported when an optimizer is first named, NumPy with :class:`Client`,
which needs no framework, and JAX with ``longshore.jax``.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import warnings
from typing import TYPE_CHECKING

from longshore._longshore import __version__

if TYPE_CHECKING:
    from longshore import accelerate, axolotl, checkpoint, client, engine, errors, huggingface, jax, lightning, optim, progress, schedules
    from longshore.client import Client, Shape
    from longshore.engine import Engine, initialize
    from longshore.optim import SGD, Adagrad, Adam, AdamW, Lion, NAdam
    from longshore.progress import Progress
    from longshore.transfer.job import Hyper, StepReport
    from longshore.transfer.options import LossScale, Server
    from longshore.units.build import GatheredParameters, Init, TiledLinear, tiled
    from longshore.units.shard import Sharded, shard

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Client",
    "Engine",
    "GatheredParameters",
    "Hyper",
    "Init",
    "Lion",
    "LossScale",
    "NAdam",
    "Progress",
    "SGD",
    "Server",
    "Shape",
    "Sharded",
    "StepReport",
    "TiledLinear",
    "__version__",
    "errors",
    "initialize",
    "shard",
    "tiled",
]

#: The module that defines each public name. A module is imported when one of its names is first used.
_PLACES = {
    name: module
    for module, names in {
        "client": ("Client", "Shape"),
        "engine": ("Engine", "initialize"),
        "optim": ("SGD", "Adagrad", "Adam", "AdamW", "Lion", "NAdam"),
        "progress": ("Progress",),
        "transfer.job": ("Hyper", "StepReport"),
        "transfer.options": ("LossScale", "Server"),
        "units.build": ("GatheredParameters", "Init", "TiledLinear", "tiled"),
        "units.shard": ("Sharded", "shard"),
    }.items()
    for name in names
}
#: Names of the package ``deepspeed`` that this package lacks, each with the replacement that the error names.
_OF_DEEPSPEED = {
    "add_config_arguments": "pass the path as config=, or as args.deepspeed_config",
    "checkpointing": "use torch.utils.checkpoint",
    "comm": "use torch.distributed",
    "get_accelerator": "use torch.accelerator",
    "init_distributed": "call torch.distributed.init_process_group() where ranks reduce; where servers sum no group is needed",
    "ops": "use longshore.AdamW, longshore.Lion or longshore.Adagrad",
    "zero": "use longshore.Init and longshore.GatheredParameters",
}


def _warn_of_another_project() -> None:
    """Warns if the distribution ``longshore`` is installed: on PyPI it is another project, with files of the same names."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("longshore")
        warnings.warn(
            f"the distribution longshore {version} is installed beside longshore-train. On PyPI it is another project, with the same import name "
            "and command, and each overwrites files of the other: pip uninstall longshore longshore-train, then install longshore-train again",
            RuntimeWarning,
            stacklevel=3,
        )


_warn_of_another_project()

if not TYPE_CHECKING:  # type checkers see all names above, and report any other

    def __getattr__(name: str) -> object:
        if name in _PLACES:
            return getattr(importlib.import_module(f"longshore.{_PLACES[name]}"), name)
        if importlib.util.find_spec(f"longshore.{name}"):
            return importlib.import_module(f"longshore.{name}")
        remedy = f", which is DeepSpeed's: {_OF_DEEPSPEED[name]}" if name in _OF_DEEPSPEED else ""
        if name == "init":
            remedy = ": build the model within longshore.Init, or pass Client a callable as initial="
        raise AttributeError(f"module 'longshore' has no attribute {name!r}{remedy}")
