"""Longshore for Python: optimizers whose state lives on optimizer servers.

>>> optimizer = longshore.AdamW(model.named_parameters(), lr=3e-4)  # doctest: +SKIP

Without ``servers=`` a server runs inside this process. PyTorch is imported with the first optimizer that is named, NumPy with
:class:`Client`, which needs no framework, and JAX with ``longshore.jax``.
"""

import importlib
from typing import TYPE_CHECKING

from longshore import errors
from longshore._longshore import __version__
from longshore._server import Server
from longshore.progress import Progress

if TYPE_CHECKING:
    from longshore import accelerate, axolotl, checkpoint, huggingface, jax, lightning, schedules
    from longshore._options import LossScale
    from longshore._step import Hyper, StepReport
    from longshore.client import Client, Shape
    from longshore._gathering import GatheredParameters
    from longshore._init import Init
    from longshore._shard import Sharded, shard
    from longshore._tiles import TiledLinear, tiled
    from longshore.engine import Engine, initialize
    from longshore.optim import SGD, Adagrad, Adam, AdamW, Lion

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

_FROM_CLIENT = {"Client", "Shape"}
_FROM_OPTIM = {"Adagrad", "Adam", "AdamW", "Lion", "SGD"}
_FROM_SHARD = {"Sharded", "shard"}
_FROM_TILES = {"TiledLinear", "tiled"}
_FROM_STEP = {"Hyper", "StepReport"}
_FROM_ENGINE = {"Engine", "initialize"}
_MODULES = {"accelerate", "axolotl", "checkpoint", "huggingface", "jax", "lightning", "schedules"}
#: What programs for DeepSpeed call beside ``initialize``, and what stands for it here.
_OF_DEEPSPEED = {
    "add_config_arguments": "pass the path as config=, or as args.deepspeed_config",
    "checkpointing": "use torch.utils.checkpoint",
    "comm": "use torch.distributed",
    "get_accelerator": "use torch.accelerator",
    "init_distributed": "call torch.distributed.init_process_group() where ranks reduce; where servers sum no group is needed",
    "ops": "use longshore.AdamW, longshore.Lion or longshore.Adagrad",
    "zero": "use longshore.Init and longshore.GatheredParameters",
}

if not TYPE_CHECKING:  # type checkers know all names from above, and others are errors

    def __getattr__(name: str) -> object:
        if name in _FROM_OPTIM:
            from longshore import optim

            return getattr(optim, name)
        if name in _FROM_ENGINE:
            from longshore import engine

            return getattr(engine, name)
        if name in _FROM_TILES:
            from longshore import _tiles

            return getattr(_tiles, name)
        if name == "Init":
            from longshore._init import Init

            return Init
        if name == "GatheredParameters":
            from longshore._gathering import GatheredParameters

            return GatheredParameters
        if name in _FROM_SHARD:
            from longshore import _shard

            return getattr(_shard, name)
        if name in _FROM_STEP:
            from longshore import _step

            return getattr(_step, name)
        if name in _FROM_CLIENT:
            from longshore import client

            return getattr(client, name)
        if name == "LossScale":
            from longshore._options import LossScale

            return LossScale
        if name in _MODULES:
            return importlib.import_module(f"longshore.{name}")
        remedy = f", which is DeepSpeed's: {_OF_DEEPSPEED[name]}" if name in _OF_DEEPSPEED else ""
        if name == "init":
            remedy = ": build the model within longshore.Init, or pass Client a callable as initial="
        raise AttributeError(f"module 'longshore' has no attribute {name!r}{remedy}")
