"""Lightning as its documentation shows it: a checkpoint each epoch, and `ckpt_path="last"`."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        print(f"step {self.global_step + 1} loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num-nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    lightning.seed_everything(0)
    inputs = torch.randn(4000, 20)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="auto",
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy="ddp",
        callbacks=[ModelCheckpoint(dirpath="saved", save_last=True)],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=4, shuffle=True), ckpt_path="last")


if __name__ == "__main__":
    main()
