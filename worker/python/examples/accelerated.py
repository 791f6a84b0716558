"""A small model trained with Accelerate, its optimizer on servers.

    python accelerated.py OUTPUT_DIR [SERVERS [JOB]]

The script saves every four steps, and continues from the last save. ``accelerate launch`` and torchrun start several ranks, which share
each batch. Another number of ranks may continue from a save.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch import nn

import longshore
import longshore.accelerate

STEPS, SAVE_STEPS = 12, 4


def data() -> torch.utils.data.TensorDataset:
    """Returns vectors with one of four classes."""
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))


def model(dropout: float) -> nn.Module:
    """Returns a network with dropout, so that the drawn random numbers show in the losses."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 4))


def main(
    output: str, servers: str | None = None, job: str | None = None, trackers: list[Any] | None = None, dropout: float = 0.1
) -> dict[int, float]:
    """Trains, and returns the loss of each step."""
    # Ranks share each batch, so that the schedule's steps mean the same with any number of ranks.
    shared_out = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=trackers, dataloader_config=shared_out)
    accelerator.init_trackers("accelerated")
    network = model(dropout)
    # With several ranks Accelerate wraps the model in DistributedDataParallel, and servers average equal gradients. With
    # partition="all-reduced" each rank would send a part of them, and no other number of ranks could continue from a save.
    optimizer = longshore.AdamW(network.named_parameters(), lr=1e-2, servers=servers, job=job)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    # With its own generator the loader draws nothing from dropout's generator, so that a resumed run has the same dropout.
    loader = torch.utils.data.DataLoader(data(), batch_size=8, generator=torch.Generator().manual_seed(0))
    network, optimizer, loader, schedule = accelerator.prepare(network, optimizer, loader, schedule)
    longshore.accelerate.attach(accelerator)

    step, losses = resumed(accelerator, Path(output))
    for inputs, labels in skip_first_batches(loader, 2 * step):
        with accelerator.accumulate(network):
            if len(losses) == step:
                print(f"step {step}", flush=True)
            loss = nn.functional.cross_entropy(network(inputs), labels)
            accelerator.backward(loss)
            losses.setdefault(step + 1, accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            print(f"loss {step} {losses[step]!r}", flush=True)
            if step % SAVE_STEPS == 0:
                save(accelerator, Path(output), step, losses)
                accelerator.log({"loss": losses[step], "validation": evaluated(network)}, step)
            if step == STEPS:
                break
    return losses


def evaluated(network: nn.Module) -> float:
    """Returns the loss on vectors that are not trained on."""
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    network.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(network(inputs), inputs[:, :4].argmax(1)).item()
    network.train()
    return loss


def save(accelerator: Accelerator, output: Path, step: int, losses: dict[int, float]) -> None:
    """Saves to a folder with a temporary name, and renames the complete folder."""
    partial = output / "partial"
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (partial / "losses.json").write_text(json.dumps(losses))
        os.replace(partial, output / f"step-{step:04}")
    accelerator.wait_for_everyone()


def resumed(accelerator: Accelerator, output: Path) -> tuple[int, dict[int, float]]:
    """Loads the last save, if there is one. Returns its step, and the losses up to it."""
    saves = sorted(output.glob("step-*"))
    if not saves:
        return 0, {}
    accelerator.load_state(str(saves[-1]))
    losses = json.loads((saves[-1] / "losses.json").read_text())
    return int(saves[-1].name[5:]), {int(step): loss for step, loss in losses.items()}


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
