"""Adapters of training frameworks. Users' configurations name them as ``longshore.huggingface`` and so on."""
