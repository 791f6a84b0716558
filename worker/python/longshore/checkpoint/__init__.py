"""Other libraries' checkpoints: fills new jobs from them, and saves jobs in their formats, without holding a whole model."""

from longshore.checkpoint.formats import load_deepspeed, load_safetensors, save_deepspeed, save_safetensors, save_torch

__all__ = ["load_deepspeed", "load_safetensors", "save_deepspeed", "save_safetensors", "save_torch"]
