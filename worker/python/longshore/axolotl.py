"""The public path of :mod:`longshore.integrations.axolotl`, as documents and users' configurations name it."""

from longshore.integrations.axolotl import LongshoreArgs, Plugin

__all__ = ["LongshoreArgs", "Plugin"]
