"""Accelerate as its documentation shows it: `prepare` for all, and `save_state` each epoch."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def main():
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    set_seed(0)
    inputs = torch.randn(4000, 20)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    os.makedirs("saved", exist_ok=True)
    saved = sorted(int(name.removeprefix("epoch_")) for name in os.listdir("saved"))
    start = 0
    if saved:
        accelerator.load_state(f"saved/epoch_{saved[-1]}")
        start = saved[-1] + 1

    step = start * len(loader)
    for epoch in range(start, EPOCHS):
        loader.set_epoch(epoch)
        model.train()
        for source, target in loader:
            loss = nn.functional.mse_loss(model(source), target)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step} loss {loss.item():.9g}")
        accelerator.save_state(f"saved/epoch_{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
