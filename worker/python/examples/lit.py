"""A small model trained with Lightning, its optimizer on servers.

    python lit.py OUTPUT_DIR [SERVERS [JOB [CHECKPOINT]]]

The script saves every four steps. CHECKPOINT is a saved file to continue from, or ``last``. Each of several ranks takes its part of every
batch.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import longshore
import longshore.lightning

STEPS = 12


class Sorting(pl.LightningModule):
    """Sorts vectors into four classes."""

    def __init__(self, servers: str | None, job: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        self.servers, self.job = servers, job
        self.losses: dict[int, float] = {}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, labels = batch
        if index % 2 == 0:
            print(f"step {self.global_step}", flush=True)
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.losses[index] = loss.item()
        print(f"loss {index} {self.losses[index]!r}", flush=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        inputs, labels = batch
        self.log("validation", nn.functional.cross_entropy(self.layers(inputs), labels))

    def configure_optimizers(self) -> Any:
        optimizer = longshore.AdamW(self.named_parameters(), lr=1e-2, servers=self.servers, job=self.job)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Loader(torch.utils.data.DataLoader[Any]):
    """A loader that saves its position. Lightning restarts any other loader in the middle of an epoch."""

    start = given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= start:
                self.given = index + 1
                yield batch


def data() -> Loader:
    """Returns vectors and their classes."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))[rank::ranks]
    return Loader(torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8 // ranks)


def main(
    output: str,
    servers: str | None = None,
    job: str | None = None,
    checkpoint: str | None = None,
    strategy: str = "auto",
    clip: float | None = 1.0,
) -> dict[int, float]:
    """Trains, and returns the loss of each batch. Each of several ranks clips its own gradients."""
    saves = pl.callbacks.ModelCheckpoint(output, every_n_train_steps=4, save_top_k=-1, filename="{step:04}", save_last=True)
    # The strategy "longshore" has the callback's effect.
    callbacks = [saves] if strategy == "longshore" else [saves, longshore.lightning.Callback()]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=longshore.lightning.Strategy() if strategy == "longshore" else strategy,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=clip,
        val_check_interval=6,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=output,
    )
    module = Sorting(servers, job)
    path = str(Path(output) / "last.ckpt") if checkpoint == "last" else checkpoint
    trainer.fit(module, data(), data(), ckpt_path=path)
    return module.losses


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
