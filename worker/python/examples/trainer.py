"""A tiny Llama trained by the Hugging Face Trainer, its optimizer on servers.

    python trainer.py OUTPUT_DIR [SERVERS]

The model is randomly initialised, and learns to count by threes.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import longshore
from longshore.huggingface import Callback


class Counting(torch.utils.data.Dataset):
    """Sequences that count by threes from anywhere."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + 3 * torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


def main(output: str, servers: str | None = None) -> list[float]:
    """Trains, and returns the losses that the Trainer logged."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=40,
            max_grad_norm=1.0,
            logging_steps=10,
            save_steps=20,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Counting(),
        optimizer_cls_and_kwargs=(longshore.AdamW, {"lr": 3e-3, "servers": servers}),
        callbacks=[Callback()],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
