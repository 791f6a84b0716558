"""All of a job's state as tensors, as its servers export it."""

import torch
from torch import Tensor

from longshore._host import Place
from longshore._params import DTYPES, Param

#: By rule: torch's names of the arrays that servers keep beside the master weights.
NAMES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
}


def targets(params: list[Param], tensors: list[Tensor]) -> list[Place]:
    """Where an array's values go: a contiguous CPU tensor for each parameter. None for an array without tensors."""
    return [
        (param.index, tensor.data_ptr(), param.elements, DTYPES[tensor.dtype])
        for param, tensor in zip(params if tensors else [], tensors, strict=True)
    ]


def allocate(rule: str, params: list[Param]) -> list[dict[str, Tensor]]:
    """By parameter: memory for its moments in torch's names, and for its fp32 ``master`` weights."""
    arrays = ("master", *NAMES[rule])
    return [{name: torch.empty(param.shape, dtype=torch.float32) for name in arrays} for param in params]


def arrays(rule: str, states: list[dict[str, Tensor]]) -> list[list[Tensor]]:
    """The tensors of all arrays, in the servers' order; none of those that no state has."""
    return [[state[name] for state in states] if name in states[0] else [] for name in ("master", *NAMES[rule])]
