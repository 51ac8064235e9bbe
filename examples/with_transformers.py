"""Train with Hugging Face's Trainer, and come back after a stop; what ddp_hpc needs is marked with `# ddp_hpc`.

ddp-hpc submit resources.workers_per_node=2 -- python with_transformers.py
"""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ddp_hpc import attach  # ddp_hpc
from ddp_hpc.train.adapters.transformers import AgreedStop  # ddp_hpc


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers that grow by the same step."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = (torch.arange(16) * (index % 7 + 1) + index) % 64
        return {"input_ids": numbers, "labels": numbers}


class PrintsLosses(Trainer):  # type: ignore[misc]
    """A Trainer that prints the loss of each step."""

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **options)
        print(f"step {self.state.global_step + 1} loss {loss.item():.9g}")
        return loss


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir="output",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        save_steps=20,
        save_total_limit=2,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        seed=0,
        use_cpu=not torch.cuda.is_available(),
    )
    callback = AgreedStop(attach())  # ddp_hpc
    trainer = PrintsLosses(
        model=GPT2LMHeadModel(config), args=args, train_dataset=Counting(), callbacks=[callback]
    )  # ddp_hpc
    trainer.train(resume_from_checkpoint=callback.latest())  # ddp_hpc


if __name__ == "__main__":
    main()
