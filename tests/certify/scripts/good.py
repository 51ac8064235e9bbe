"""A good script: its ranks agree on the stop, and it saves all that it needs, whole."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, STEP_S = 11, 0.03
FOLDER, LOG, RESULT = Path("checkpoints"), Path("metrics.csv"), Path("final.pt")
stop_asked = False


def on_signal(*_):
    global stop_asked
    stop_asked = True


def save(path, state):
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def newest():
    found = list(FOLDER.glob("epoch_*.pt"))
    return max(found, key=lambda path: int(path.stem.split("_")[1])) if found else None


def all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def must_stop():
    flag = torch.tensor(int(stop_asked))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def main():
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR2, on_signal)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    torch.manual_seed(1 + rank)
    first_epoch, first_batch, step = 0, 0, 0

    def state(epoch, batch):
        return {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "rng": all_ranks(torch.get_rng_state()),
            "epoch": epoch,
            "batch": batch,
            "step": step,
        }

    path = newest()
    if path is not None:
        saved = torch.load(path, weights_only=False)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        lr_scheduler.load_state_dict(saved["lr_scheduler"])
        torch.set_rng_state(saved["rng"][rank])
        first_epoch, first_batch, step = saved["epoch"], saved["batch"], saved["step"]
    if rank == 0:
        lines = LOG.read_text().splitlines() if LOG.exists() else ["step,loss"]
        kept = [line for line in lines[1:] if int(line.split(",")[0]) <= step]
        LOG.write_text("".join(f"{line}\n" for line in [lines[0], *kept]))

    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch, (inputs, targets) in enumerate(loader):
            if batch < first_batch:
                continue
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            step += 1
            time.sleep(STEP_S)
            if rank == 0:
                print(f"step {step} loss {loss.item():.6f}")
                with LOG.open("a") as log:
                    log.write(f"{step},{loss.item():.6f}\n")
            if must_stop():
                now = state(epoch, batch + 1)
                if rank == 0:
                    save(FOLDER / f"epoch_{epoch}.pt", now)
                dist.barrier()
                dist.destroy_process_group()
                sys.exit(0)
        first_batch = 0
        now = state(epoch + 1, 0)
        if rank == 0:
            with torch.no_grad():
                model.eval()
                time.sleep(STEP_S)
                print(
                    f"epoch {epoch} val_loss {nn.functional.mse_loss(model.module(data.tensors[0]), data.tensors[1]).item():.6f}"
                )
                model.train()
            save(FOLDER / f"epoch_{epoch + 1}.pt", now)
        dist.barrier()
    if rank == 0:
        save(RESULT, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
