"""The shape of PyTorch's minGPT example: a program of several modules, configured by dataclasses, with torchrun's variables.

As there, local rank zero of each node writes the same snapshot in place, and data order, but no random generator, comes back.
"""

import os
import sys

import torch
import torch.distributed as dist
from char_dataset import CharDataset, DataConfig
from model import GPT, GPTConfig, OptimizerConfig, create_optimizer
from torch.utils.data import random_split
from trainer import Trainer, TrainerConfig


def ddp_setup():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def get_train_objs(gpt: GPTConfig, opt: OptimizerConfig, data: DataConfig):
    dataset = CharDataset(data)
    num_train = int(len(dataset) * data.train_split)
    train_set, test_set = random_split(dataset, [num_train, len(dataset) - num_train])
    gpt.vocab_size, gpt.block_size = dataset.vocab_size, dataset.block_size
    model = GPT(gpt)
    return model, create_optimizer(model, opt), train_set, test_set


def main(text: str, max_epochs: int):
    torch.manual_seed(0)
    ddp_setup()
    model, optimizer, train_data, test_data = get_train_objs(GPTConfig(), OptimizerConfig(), DataConfig(path=text))
    Trainer(TrainerConfig(max_epochs=max_epochs), model, optimizer, train_data, test_data).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
