"""From checkpoints of others into a new job, and back into files of others, without holding a whole model."""

from longshore.checkpoint.formats import load_deepspeed, load_safetensors, save_deepspeed, save_safetensors, save_torch

__all__ = ["load_deepspeed", "load_safetensors", "save_deepspeed", "save_safetensors", "save_torch"]
