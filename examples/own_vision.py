"""A vision model of your own: it tells circles, squares and triangles apart, which are drawn as they are asked for."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.train.recipe import Recipe


class Shapes(Dataset[tuple[Tensor, int]]):
    """Shape, place and size follow from the index; the noise is new in every epoch."""

    def __init__(self, indices: range) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        index = self.indices[position]
        left, top, size = torch.rand(3, generator=torch.Generator().manual_seed(index)).mul(8).add(8).tolist()
        y, x = torch.meshgrid(torch.arange(32) - top, torch.arange(32) - left, indexing="ij")
        shapes = [x**2 + y**2 < size**2, (x.abs() < size) & (y.abs() < size), (y < size) & (2 * x.abs() - y < size)]
        kind = index % len(shapes)
        return shapes[kind].float().unsqueeze(0) + 0.5 * torch.randn(1, 32, 32), kind


def build(width: int = 16) -> Recipe:
    """What `recipe.target` names; its arguments are `recipe.args`."""
    model = nn.Sequential(
        *(nn.Conv2d(1, width, 5, stride=2), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 5, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 3)),
    )
    return Recipe(
        model=model,
        train_data=Shapes(range(3000)),
        eval_data=Shapes(range(3000, 3600)),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One value a sample: 1 where the likeliest class is the right one, else 0."""
    return (outputs.argmax(dim=1) == targets).float()
