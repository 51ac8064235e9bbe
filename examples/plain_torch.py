"""Train with plain PyTorch on several GPUs or nodes: the shape of PyTorch's tutorials, and the lines of `attach`, marked with #>.

ddp-hpc submit resources.workers_per_node=2 -- python plain_torch.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_hpc import attach  # >


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of each rank")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    run = attach()  # >
    torch.manual_seed(0)

    inputs = torch.randn(256, 20)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    order = run.order(data, batch_size=args.batch_size, seed=0)  # > in the place of a DistributedSampler
    loader = DataLoader(data, batch_sampler=order)

    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = 0
    latest = run.latest()  # >
    if latest is not None:
        state = torch.load(latest / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        order.load_state_dict(state["order"])  # >
        step = state["step"]
    ddp_model = DistributedDataParallel(model)

    def save() -> None:
        folder = run.checkpoint_dir / f"step-{step}.tmp"  # >
        if dist.get_rank() == 0:
            folder.mkdir(exist_ok=True)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "order": order.state_dict(step),  # >
                "step": step,
            }
            torch.save(state, folder / "state.pt")
        run.commit(folder, keep_last=2)  # > on all ranks

    loss = torch.tensor(0.0)
    for epoch in range(order.epoch, args.epochs):
        for source, target in loader:
            loss = nn.functional.mse_loss(ddp_model(source), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            run.report(step, loss=loss, samples=args.batch_size * dist.get_world_size())  # >
            stops = run.should_stop(step)  # >
            if stops or step % args.save_every == 0:
                save()
            if stops:  # >
                run.exit_for_requeue()  # >
        print(f"epoch {epoch}: loss {loss.item():.6f}")

    save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
