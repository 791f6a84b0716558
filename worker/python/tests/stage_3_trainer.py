"""The Hugging Face Trainer in stage 3, as a process of test_stage_3_resumed.py. Its model is in units from the first step on."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from programs import load

from longshore import huggingface

STEPS, SAVES = 8, 3


def main(output: str, servers: str, job: str, resume: str = "") -> None:
    """Trains. Writes the Trainer's loss at each step, and the weights at the end.

    Args:
        resume: The point to continue from: ``"save"``, the Trainer's last one, or ``"newest"``, the last step that the servers decided.
    """
    example = load("trainer")
    args = transformers.TrainingArguments(
        output,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=3e-3,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_steps=SAVES,
        disable_tqdm=True,
    )
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_max_live_parameters": 30_000,
        },
        "longshore": {"servers": servers, "job": job},
    }
    model = example["tiny_llama"]()
    optimizer, scheduler = huggingface.deepspeed(config, args, model)
    assert optimizer.is_in_units
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=example["Counting"](),
        optimizers=(optimizer, scheduler),
        callbacks=[huggingface.Callback(), example["Printed"]()],
    )
    trainer.train(resume_from_checkpoint=huggingface.newest(trainer) if resume == "newest" else resume == "save")
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    torch.save((losses, model.state_dict()), Path(output) / "end.pt")
    optimizer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
