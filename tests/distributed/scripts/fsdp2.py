"""The shape of PyTorch's FSDP2 example: a sharded model, and full state dicts in a folder for each time it saves.

That example takes ten steps, saves, and ends; this one does so until there are as many folders as `--rounds`.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCABULARY, LENGTH, BATCH = 256, 32, 8
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_ZERO = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Transformer(nn.Module):
    def __init__(self, layers: int = 2, width: int = 64):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        make = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Checkpointer:
    def __init__(self, folder: str):
        self.folder = folder
        os.makedirs(folder, exist_ok=True)
        self.times = sorted(int(name) for name in os.listdir(folder) if name.isdigit())

    def load(self, model, optimizer):
        newest = f"{self.folder}/{self.times[-1]}"
        state = torch.load(f"{newest}/model_state_dict.pt", mmap=True, weights_only=True, map_location="cpu")
        set_model_state_dict(model, state, options=FROM_RANK_ZERO)
        state = torch.load(f"{newest}/optim_state_dict.pt", mmap=True, weights_only=True, map_location="cpu")
        set_optimizer_state_dict(model, optimizer, state, options=FROM_RANK_ZERO)
        print(f"Loaded {len(self.times)} rounds from {newest}")

    def save(self, model, optimizer):
        model_state = get_model_state_dict(model, options=FULL)
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=FULL)
        if dist.get_rank() == 0:
            newest = f"{self.folder}/{int(time.time() * 1000)}"
            os.makedirs(newest, exist_ok=True)
            torch.save(model_state, f"{newest}/model_state_dict.pt")
            torch.save(optimizer_state, f"{newest}/optim_state_dict.pt")


def main(args):
    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    torch.manual_seed(0)
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    checkpointer = Checkpointer("checkpoints")
    if checkpointer.times:
        checkpointer.load(model, optimizer)
    dist.barrier()
    for number in range(len(checkpointer.times), args.rounds):
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        for _ in range(args.steps):
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(device)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"round {number}: loss {loss.item():.6f}")
        checkpointer.save(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    main(parser.parse_args())
