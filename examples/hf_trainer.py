"""A Hugging Face Trainer script without a word of this project: see README.md for the variable at work."""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments


class RandomTokens(torch.utils.data.Dataset):
    """Sequences of random tokens: what matters here is memory, not what is learned."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--torch-compile", action="store_true")
    parser.add_argument("--save", metavar="FOLDER", default="")
    asked = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=asked.layers,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=TrainingArguments(
            output_dir="hf-trainer-output",
            per_device_train_batch_size=asked.batch,
            max_steps=asked.steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            torch_compile=asked.torch_compile,
        ),
        train_dataset=RandomTokens(config.vocab_size, asked.length),
    )
    trainer.train()
    if asked.save:
        trainer.save_model(asked.save)


if __name__ == "__main__":
    main()
