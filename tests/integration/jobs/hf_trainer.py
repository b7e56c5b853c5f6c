"""A tiny Llama under the Hugging Face Trainer: four steps, an evaluation before them, compiled if asked."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(64)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="no",
        torch_compile="--compile" in sys.argv,
        torch_compile_backend="eager" if "--compile" in sys.argv else None,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, eval_dataset=rows[:4])
    trainer.evaluate()
    trainer.train()
