"""The public path of :mod:`longshore.integrations.lightning`, as documents and users' configurations name it."""

from longshore.integrations.lightning import Callback, Strategy

__all__ = ["Callback", "Strategy"]
