"""Train with plain PyTorch on several GPUs or nodes: the shape of PyTorch's tutorials, and the lines of `attach`, marked with `# ddp_hpc`.

ddp-hpc submit resources.workers_per_node=2 -- python plain_torch.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_hpc import attach  # ddp_hpc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of each rank")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    args = parser.parse_args()

    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    run = attach()  # ddp_hpc
    rank = dist.get_rank()
    torch.manual_seed(0)

    inputs = torch.randn(256, 20)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    order = run.order(data, batch_size=args.batch_size, seed=0)  # ddp_hpc: in the place of a DistributedSampler
    # A generator of its own: each `iter(loader)` draws a number, and a resumed epoch would draw one more from PyTorch's.
    loader = DataLoader(data, batch_sampler=order, generator=torch.Generator())

    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)  # from here on, ranks draw different numbers
    step = 0
    latest = run.latest()  # ddp_hpc
    if latest is not None:
        state = torch.load(latest / "state.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order.load_state_dict(state["order"])  # ddp_hpc
        step = state["step"]
        rng = torch.load(latest / f"rng-{rank}.pt")
        torch.set_rng_state(rng["cpu"])
        if has_gpus:
            torch.cuda.set_rng_state(rng["cuda"])
    ddp_model = DistributedDataParallel(model)

    def save() -> None:
        folder = run.checkpoint_dir / f"step-{step}.tmp"  # ddp_hpc
        folder.mkdir(exist_ok=True)
        rng = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if has_gpus else None}
        torch.save(rng, folder / f"rng-{rank}.pt")
        if rank == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "order": order.state_dict(step),  # ddp_hpc
                "step": step,
            }
            torch.save(state, folder / "state.pt")
        run.commit(folder, keep_last=2)  # ddp_hpc: on all ranks

    loss = torch.tensor(0.0)
    for epoch in range(order.epoch, args.epochs):
        for batch in loader:
            source, target = (tensor.to(device) for tensor in batch)
            loss = nn.functional.mse_loss(ddp_model(source), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            run.report(step, loss=loss, samples=args.batch_size * dist.get_world_size())  # ddp_hpc
            stops = run.should_stop(step)  # ddp_hpc
            if stops or step % args.save_every == 0:
                save()
            if stops:  # ddp_hpc
                run.exit_for_requeue()  # ddp_hpc
        print(f"epoch {epoch}: loss {loss.item():.6f}")

    save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
