"""Train with Lightning, and come back after a stop; what ddp_hpc needs is marked with `# ddp_hpc`.

ddp-hpc submit resources.workers_per_node=2 -- python with_lightning.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_hpc import attach  # ddp_hpc
from ddp_hpc.train.adapters.lightning import AgreedStop, cluster_environment  # ddp_hpc

EPOCHS, BATCH_SIZE = 6, 4


class Net(lightning.LightningModule):  # type: ignore[misc]
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        print(f"step {self.global_step + 1} loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    lightning.seed_everything(0)
    inputs = torch.randn(400, 20)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    run = attach()  # ddp_hpc
    order = run.order(data, batch_size=BATCH_SIZE, seed=0)  # ddp_hpc
    callback = AgreedStop(run, save_every=20, order=order)  # ddp_hpc
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="auto",
        devices=run.local_world_size,  # ddp_hpc
        num_nodes=run.num_nodes,  # ddp_hpc
        strategy="ddp",
        plugins=[cluster_environment()],  # ddp_hpc
        callbacks=[callback],  # ddp_hpc
        use_distributed_sampler=False,  # ddp_hpc: `run.order` has distributed the samples already
        enable_checkpointing=False,  # ddp_hpc: the callback saves
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_sampler=order), ckpt_path=callback.latest())  # ddp_hpc


if __name__ == "__main__":
    main()
