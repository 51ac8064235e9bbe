"""A language model of your own: a small GPT that reads Python's manual, byte by byte."""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddp_hpc.train.recipe import Recipe

NUM_BYTES = 256


class Block(nn.Module):
    """Attention to what came before, and two layers on each byte."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (sample, head, place, channel)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        thought: Tensor = self.layers(self.norm2(x))
        return x + thought


class TinyGPT(nn.Module):
    """Bytes in, (sample, place, byte) logits of the next ones out."""

    def __init__(self, *, context: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.places = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_BYTES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.bytes(x) + self.places))
        return logits


def build(*, context: int = 128, width: int = 128, num_layers: int = 2, num_heads: int = 4) -> Recipe:
    """What `recipe.target` names; its arguments are `recipe.args`."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    samples = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    samples = samples[: (len(text) - 1) // context * context + 1].unfold(0, context + 1, context)
    inputs, targets = samples[:, :-1], samples[:, 1:]
    num_train = len(samples) * 9 // 10
    return Recipe(
        model=TinyGPT(context=context, width=width, num_layers=num_layers, num_heads=num_heads),
        train_data=TensorDataset(inputs[:num_train], targets[:num_train]),
        eval_data=TensorDataset(inputs[num_train:], targets[num_train:]),
        loss=cross_entropy,
        optimizer=adamw,
        metrics={"next_byte_accuracy": next_byte_accuracy},
    )


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all bytes; as samples are equally long, that is the mean over the samples."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def next_byte_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One value a sample: the share of its bytes that were predicted."""
    return (outputs.argmax(dim=-1) == targets).float().mean(dim=1)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW as language models like it; without this, the `optimizer` section would be used."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
