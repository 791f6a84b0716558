"""A rank of test_deepspeed_itself.py, with DeepSpeed. Starts like a process of torchrun."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import rank_program
import torch
from torch import Tensor, distributed, nn

STEPS, LATER = 4, 3
RATES = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.01}


class Net(nn.Module):
    """Has a frozen layer and a buffer. Two ranks cannot share its weights evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, 37), nn.GELU(), nn.Linear(37, 4))
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, batch: int) -> Tensor:
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(batch)).to(self.base.weight.dtype)
        outputs = self.layers(self.base(inputs)) * self.scale[0]
        return nn.functional.cross_entropy(outputs.float(), inputs[:, :4].float().argmax(1))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def config(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    """Returns DeepSpeed's configuration, with torch's AdamW: its own for CPUs has to be compiled."""
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {**RATES, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
        **more,
    }


def steps(engine: Any, numbers: range) -> list[float]:
    """Makes these steps. Returns this rank's losses."""
    world_size, rank = distributed.get_world_size(), distributed.get_rank()
    losses = []
    for step in numbers:
        loss = engine(step * world_size + rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Returns the whole master weights and moments of each trained parameter. All ranks call it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        name: {
            "master": safe_get_full_fp32_param(parameter).clone(),
            **{key: safe_get_full_optimizer_state(parameter, key).clone() for key in ("exp_avg", "exp_avg_sq")},
        }
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def engine_of(options: dict[str, Any]) -> Any:
    import deepspeed

    model = net()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=options)[0]


def train(folder: str, name: str, **options: Any) -> dict[str, Any]:
    """Trains, writes a checkpoint and its universal form, and trains on."""
    engine = engine_of(config(**options))
    steps(engine, range(STEPS))
    engine.save_checkpoint(f"{folder}/{name}")
    found = {"state": state(engine), "losses": steps(engine, range(STEPS, STEPS + LATER))}
    if distributed.get_rank() == 0:
        convert(f"{folder}/{name}/global_step{STEPS}", f"{folder}/{name}-universal/global_step{STEPS}")
        Path(f"{folder}/{name}-universal/latest_universal").write_text(f"global_step{STEPS}")
    distributed.barrier()
    return found


def convert(zero: str, universal: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    given = ["", "--input_folder", zero, "--output_folder", universal, "--inject_missing_state"]
    given += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    before, sys.argv = sys.argv, given
    arguments: argparse.Namespace = ds_to_universal.parse_arguments()
    sys.argv = before
    ds_to_universal.main(arguments)


def load(folder: str, **options: Any) -> dict[str, Any]:
    """Continues from a universal checkpoint."""
    engine = engine_of(config(**options, checkpoint={"load_universal": True}))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    counts = {"steps": engine.global_steps}
    return {"state": state(engine), **counts, "losses": steps(engine, range(STEPS + LATER, STEPS + 2 * LATER))}


def make(what: str, options: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=os.environ["RANK"], LOCAL_SIZE=os.environ["WORLD_SIZE"])
    import deepspeed
    import deepspeed.ops

    # DeepSpeed must compile its shared memory between ranks of a host. Without that, ranks use gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    return {"train": train, "load": load}[what](**options)


if __name__ == "__main__":
    rank_program.main(make, distributed.barrier)
