"""The public path of :mod:`longshore.deepspeed.engine`, as documents and users' configurations name it."""

from longshore.deepspeed.engine import Engine, initialize

__all__ = ["Engine", "initialize"]
