"""The public path of :mod:`longshore.integrations.huggingface`, as documents and users' configurations name it."""

from longshore.integrations.huggingface import Callback, deepspeed, newest

__all__ = ["Callback", "deepspeed", "newest"]
