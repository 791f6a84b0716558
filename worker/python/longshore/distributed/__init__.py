"""Ranks that work together over torch.distributed: they reduce gradients, gather weights, and fail together."""
