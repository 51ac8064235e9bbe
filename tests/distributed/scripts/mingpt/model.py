from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class GPTConfig:
    vocab_size: int = 0
    block_size: int = 0
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32
    pdrop: float = 0.0


@dataclass
class OptimizerConfig:
    learning_rate: float = 3e-4
    weight_decay: float = 0.1


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        block = nn.TransformerEncoderLayer(
            config.n_embd, config.n_head, 4 * config.n_embd, config.pdrop, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, config.n_layer, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, indices, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(indices.size(1), device=indices.device)
        hidden = self.blocks(self.tokens(indices) + self.positions[:, : indices.size(1)], mask=mask, is_causal=True)
        logits = self.head(self.norm(hidden))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def create_optimizer(model: nn.Module, config: OptimizerConfig):
    decayed = [one for one in model.parameters() if one.dim() == 2]
    others = [one for one in model.parameters() if one.dim() != 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))
