"""Trains a little, and ends on rank 1 in the way that its argument names."""

import ctypes
import os
import resource
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

HOW = sys.argv[1]


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if HOW == "data" and rank == 1 and index == 9:
            raise ValueError("label 12 is out of range")
        return torch.full((4,), float(index))


def end(how):
    if how == "exception":
        {}["no such key"]
    elif how == "decoy":
        print("warning: CUDA out of memory. Tried to allocate 2 GiB, retrying with a smaller batch")
        print("RuntimeError: Connection closed by peer (ignored)")
        raise AssertionError("the mask is empty")
    elif how == "caught":
        import traceback

        try:
            open("/no/such/file")
        except OSError:
            traceback.print_exc()
        print("using the default instead", flush=True)
        os._exit(1)
    elif how == "nan":
        with torch.autograd.detect_anomaly():
            x = torch.zeros(1, requires_grad=True)
            (x / x).sqrt().sum().backward()
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "abort":
        os.abort()
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    elif how == "exit":
        sys.exit(3)
    elif how == "import":
        import no_such_module
    elif how == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        try:
            with open("big.bin", "wb", buffering=0) as file:
                file.write(bytes(10))
                file.write(bytes(10))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)  # the logs are on another disk, as it were
    elif how == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        torch.zeros(1 << 40)
    elif how == "port":
        taken = socket.create_server(("127.0.0.1", 0))
        socket.create_server(taken.getsockname())
    elif how == "dns":
        socket.getaddrinfo("no-such-host.invalid", 80)
    elif how == "hang":
        time.sleep(1000)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 1)
for step, batch in enumerate(DataLoader(Numbers(), batch_size=4)):
    model(batch).sum().backward()
    for one in model.parameters():
        dist.all_reduce(one.grad)
    if step == 3 and rank == 1:
        end(HOW)
