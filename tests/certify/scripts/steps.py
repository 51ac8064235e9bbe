"""A good script of another shape: steps, one file that is rewritten, JSON lines, loader processes, and no epochs."""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 30, 5


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, number):
        draw = torch.Generator().manual_seed(100 * number + int(os.environ["RANK"]))
        return torch.randn(4, 8, generator=draw), torch.randn(4, 1, generator=draw)


class Asked:
    to_stop = False

    def __init__(self, *numbers):
        for number in numbers:
            signal.signal(number, self)

    def __call__(self, number, frame):
        self.to_stop = True


def ignore_signals(_):
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


dist.init_process_group("gloo")
asked, rank = Asked(signal.SIGTERM, signal.SIGUSR2), dist.get_rank()
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
adam = torch.optim.AdamW(net.parameters())
begin = 0
if os.path.exists("last.ckpt"):
    saved = torch.load("last.ckpt")
    net.load_state_dict(saved["net"])
    adam.load_state_dict(saved["adam"])
    begin = saved["done"]
rest = torch.utils.data.Subset(Batches(), range(begin, STEPS))
loader = torch.utils.data.DataLoader(rest, batch_size=None, num_workers=1, worker_init_fn=ignore_signals)
for number, (inputs, targets) in enumerate(loader, start=begin + 1):
    adam.zero_grad()
    loss = torch.nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    adam.step()
    time.sleep(0.03)
    stop = torch.tensor(asked.to_stop)
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"iter": number, "loss": loss.item()}))
        if stop or number % EVERY == 0:
            torch.save({"net": net.state_dict(), "adam": adam.state_dict(), "done": number}, "last.ckpt.new")
            os.rename("last.ckpt.new", "last.ckpt")
    if stop:
        sys.exit(99)
dist.barrier()
dist.destroy_process_group()
