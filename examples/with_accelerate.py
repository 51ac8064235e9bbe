"""Train with Hugging Face's Accelerate, and come back after a stop; what ddp_hpc needs is marked with `# ddp_hpc`.

ddp-hpc submit resources.workers_per_node=2 -- python with_accelerate.py
"""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_hpc import attach  # ddp_hpc

EPOCHS, BATCH_SIZE, SAVE_EVERY = 6, 4, 20


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available()
    )  # without `cpu`, ranks without GPUs would each train alone
    run = attach()  # ddp_hpc
    inputs = torch.randn(400, 20)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    order = run.order(data, batch_size=BATCH_SIZE, seed=0)  # ddp_hpc
    # Not for `prepare`, which would distribute it a second time. With a generator of its own, because each `iter(loader)` draws a
    # number from PyTorch's: a resumed epoch would draw one more, and dropout would differ from then on.
    loader = DataLoader(data, batch_sampler=order, generator=torch.Generator())
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)

    step = 0
    latest = run.latest()  # ddp_hpc
    if latest is not None:
        accelerator.load_state(latest)
        step = json.loads((latest / "order.json").read_text())["step"]
        order.load_state_dict(json.loads((latest / "order.json").read_text()))  # ddp_hpc

    def save() -> None:
        folder = run.checkpoint_dir / f"step-{step}.tmp"  # ddp_hpc
        folder.mkdir(exist_ok=True)
        accelerator.save_state(folder)
        if accelerator.is_main_process:
            (folder / "order.json").write_text(json.dumps(order.state_dict(step)))  # ddp_hpc
        run.commit(folder, keep_last=2)  # ddp_hpc: on all ranks

    for _ in range(order.epoch, EPOCHS):
        for batch in loader:
            source, target = (tensor.to(accelerator.device) for tensor in batch)
            loss = nn.functional.mse_loss(model(source), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step} loss {loss.item():.9g}")
            run.report(step, loss=loss, samples=BATCH_SIZE * accelerator.num_processes)  # ddp_hpc
            stops = run.should_stop(step)  # ddp_hpc
            if stops or step % SAVE_EVERY == 0:
                save()
            if stops:  # ddp_hpc
                run.exit_for_requeue()  # ddp_hpc
    save()
    accelerator.end_training()


if __name__ == "__main__":
    main()
