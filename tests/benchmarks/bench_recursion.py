"""A training step by the serving recursion against one by FastMTP's plain recursion: same head, rows and loss.

Half of the tokens are supervised. Plain recursion must run every position at every step; serving needs its later
steps at supervised origins alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmtp.data.rows import PackedRows
from fastmtp.head import MTPHead, head_from_config
from fastmtp.losses import chunked_cross_entropy
from tests.benchmarks.measure import Metric, median_seconds, metric
from tests.fastmtp.fixtures import config_dict

HIDDEN, VOCABULARY, ROWS, LENGTH, STEPS = 256, 8192, 8, 256, 3
WEIGHTS = (0.5102, 0.3061, 0.1837)


def inputs() -> tuple[MTPHead, PackedRows, Tensor, Tensor]:
    torch.manual_seed(0)
    config = config_dict("qwen3-next") | {
        "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_experts": 8, "moe_intermediate_size": HIDDEN,
        "shared_expert_intermediate_size": HIDDEN, "head_dim": 64, "max_position_embeddings": 1024,
    }  # fmt: skip
    head = head_from_config(config)
    head.initialize(0.02)
    total = ROWS * LENGTH
    mask = (torch.arange(LENGTH) >= LENGTH // 2).repeat(ROWS)
    rows = PackedRows(torch.randint(VOCABULARY, (total,)), torch.randn(total, HIDDEN), mask, (LENGTH,) * ROWS)
    return head, rows, torch.randn(VOCABULARY, HIDDEN), torch.randn(VOCABULARY, HIDDEN) * 0.05


def step(recursion: str, head: MTPHead, rows: PackedRows, embedding: Tensor, output: Tensor) -> None:
    counted = [rows.counted(number) for number in range(STEPS)]
    origins = torch.stack(counted).any(0)
    losses = []
    for number, found in enumerate(getattr(head, recursion)(rows, embedding, STEPS, origins)):
        kept = counted[number][found.origins]
        targets = rows.input_ids[found.origins[kept] + number + 2]
        losses.append(WEIGHTS[number] * chunked_cross_entropy(found.states[kept], output, targets)[0] / len(targets))
    torch.stack(losses).sum().backward()
    head.zero_grad()


def run() -> dict[str, Metric]:
    made = inputs()
    seconds = median_seconds({"serving": lambda: step("serving", *made), "plain": lambda: step("plain", *made)})
    return {"step_seconds": metric(seconds["serving"], "s", peer=seconds["plain"], goal=1.0)}
