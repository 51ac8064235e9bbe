"""Hugging Face's Trainer as its documentation shows it: a checkpoint each epoch, and the newest one to resume from."""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        numbers = (torch.arange(16) * (index % 7 + 1) + index) % 64
        return {"input_ids": numbers, "labels": numbers}


class PrintsLosses(Trainer):
    def training_step(self, *args, **options):
        loss = super().training_step(*args, **options)
        print(f"step {self.state.global_step + 1} loss {loss.item():.9g}")
        return loss


def main():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir="saved",
        num_train_epochs=4,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = PrintsLosses(model=GPT2LMHeadModel(config), args=args, train_dataset=Counting())
    newest = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()
