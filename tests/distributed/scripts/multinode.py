"""The shape of PyTorch's own tutorial on fault-tolerant training with torchrun: a Trainer, DDP, a snapshot, a resume."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model: nn.Module, data: DataLoader[tuple[torch.Tensor, ...]], snapshot_path: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.model = model
        self.data = data
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.optimizer.load_state_dict(snapshot["OPTIMIZER"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
            print(f"Resuming training from snapshot at Epoch {self.epochs_run}")
        self.model = DDP(self.model)

    def run_epoch(self, epoch: int) -> None:
        self.data.sampler.set_epoch(epoch)
        for source, targets in self.data:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(source), targets)
            loss.backward()
            self.optimizer.step()
        print(f"[RANK {self.rank}] Epoch {epoch} | Steps: {len(self.data)}")

    def save(self, epoch: int) -> None:
        snapshot = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER": self.optimizer.state_dict(),
            "EPOCHS_RUN": epoch,
        }
        torch.save(snapshot, self.snapshot_path + ".tmp")
        os.replace(self.snapshot_path + ".tmp", self.snapshot_path)

    def train(self, epochs: int, epoch_s: float, hold_at: int | None) -> None:
        for epoch in range(self.epochs_run, epochs):
            while epoch == hold_at and not os.path.exists("go"):
                time.sleep(0.05)
            self.run_epoch(epoch)
            time.sleep(epoch_s)
            dist.barrier()
            if self.rank == 0:
                self.save(epoch + 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--snapshot", default="snapshot.pt")
    parser.add_argument("--epoch-s", type=float, default=0.0)
    parser.add_argument("--hold-at", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    Trainer(model, loader, args.snapshot).train(args.epochs, args.epoch_s, args.hold_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
