"""Ranks that work together by torch.distributed: they reduce gradients, gather weights, and fail together."""
