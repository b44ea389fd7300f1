"""A transformers model with balanced experts in transformers' own Trainer. Nothing is downloaded.

Ours are `balance(model, ...)` and the callback.

    python examples/hf_trainer.py

With --balancers none the model trains with its stock auxiliary loss, and the callback reports how even that is.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from evenload.models.hf import BalanceCallback, balance


class Bytes(Dataset):
    """Random windows of Python's own source; one in four is short and padded."""

    def __init__(self, length: int = 64) -> None:
        files = sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.text[index * self.length : (index + 1) * self.length].clone()
        mask = (torch.arange(self.length) < (self.length // 2 if index % 4 == 0 else self.length)).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def main(steps: int, balancers: str) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=16,
        num_experts_per_tok=2,
        output_router_logits=True,  # the stock auxiliary loss; `balance` switches it off, unless balancers are "none"
        router_aux_loss_coef=0.02,
    )
    model = balance(MixtralForCausalLM(config), balancers)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        callback = BalanceCallback()
        Trainer(model=model, args=arguments, train_dataset=Bytes(), callbacks=[callback]).train()
    print(callback.report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--balancers", default="eqb+lei")
    parsed = parser.parse_args()
    main(parsed.steps, parsed.balancers)
