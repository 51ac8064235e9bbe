"""The shape of PyTorch's ImageNet example: options at module level, `env://`, a sampler per epoch, StepLR, and two checkpoint files.

As there, each rank writes the same `checkpoint.pth.tar` in place, and the best one is copied.
"""

import argparse
import os
import random
import shutil
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision.models as models
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import FakeData, ImageFolder

parser = argparse.ArgumentParser(description="Train a classifier of images")
parser.add_argument("data", nargs="?", default="imagenet", metavar="DIR")
parser.add_argument("-a", "--arch", default="shufflenet_v2_x0_5", choices=models.list_models())
parser.add_argument("-j", "--workers", default=1, type=int, metavar="N")
parser.add_argument("--epochs", default=4, type=int, metavar="N")
parser.add_argument("--start-epoch", default=0, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=8, type=int, metavar="N")
parser.add_argument("--lr", "--learning-rate", default=0.05, type=float, metavar="LR", dest="lr")
parser.add_argument("--momentum", default=0.9, type=float, metavar="M")
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, metavar="W", dest="weight_decay")
parser.add_argument("-p", "--print-freq", default=10, type=int, metavar="N")
parser.add_argument("--resume", default="", type=str, metavar="PATH")
parser.add_argument("-e", "--evaluate", action="store_true")
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="tcp://224.66.41.62:23456", type=str)
parser.add_argument("--dist-backend", default="nccl", type=str)
parser.add_argument("--seed", default=None, type=int)
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")
parser.add_argument("--dummy", type=int, metavar="IMAGES", help="train on this many made-up images")
best_acc1 = 0.0


def main():
    args = parser.parse_args()
    if args.seed is not None:
        random.seed(args.seed)
        torch.manual_seed(args.seed)
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    gpus = torch.cuda.device_count()
    if args.multiprocessing_distributed:
        args.world_size *= gpus
        mp.spawn(worker, nprocs=gpus, args=(gpus, args))
    else:
        worker(args.gpu, gpus, args)


def worker(gpu, gpus, args):
    global best_acc1
    args.gpu = gpu
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        if args.multiprocessing_distributed:
            args.rank = args.rank * gpus + gpu
        dist.init_process_group(
            args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
        )

    print(f"=> creating model '{args.arch}'")
    device = torch.device("cuda", args.gpu or 0) if gpus else torch.device("cpu")
    model = models.get_model(args.arch, num_classes=10).to(device)
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)

    if args.resume:
        if os.path.isfile(args.resume):
            checkpoint = torch.load(args.resume, map_location=device)
            args.start_epoch = checkpoint["epoch"]
            best_acc1 = checkpoint["best_acc1"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
            print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")
        else:
            print(f"=> no checkpoint found at '{args.resume}'")

    if args.dummy:
        train_data = FakeData(args.dummy, (3, 64, 64), 10, transforms.ToTensor())
        val_data = FakeData(args.dummy // 8, (3, 64, 64), 10, transforms.ToTensor(), random_offset=args.dummy)
    else:
        to_tensor = transforms.Compose([transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor()])
        train_data = ImageFolder(os.path.join(args.data, "train"), to_tensor)
        val_data = ImageFolder(os.path.join(args.data, "val"), to_tensor)
    train_sampler = DistributedSampler(train_data) if args.distributed else None
    val_sampler = DistributedSampler(val_data, shuffle=False, drop_last=True) if args.distributed else None
    options = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": bool(gpus)}
    train_loader = DataLoader(train_data, shuffle=train_sampler is None, sampler=train_sampler, **options)
    val_loader = DataLoader(val_data, shuffle=False, sampler=val_sampler, **options)

    if args.evaluate:
        validate(val_loader, model, criterion, device, args)
        return

    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, device, args)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if not args.multiprocessing_distributed or args.rank % gpus == 0:
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "arch": args.arch,
                    "state_dict": model.state_dict(),
                    "best_acc1": best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
            )


def train(loader, model, criterion, optimizer, epoch, device, args):
    losses = AverageMeter()
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{i + 1}/{len(loader)}]\tTime {time.time() - end:.3f}\tLoss {losses.average:.4e}")
        end = time.time()


def validate(loader, model, criterion, device, args):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images.to(device))
            losses.update(criterion(output, target.to(device)).item(), images.size(0))
            right = (output.argmax(dim=1).cpu() == target).float().mean().item()
            top1.update(100 * right, images.size(0))
    if args.distributed:
        top1.all_reduce(device)
        losses.all_reduce(device)
    print(f" *   Acc@1 {top1.average:.3f}")
    return top1.average


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    @property
    def average(self):
        return self.sum / max(1, self.count)

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self, device):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device=device)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()


if __name__ == "__main__":
    main()
