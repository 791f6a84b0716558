"""The public path of :mod:`longshore.client.jax`, as documents and users' configurations name it."""

from longshore.client.jax import Client, Transformation, adamw

__all__ = ["Client", "Transformation", "adamw"]
