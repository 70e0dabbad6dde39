"""A training step at any size, for benchmarks: a Qwen3-Next head, rows half of which is supervised, and the loss."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from fastmtp.config import TrainConfig
from fastmtp.data.rows import PackedRows
from fastmtp.head import head_from_config
from fastmtp.training.objective import Objective
from tests.fastmtp.fixtures import config_dict

Recursion = Literal["serving", "plain"]


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

    objective: Objective
    rows: PackedRows


def make(sizes: Sizes, recursion: Recursion = "serving") -> Made:
    torch.manual_seed(0)
    head = head_from_config(sizes.layer())
    head.initialize(0.02)
    length = sizes.tokens // sizes.rows
    mask = (torch.arange(length) >= length // 2).repeat(sizes.rows)
    ids, states = torch.randint(sizes.vocabulary, (sizes.tokens,)), torch.randn(sizes.tokens, sizes.hidden)
    rows = PackedRows(ids, states, mask, (length,) * sizes.rows)
    embedding, output = (torch.randn(sizes.vocabulary, sizes.hidden).mul_(0.02) for _ in range(2))
    config = TrainConfig(num_steps=sizes.steps, recursion=recursion)
    return Made(Objective(head, embedding, output, config), rows)


def train_step(made: Made) -> None:
    """Forward and backward, by the training loop's own objective."""
    totals = [float(made.rows.counted(step).sum()) for step in range(made.objective.config.num_steps)]
    loss, _ = made.objective(made.rows, totals)
    loss.backward()
    made.objective.zero_grad()


def products(made: Made) -> None:
    """The two matrix products that nobody can avoid at the same tokens: logits, and their way back to the states."""
    size, output = 256, made.objective.verifier[1]
    states = torch.randn(size, output.shape[1])
    logits, back = torch.empty(size, output.shape[0]), torch.empty_like(states)
    tokens = made.objective.config.num_steps * int(made.rows.loss_mask.sum())
    for _ in range(tokens // size):
        torch.mm(states, output.T, out=logits)
        torch.mm(logits, output, out=back)
