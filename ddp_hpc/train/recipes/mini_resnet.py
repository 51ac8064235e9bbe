"""MiniResNet: a small residual network for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    The last batch norm starts with zero gain, so a new block passes its shortcut through
    (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, 5.1).
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        nn.init.zeros_(self.bn2.weight)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and in_channels == channels
            else nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class MiniResNet(nn.Module):
    """A stem, three stages of widths w, 2w and 4w, the mean over the image, and a classifier.

    Images need at least 4 pixels a side: every stage after the first halves them.
    """

    def __init__(self, *, in_channels: int, num_classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.stages = nn.Sequential(
            nn.Sequential(BasicBlock(width, width, 1)),
            nn.Sequential(BasicBlock(width, 2 * width, 2)),
            nn.Sequential(BasicBlock(2 * width, 4 * width, 2)),
        )
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.stages(self.stem(x))
        return self.fc(features.mean(dim=(2, 3)))  # type: ignore[no-any-return]  # a module's call is untyped
