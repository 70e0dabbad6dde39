"""A training step at any size, for benchmarks: a Qwen3-Next head, rows half of which is supervised, and the loss."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fastmtp.data.rows import PackedRows
from fastmtp.head import MTPHead, head_from_config
from fastmtp.losses import token_losses
from tests.fastmtp.fixtures import config_dict

WEIGHTS = (0.5102, 0.3061, 0.1837)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step. `rows` of `tokens` in all, equally long; the second half of each is the assistant's."""

    tokens: int
    vocabulary: int
    hidden: int = 512
    steps: int = 3
    rows: int = 1

    def layer(self) -> dict[str, Any]:
        """config.json of the model whose head it is: 8 experts of which 2 are asked."""
        return config_dict("qwen3-next") | {
            "vocab_size": self.vocabulary, "hidden_size": self.hidden, "num_experts": 8,
            "moe_intermediate_size": self.hidden, "shared_expert_intermediate_size": self.hidden,
            "num_attention_heads": self.hidden // 64, "num_key_value_heads": 2, "head_dim": 64,
            "max_position_embeddings": 16384,
        }  # fmt: skip

    def asdict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Made:
    """What a step needs, made once."""

    head: MTPHead
    rows: PackedRows
    embedding: Tensor
    output: Tensor


def make(sizes: Sizes) -> Made:
    torch.manual_seed(0)
    head = head_from_config(sizes.layer())
    head.initialize(0.02)
    length = sizes.tokens // sizes.rows
    mask = (torch.arange(length) >= length // 2).repeat(sizes.rows)
    ids, states = torch.randint(sizes.vocabulary, (sizes.tokens,)), torch.randn(sizes.tokens, sizes.hidden)
    rows = PackedRows(ids, states, mask, (length,) * sizes.rows)
    embedding, output = (torch.randn(sizes.vocabulary, sizes.hidden).mul_(0.02) for _ in range(2))
    return Made(head, rows, embedding, output)


def train_step(made: Made, recursion: str = "serving", steps: int = 3) -> None:
    """Forward and backward, as the training loop does it: all steps' losses in one call."""
    rows = made.rows
    counted = [rows.counted(step) for step in range(steps)]
    outputs = made.head(rows, made.embedding, steps, torch.stack(counted).any(0), recursion)
    kept = [counted[step][output.origins] for step, output in enumerate(outputs)]
    states = torch.cat([output.states[keep] for output, keep in zip(outputs, kept, strict=True)])
    targets = torch.cat(
        [rows.input_ids[o.origins[keep] + step + 2] for step, (o, keep) in enumerate(zip(outputs, kept, strict=True))]
    )
    scale = torch.cat([torch.full((int(keep.sum()),), WEIGHTS[step]) / keep.sum() for step, keep in enumerate(kept)])
    token_losses(states, made.output, targets, scale=scale).total.backward()
    made.head.zero_grad()


def products(made: Made, tokens: int, steps: int = 3) -> None:
    """The two matrix products that nobody can avoid, for `tokens` supervised tokens: logits, and their way back."""
    size = 256
    states = torch.randn(size, made.output.shape[1])
    logits, back = torch.empty(size, made.output.shape[0]), torch.empty_like(states)
    for _ in range(steps * tokens // size):
        torch.mm(states, made.output.T, out=logits)
        torch.mm(logits, made.output, out=back)
