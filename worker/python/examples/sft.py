"""A tiny Llama fine-tuned by TRL's SFTTrainer, its optimizer on servers.

    python sft.py OUTPUT_DIR [SERVERS [JOB]]

Nothing is downloaded: the model is randomly initialised, and learns to count by threes, with numbers as words. Trainers that do not take
``optimizer_cls_and_kwargs``, such as the DPOTrainer, take ``optimizers=(longshore.AdamW(model.named_parameters(), ...), None)``.
"""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import longshore
from longshore.huggingface import Callback

WORDS = 64


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the numbers below ``WORDS``."""
    known = {str(number): number for number in range(WORDS)} | {"<pad>": WORDS, "<end>": WORDS + 1}
    words = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")


def main(output: str, servers: str | None = None, job: str | None = None) -> list[float]:
    """Trains, and returns the logged losses."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    texts = [" ".join(str((start + 3 * place) % WORDS) for place in range(16)) for start in range(128)]
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=WORDS + 2, max_position_embeddings=32, **sizes)),
        args=SFTConfig(
            output,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=20,
            max_length=32,
            max_grad_norm=1.0,
            logging_steps=5,
            save_steps=10,
            bf16=False,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(longshore.AdamW, {"lr": 3e-3, "servers": servers, "job": job}),
        callbacks=[Callback()],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
