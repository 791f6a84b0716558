"""A tiny Llama trained by the Hugging Face Trainer, its optimizer on servers.

    python trainer.py OUTPUT_DIR [SERVERS [JOB [RESUME]]]

The model is randomly initialised, and learns to count by threes. RESUME tells a killed run where to continue: ``newest`` is the last step
that the servers decided, ``save`` the Trainer's last saved one.
"""

import os
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import longshore
from longshore.huggingface import Callback, newest


class Counting(torch.utils.data.Dataset):
    """Sequences that count by threes from anywhere."""

    def __init__(self, number: int = 256) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + 3 * torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


def tiny_llama(dropout: float = 0.1) -> LlamaForCausalLM:
    """Returns a model with dropout, so that the drawn random numbers show in the losses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        attention_dropout=dropout,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


class Printed(TrainerCallback):
    """Prints a line for each step, for processes that watch this one."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"step {state.global_step}", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            print(f"loss {state.global_step} {logs['loss']!r}", flush=True)


def main(
    output: str,
    servers: str | None = None,
    job: str | None = None,
    resume: str | None = None,
    dropout: float = 0.1,
    is_built: bool = False,
    **arguments: Any,
) -> dict[int, float]:
    """Trains, and returns the Trainer's logged loss at each step."""
    options = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 40,
        "max_grad_norm": 1.0,
        "logging_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_steps": 20,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    model = tiny_llama(dropout)
    options_of_job = {"lr": 3e-3, "weight_decay": 0.0, "servers": servers, "job": job}
    if is_built:
        # Some trainers, such as TRL's DPOTrainer, take only optimizers=.
        optimizer = {"optimizers": (longshore.AdamW(model.named_parameters(), **options_of_job), None)}
    else:
        optimizer = {"optimizer_cls_and_kwargs": (longshore.AdamW, options_of_job)}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output, **options),
        train_dataset=Counting(),
        eval_dataset=Counting(32),
        callbacks=[Callback(), Printed()],
        **optimizer,
    )
    has_saved = any(name.startswith("checkpoint-") for name in os.listdir(output)) if os.path.isdir(output) else False
    trainer.train(resume_from_checkpoint=newest(trainer) if resume == "newest" else resume == "save" and has_saved)
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
