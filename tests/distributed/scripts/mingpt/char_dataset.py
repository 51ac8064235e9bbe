from dataclasses import dataclass

import torch
from torch.utils.data import Dataset


@dataclass
class DataConfig:
    path: str
    block_size: int = 32
    train_split: float = 0.9


class CharDataset(Dataset):
    def __init__(self, config: DataConfig):
        with open(config.path, encoding="utf-8") as file:
            self.data = file.read()
        self.stoi = {char: number for number, char in enumerate(sorted(set(self.data)))}
        self.block_size, self.vocab_size = config.block_size, len(self.stoi)
        print(f"Data has {len(self.data)} characters, {self.vocab_size} unique.")

    def __len__(self):
        return (len(self.data) - 1) // self.block_size

    def __getitem__(self, index):
        start = index * self.block_size
        numbers = torch.tensor([self.stoi[char] for char in self.data[start : start + self.block_size + 1]])
        return numbers[:-1], numbers[1:]
