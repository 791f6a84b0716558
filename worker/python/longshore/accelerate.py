"""The public path of :mod:`longshore.integrations.accelerate`, as documents and users' configurations name it."""

from longshore.integrations.accelerate import Attached, attach

__all__ = ["Attached", "attach"]
